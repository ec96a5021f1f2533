"""Where time goes: parts of a run against runs whose parts are known, counted decode steps against brute force."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.report.rundata import read_run
from run_scripts.study.collect import generation_points, switches
from run_scripts.study.timing import decode_steps, generation_fit, long_lengths, straggler_table
from tests.report.synthetic import recipe_of, rows_of, write_run

pytestmark = pytest.mark.night

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def steps_one_by_one(lengths: list[int], running: int) -> tuple[int, int]:
    """(steps, rows) of continuous batching, played step by step."""
    waiting, steps, rows = list(lengths), 0, 0
    batch: list[int] = []
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
    assert decode_steps(lengths, running) == (steps, pytest.approx(rows / (steps * running)))


@given(lengths, st.integers(1, 8), st.integers(1, 40))
def test_small_stages_never_take_fewer_steps(lengths: list[int], running: int, size: int) -> None:
    """Cutting the stream into stages makes places wait for each stage's longest response."""
    stages = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    assert sum(decode_steps(stage, running)[0] for stage in stages) >= decode_steps(lengths, running)[0]


def test_equal_lengths_leave_no_place_waiting() -> None:
    assert decode_steps([5] * 16, 4) == (4 * 5, 1.0)


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


def test_measured_seconds_stand_next_to_the_steps_that_were_counted() -> None:
    seconds = {"1": [9.0, 8.0, 10.0], "2": [6.0], "4": [4.5]}
    measured = {"updates": 4, "running": 64, "tokens": 9000, "seconds": seconds}
    head, _, *rows = [line.strip("| ").split(" | ") for line in straggler_table(measured).splitlines()]
    assert head[:2] == ["µ", "Decode steps"]
    assert [row[0] for row in rows] == ["1", "2", "4"]
    assert [row[4:] for row in rows] == [["9.0", "2.00", "1,000"], ["6.0", "1.33", "1,500"], ["4.5", "1.00", "2,000"]]
    steps = [float(row[1].replace(",", "")) for row in rows]
    assert steps == sorted(steps, reverse=True)
