"""The record of an engine's load stays bounded and evenly spread."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.engine.queue import MOST_LOADS, Load, LoadRecord


@given(st.integers(0, 5000))
def test_a_long_generation_keeps_readings_that_are_equally_far_apart(count: int) -> None:
    record = LoadRecord()
    for number in range(count):
        record.add(Load(time=float(number), tokens=number, running=1, queued=0, kv_use=0.5))
        assert len(record.loads) <= MOST_LOADS
    times = [load.time for load in record.loads]
    assert times[:1] == [0.0][:count]
    assert len({after - before for before, after in pairwise(times)}) <= 1
    assert len(times) >= min(count, MOST_LOADS // 2)
