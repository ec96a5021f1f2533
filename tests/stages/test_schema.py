"""When a shard is due, what of its file is read at once, and log-probabilities bound to their stage and policy."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.samples import InMemoryRoutes, Sample
from mugrpo_megatron.stages import schema
from mugrpo_megatron.stages.columns import LogprobColumn
from mugrpo_megatron.stages.schema import ShardBuffer, write_shard
from tests.engine.tiny import group


def routed(index: int, layers: int) -> list[Sample]:
    """A group with one byte of routes for each token with routes and layer."""
    held = (InMemoryRoutes(np.zeros((layers, sample.tokens - 1, 1), dtype=np.uint8)) for sample in group(index))
    return [replace(sample, routes=routes) for sample, routes in zip(group(index), held, strict=True)]


@settings(max_examples=15)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=12, unique=True), st.integers(1, 200))
def test_a_row_group_has_whole_groups_up_to_its_limit(indices: list[int], limit: int) -> None:
    groups = [routed(index, layers=3) for index in indices]
    file = BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "ROW_GROUP_TOKENS", limit)
        write_shard(file, groups)
    found = pq.ParquetFile(BytesIO(file.getvalue()))
    assert found.read(columns=["group"])["group"].to_pylist() == [s.group for own in groups for s in own]
    ends = set(accumulate(len(own) for own in groups))
    rows = [found.metadata.row_group(i).num_rows for i in range(found.num_row_groups)]
    assert set(accumulate(rows)) <= ends, "no group is in two"
    flat = [sample.tokens for own in groups for sample in own]
    begins = [0, *accumulate(rows)]
    for begin, count in zip(begins, rows, strict=False):
        of_one_group = len({s.group for s in [s for own in groups for s in own][begin : begin + count]}) == 1
        assert of_one_group or sum(flat[begin : begin + count]) <= limit


def test_routes_make_a_shard_due(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ShardBuffer()
    buffer.add(routed(0, layers=3))
    assert buffer.routes == 3 * sum(sample.tokens - 1 for sample in group(0))
    assert not buffer.due
    monkeypatch.setattr(schema, "SHARD_ROUTES", buffer.routes)
    assert buffer.due


OF = {"stage": "0123", "age": 4}
UPDATES = [[np.linspace(-2, 0, n, dtype=np.float32) for n in (1, 5, 3)] for _ in range(3)]


def written(path: Path) -> LogprobColumn:
    column = LogprobColumn(path, OF, "do this")
    with column.write() as append:
        for update in UPDATES:
            append(update)
    return column


def test_what_is_written_is_read(tmp_path: Path) -> None:
    column = written(tmp_path / "behaviour.parquet")
    assert column.complete
    for number, update in enumerate(UPDATES):
        for one, other in zip(column.read(number), update, strict=True):
            np.testing.assert_array_equal(one, other)
    silent = LogprobColumn(tmp_path / "other.parquet", OF)
    with silent.write(enabled=False) as append:
        append(UPDATES[0])
    assert not silent.path.exists()
    assert not silent.complete


@pytest.mark.parametrize("of", [{}, {"stage": "0123"}, {"stage": "0123", "age": 5}, {"stage": "4567", "age": 4}])
def test_those_of_another_stage_or_policy_are_refused(of: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was computed for other responses or another policy; do this"):
        LogprobColumn(written(tmp_path / "behaviour.parquet").path, of, "do this").read(0)
