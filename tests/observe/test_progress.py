"""Progress bars: rates, time left, and output that suits terminals and files; the time that a run still needs."""

from __future__ import annotations

import io
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mugrpo_megatron.observe.progress import Bar, Display, duration, open_display
from mugrpo_megatron.observe.rundata import RunData, read_run
from tests.report.synthetic import recipe_of, rows_of, write_run


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_plain_output_has_a_line_every_ten_seconds_and_a_last_one() -> None:
    console = plain_console()
    seconds = count()  # the clock ticks once whenever it is read
    with Display(console, None, clock=lambda: float(next(seconds))).bar("generate", 50, "responses") as bar:
        for _ in range(50):
            bar.advance(1, tokens=8, reward=0.25)
    lines = printed(console)
    assert 3 < len(lines) < 25
    assert "left" in lines[0]
    assert lines[-1].startswith("generate: 50/50 responses in ")
    assert "tok/s" in lines[-1]
    assert "reward 0.25" in lines[-1]
    assert "left" not in lines[-1]


def test_rates_and_time_left_follow_the_pace() -> None:
    bar = Bar("optimize", "updates", 64, clock=lambda: 8.0, show=lambda bar: None)
    bar.advance(16, tokens=32_000)
    assert bar.rates() == "2 updates/s, 4.0k tok/s"
    assert bar.left() == "24.0 s left"


def test_other_ranks_and_nested_bars_print_nothing_when_not_shown() -> None:
    console = plain_console()
    with (
        open_display(show=False, console=console) as display,
        display.bar("generate", 1, "responses") as outer,
        display.bar("score", None, "responses") as inner,
    ):
        inner.advance()
        outer.advance()
    assert printed(console) == []


def test_terminal_shows_nested_bars_and_keeps_their_closing_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    with (
        open_display(console=console) as display,
        display.bar("generate", 2, "responses") as outer,
        display.bar("score", None, "responses") as inner,
    ):
        inner.advance(3)
        outer.advance(2, tokens=10)
    text = "\n".join(printed(console))
    assert "score: 3 responses in" in text
    assert "generate: 2/2 responses in" in text


@settings(max_examples=50)
@given(st.floats(min_value=0, max_value=1e6))
def test_durations_read_back_to_what_they_were(seconds: float) -> None:
    text = duration(seconds)
    if text.endswith(" s"):
        assert abs(float(text[:-2]) - seconds) <= 0.051
    else:
        value = 0
        for part in text.split(":"):
            value = 60 * value + int(part)
        assert abs(value - seconds) <= 0.5


def test_what_is_waited_for_is_said_at_once_in_a_file_and_with_its_seconds_in_a_terminal() -> None:
    console = plain_console()
    with Display(console, None).waiting("building the learner"):
        assert printed(console) == ["building the learner"]
    assert printed(console) == ["building the learner"]

    terminal = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with open_display(console=terminal) as display, display.waiting("waiting for the engine"):
        assert display.live
        display.live.refresh()
        assert any("waiting for the engine" in line for line in printed(terminal))
    assert any("waiting for the engine: " in line for line in printed(terminal))
    with Display(None, None).waiting("silent"):
        pass


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
