"""The cost model: its parts against runs whose parts are known, its scheduler against brute force."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.observe.rundata import read_run
from run_scripts.study.cost import (
    Machine,
    decode_seconds,
    generation_fit,
    generation_points,
    heavy_tail,
    kv_tokens,
    predict,
    switches,
)
from run_scripts.study.heavy_tail import long_lengths, straggler_table
from tests.observe.synthetic import recipe_of, rows_of, write_run

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def steps_one_by_one(lengths: list[int], running: int) -> tuple[int, int]:
    """(steps, rows) of continuous batching, played step by step."""
    waiting, batch, steps, rows = list(lengths), [], 0, 0
    while waiting or batch:
        while waiting and len(batch) < running:
            batch.append(waiting.pop(0))
        rows += len(batch)
        steps += 1
        batch = [left - 1 for left in batch if left > 1]
    return steps, rows


@given(lengths, st.integers(1, 8))
def test_the_scheduler_is_continuous_batching(lengths: list[int], running: int) -> None:
    steps, rows = steps_one_by_one(lengths, running)
    seconds, occupancy = decode_seconds(lengths, Machine(1.0, 0.01, running, 0.0, 0.0))
    assert seconds == pytest.approx(steps + 0.01 * rows)
    assert occupancy == pytest.approx(rows / (steps * running))


@given(lengths, st.integers(1, 8))
def test_large_stages_never_decode_longer(lengths: list[int], running: int) -> None:
    """Cutting the stream into stages makes places wait for each stage's longest response."""
    machine = Machine(1.0, 0.0, running, 0.0, 0.0)
    stages = min(4, len(lengths))
    whole, cut = predict(lengths, machine, 1, 8), predict(lengths, machine, stages, 8)
    assert whole.generate <= cut.generate + 1e-9


def test_equal_lengths_leave_no_one_waiting_and_switches_count_by_stage() -> None:
    machine = Machine(step_s=1.0, row_s=0.0, running=4, update_s=2.0, switch_s=3.0)
    one = predict([5] * 16, machine, stages=4, updates=8)
    assert (one.generate, one.optimize, one.switch) == (4 * 5.0, 16.0, 12.0)
    assert one.occupancy == pytest.approx(1.0)


def test_a_heavy_tail_makes_small_stages_wait() -> None:
    machine = Machine(1.0, 0.0, 64, 0.0, 0.0)
    even, uneven = (heavy_tail(1024, 100, 10_000, sigma) for sigma in (0.0, 1.0))
    ratio = {
        name: predict(some, machine, 16, 1).generate / predict(some, machine, 1, 1).generate
        for name, some in (("even", even), ("uneven", uneven))
    }
    assert ratio["even"] == pytest.approx(1.0)
    assert ratio["uneven"] > 2.0


def test_lengths_have_the_mean_and_limit_that_were_asked() -> None:
    drawn = heavy_tail(200_000, 300.0, 100_000, 1.0)
    assert drawn.mean() == pytest.approx(300.0, rel=0.02)
    assert heavy_tail(1000, 300.0, 400, 1.0).max() == 400


def test_a_runs_switch_is_what_is_neither_sampling_nor_updates(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, rows_of(3, 8), recipe_of(3, 8)))
    found = switches(run)
    assert (found.stages, found.responses) == (3, 8 * 256)
    assert found.generate == pytest.approx(8 * 0.16 + 0.2)
    assert found.optimize == pytest.approx(8 * 0.2 - 0.15)  # a save counts as inside it
    assert found.switch == pytest.approx(0.05 + 0.1 + 0.15 + found.rest)
    assert 0 <= found.rest < 0.4


def test_the_fit_finds_what_stages_of_two_sizes_cost(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(u), rows_of(2, u), recipe_of(2, u))) for u in (4, 16)]
    points = [point for run in runs for point in generation_points(run)]
    fixed, each = generation_fit(points)
    assert (fixed, each) == (pytest.approx(0.2, abs=1e-3), pytest.approx(0.16 / 256, rel=1e-3))
    with pytest.raises(ValueError, match="different sizes"):
        generation_fit(points[:2])


def test_long_responses_have_the_length_that_the_tokenizer_gives_them() -> None:
    tokenizer = build_arithmetic_tokenizer()
    texts = [arithmetic.demonstration(p) for p in arithmetic.problems(0, "train", 40, "arithmetic_long")]
    expected = [len(tokenizer.encode(text)) + 1 for text in texts]  # and the end of the sequence
    assert long_lengths(40) == [length for length in expected for _ in range(8)]


def test_what_is_resident_leaves_less_cache() -> None:
    assert kv_tokens(100.0, 40.0, 60_000) == 1_000_000
    assert kv_tokens(10.0, 40.0, 60_000) == 0


def test_measured_seconds_stand_beside_the_steps_that_were_counted() -> None:
    seconds = {"1": [9.0, 8.0, 10.0], "2": [6.0], "4": [4.5]}
    measured = {"updates": 4, "running": 64, "tokens": 9000, "seconds": seconds}
    head, _, *rows = [line.strip("| ").split(" | ") for line in straggler_table(measured).splitlines()]
    assert head[:2] == ["µ", "Decode steps"]
    assert [row[0] for row in rows] == ["1", "2", "4"]
    assert [row[4:] for row in rows] == [["9.0", "2.00", "1,000"], ["6.0", "1.33", "1,500"], ["4.5", "1.00", "2,000"]]
    steps = [float(row[1].replace(",", "")) for row in rows]
    assert steps == sorted(steps, reverse=True)
