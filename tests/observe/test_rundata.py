"""What a run's rows say of the time that it still needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mugrpo_megatron.observe.rundata import RunData, read_run
from tests.report.synthetic import recipe_of, rows_of, write_run

STAGES, UPDATES = 4, 32


def run_until(folder: Path, updates: int) -> tuple[RunData, float]:
    """The run until it had taken so many updates, and the seconds from there to its last update."""
    rows = rows_of(STAGES, UPDATES)
    taken = [row for row in rows if row["kind"] == "update"]
    now = taken[updates - 1]["time"]
    past = [row for row in rows if row.get("end", row.get("time")) <= now]
    return read_run(write_run(folder, past, recipe_of(STAGES, UPDATES))), taken[-1]["time"] - now


@pytest.mark.parametrize("updates", [2, 9, UPDATES, UPDATES + 1, 3 * UPDATES, STAGES * UPDATES - 1])
def test_the_time_left_counts_the_generation_of_every_stage_to_come_once(updates: int, tmp_path: Path) -> None:
    """Seconds an update so far would say ten times as much after the first updates."""
    run, left = run_until(tmp_path, updates)
    assert run.seconds_left() == pytest.approx(left, rel=0.1, abs=0.5)


def test_no_time_is_guessed_before_the_second_update(tmp_path: Path) -> None:
    assert run_until(tmp_path, 1)[0].seconds_left() is None
