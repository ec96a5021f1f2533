"""Calls go to workers in bounded batches, values that responses share are sent once, and failures are counted."""

from __future__ import annotations

import json
from collections import deque
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.calls import (
    BATCH,
    FIRST,
    WINDOW,
    Call,
    FailureCount,
    VerdictSink,
    batch_message,
    calls_of,
    next_batch,
)
from mugrpo_megatron.rewards.items import Needs, ScoringInput, Verdict

ROW = {"tests": "x" * 10_000}


class Sink:
    def __init__(self) -> None:
        self.verdicts: dict[int, Verdict] = {}

    def put(self, index: int, verdict: Verdict) -> None:
        assert index not in self.verdicts
        self.verdicts[index] = verdict


@given(st.integers(0, 40), st.integers(1, 12))
def test_every_verdict_reaches_its_index(count: int, most: int) -> None:
    sink = Sink()
    items = [ScoringInput(str(n), "", "") for n in range(count)]
    calls = list(calls_of(cast(VerdictSink, sink), range(count), items, most))
    assert all(1 <= len(call.items) <= most for call in calls)
    for call in reversed(calls):
        call.finish([Verdict(float(item.response), "", "") for item in call.items])
    assert {index: verdict.reward for index, verdict in sink.verdicts.items()} == {n: float(n) for n in range(count)}


@given(st.lists(st.integers(1, 40), max_size=40))
def test_a_batch_is_bounded_and_takes_the_calls_in_order(sizes: list[int]) -> None:
    queue = deque(Call([ScoringInput(str(n), "", "")] * size, []) for n, size in enumerate(sizes))
    seen: list[Any] = []
    while queue:
        batch = next_batch(queue)
        assert len(batch) == 1 or sum(len(call.items) for call in batch) <= BATCH
        seen += [call.items[0].response for call in batch]
    assert seen == [str(n) for n in range(len(sizes))]


def test_a_row_is_sent_once_and_only_to_functions_that_read_it() -> None:
    items = [ScoringInput(str(n), "gold", "", ROW, "asked", "s", [1, 2]) for n in range(8)]
    call = Call(items, [])
    _, whole = batch_message([call], Needs(8, True, True, True), 1 << 20)
    assert len(json.loads(whole)["subjects"]) == 1
    assert len(whole) < 11_000
    _, bare = batch_message([call], Needs(8), 1 << 20)
    assert len(bare) < 500
    assert [sent[0] for sent in json.loads(bare)["calls"][0]] == [str(n) for n in range(8)]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=BATCH), st.integers(1, 1000), st.booleans())
def test_a_message_is_bounded_and_takes_the_calls_in_order(sizes: list[int], most: int, shared: bool) -> None:
    rows = [{"n": n, "tests": "\u00e9" * size} for n, size in enumerate(sizes)]
    rows = [rows[0]] * len(rows) if shared else rows
    calls = [Call([ScoringInput(str(n), "", "", row)], []) for n, row in enumerate(rows)]
    count, text = batch_message(calls, Needs(row=True), most)
    found = json.loads(text)
    assert [call[0][0] for call in found["calls"]] == [str(n) for n in range(count)]
    assert [found["subjects"][call[0][1]][1] for call in found["calls"]] == rows[:count]
    assert len(found["subjects"]) == (1 if shared else count)
    overhead = len('{"calls": [], "subjects": []}') + 4 * count
    assert count == 1 or len(text) <= most + overhead
    if count < len(calls):
        _, longer = batch_message(calls[: count + 1], Needs(row=True), 1 << 20)
        assert len(longer) > most


def test_a_call_that_a_worker_died_on_is_sent_alone() -> None:
    queue = deque(Call([ScoringInput(str(n), "", "")], [], crashes=n in (0, 3)) for n in range(6))
    batches = []
    while queue:
        batches.append([call.items[0].response for call in next_batch(queue)])
    assert batches == [["0"], ["1", "2"], ["3"], ["4", "5"]]


@given(st.lists(st.booleans(), max_size=400), st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0]))
def test_the_share_of_failures_that_is_allowed(failed: list[bool], share: float) -> None:
    count = FailureCount(RewardSection(max_failure_share=share))
    for place, one in enumerate(failed, start=1):
        if one and sum(failed[:place]) > share * max(place, FIRST):
            with pytest.raises(UserError, match=f"failed on {sum(failed[:place])} of the latest {place} responses"):
                count.add(one, "why", "response", "gold")
            break
        count.add(one, "why", "response", "gold")


def test_a_function_that_breaks_late_is_noticed() -> None:
    count = FailureCount(RewardSection())
    for _ in range(3 * WINDOW):
        count.add(False, "", "", "")
    for _ in range(WINDOW // 100):
        count.add(True, "", "", "")
    with pytest.raises(UserError, match=f"failed on 101 of the latest {WINDOW} responses"):
        count.add(True, "", "", "")
