"""Unfinished groups on disk: whole or nothing, and for the same weights and settings alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.samples import UNFINISHED, Response
from mugrpo_megatron.stages.unfinished import Begun, read_unfinished, unfinished_path, write_unfinished

OF = {"version": 3, "sampling": {"temperature": 1.0, "stop_ids": (1, 2)}}
LAYERS, CHOSEN, KEPT = 2, 3, 4


def response(seed: int, tokens: int, kept: bool, routes: bool, prompt: int = 3) -> Response:
    rng = np.random.default_rng(seed)
    places = prompt + tokens - 1 if tokens else 0
    return Response(
        rng.integers(0, 1 << 17, tokens, dtype=np.int32),
        -rng.random(tokens, dtype=np.float32),
        UNFINISHED if seed % 2 else "stop",
        3,
        kept=rng.integers(-1, 99, (tokens, KEPT), dtype=np.int32) if kept else None,
        routes=rng.integers(0, 200, (LAYERS, places, CHOSEN), dtype=np.uint8) if routes else None,
    )


def same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return (one is None) == (other is None) and (one is None or other is None or np.array_equal(one, other))


@given(
    sizes=st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=3), min_size=1, max_size=4),
    kept=st.booleans(),
    routes=st.booleans(),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]], kept: bool, routes: bool
) -> None:
    path = unfinished_path(tmp_path_factory.mktemp("stage"), 2)
    groups = {
        7 * number: Begun([number, 5, 9], [response(number + i, n, kept, routes) for i, n in enumerate(group)])
        for number, group in enumerate(sizes)
    }
    write_unfinished(path, groups, OF)
    found = read_unfinished(path, OF)
    assert found.keys() == groups.keys()
    for index, group in groups.items():
        assert found[index].prompt_ids == group.prompt_ids
        for got, wrote in zip(found[index].responses, group.responses, strict=True):
            assert (got.finish_reason, got.weight_version) == (wrote.finish_reason, wrote.weight_version)
            assert same(got.ids, wrote.ids)
            assert same(got.logprobs, wrote.logprobs)
            assert same(got.kept, wrote.kept)
            assert same(got.routes, wrote.routes)
    write_unfinished(path, {}, OF)
    assert list(path.parent.iterdir()) == []


def test_nothing_is_taken_of_other_weights_or_settings_or_damaged_bytes(tmp_path: Path) -> None:
    path = unfinished_path(tmp_path, 0)
    assert read_unfinished(path, OF) == {}
    write_unfinished(path, {1: Begun([1], [response(1, 40, True, False)])}, OF)
    assert read_unfinished(path, OF)[1].tokens == 40
    assert read_unfinished(path, {**OF, "version": 4}) == {}
    assert read_unfinished(path, {**OF, "sampling": {"temperature": 0.9, "stop_ids": (1, 2)}}) == {}
    content = path.read_bytes()
    place = content.index(b"PK", 4) // 2
    for damaged in (
        content[: len(content) // 2],
        content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :],
    ):
        path.write_bytes(damaged)
        assert read_unfinished(path, OF) == {}
