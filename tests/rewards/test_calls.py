"""Calls go to workers in bounded batches, and what responses share is sent once."""

from __future__ import annotations

import json
from collections import deque
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.rewards.calls import BATCH, Call, Taker, calls_of, message, next_batch
from mugrpo_megatron.rewards.items import Item, Needs, Verdict

ROW = {"tests": "x" * 10_000}


class Taken:
    def __init__(self) -> None:
        self.verdicts: dict[int, Verdict] = {}

    def put(self, place: int, verdict: Verdict) -> None:
        assert place not in self.verdicts
        self.verdicts[place] = verdict


@given(st.integers(0, 40), st.integers(1, 12))
def test_every_verdict_reaches_its_place(count: int, most: int) -> None:
    taken = Taken()
    items = [Item(str(n), "", "") for n in range(count)]
    calls = list(calls_of(cast(Taker, taken), range(count), items, [None] * count, most))
    assert all(1 <= len(call.items) <= most for call in calls)
    for call in reversed(calls):
        call.answer([Verdict(float(item.response), "", "") for item in call.items])
    assert {place: verdict.reward for place, verdict in taken.verdicts.items()} == {n: float(n) for n in range(count)}


@given(st.lists(st.integers(1, 40), max_size=40))
def test_a_batch_is_bounded_and_takes_the_calls_in_order(sizes: list[int]) -> None:
    queue = deque(Call([Item(str(n), "", "")] * size, [None] * size, []) for n, size in enumerate(sizes))
    seen: list[Any] = []
    while queue:
        batch = next_batch(queue)
        assert len(batch) == 1 or sum(len(call.items) for call in batch) <= BATCH
        seen += [call.items[0].response for call in batch]
    assert seen == [str(n) for n in range(len(sizes))]


def test_a_row_is_sent_once_and_only_to_functions_that_read_it() -> None:
    items = [Item(str(n), "gold", "", ROW, "asked", "s", [1, 2]) for n in range(8)]
    call = Call(items, [None] * 8, [])
    whole = message([call], Needs(8, True, True, True))
    assert len(whole["subjects"]) == 1
    assert len(json.dumps(whole)) < 11_000
    bare = message([call], Needs(8))
    assert len(json.dumps(bare)) < 500
    assert [sent[0] for sent in bare["calls"][0]] == [str(n) for n in range(8)]
