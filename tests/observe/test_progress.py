"""Progress bars: rates, time left, and output that suits terminals and files."""

from __future__ import annotations

import io
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mugrpo_megatron.observe.progress import Bar, Display, duration, open_display


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
