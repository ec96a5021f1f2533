"""Progress of long phases: a live bar in a terminal, otherwise a plain line every ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from mugrpo_megatron.terminal import visible

LINE_EVERY_S = 10.0
WIDE = 130

Show = Callable[["Bar"], None]


@dataclass(slots=True)
class Bar:
    """The progress of one phase: `done` of `total` units, their tokens, and the latest values to show."""

    title: str
    unit: str
    total: int | None
    clock: Callable[[], float]
    show: Show
    done: int = 0
    tokens: int = 0
    values: dict[str, float] = field(default_factory=dict)
    began: float = 0.0

    def advance(self, units: int = 1, tokens: int = 0, **values: float) -> None:
        """Count finished units and their tokens, and show the progress; `values` (loss, reward) replace the earlier
        ones."""
        self.done += units
        self.tokens += tokens
        self.values.update(values)
        self.show(self)

    @property
    def seconds(self) -> float:
        return self.clock() - self.began

    def count(self) -> str:
        return f"{self.place()} {self.unit}"

    def place(self) -> str:
        """Returns `done/total` without the unit, which the rate beside it shows; `done` if there is no total."""
        return f"{self.done:,}/{self.total:,}" if self.total else f"{self.done:,}"

    def rates(self) -> str:
        """Returns units and tokens per second since the phase began; "" before the first unit is done."""
        seconds = self.seconds
        if not self.done or seconds <= 0:
            return ""
        parts = [f"{short_number(self.done / seconds)} {self.unit}/s"]
        if self.tokens:
            parts.append(f"{short_number(self.tokens / seconds)} tok/s")
        return ", ".join(parts)

    def left(self) -> str:
        """Returns the time that the remaining units take at the average rate, as `TIME left`; "" if it is unknown, and
        when no unit remains."""
        if not self.total or not self.done or self.done >= self.total:
            return ""
        return f"{duration(self.seconds * (self.total - self.done) / self.done)} left"

    def values_text(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in self.values.items())

    def line(self) -> str:
        """Returns the progress as one line of text, for output that is no terminal."""
        return self._line(self.count(), self.rates(), self.left(), self.values_text())

    def closing_line(self) -> str:
        return self._line(f"{self.count()} in {duration(self.seconds)}", self.rates(), self.values_text())

    def _line(self, *parts: str) -> str:
        return f"{self.title}: {', '.join(filter(None, parts))}"


@dataclass(frozen=True, slots=True)
class Display:
    """Prints lines and shows bars, several at a time; ranks other than the main one have no console and show
    nothing."""

    console: Console | None
    live: Progress | None
    clock: Callable[[], float] = time.monotonic

    @contextmanager
    def bar(self, title: str, total: int | None, unit: str) -> Iterator[Bar]:
        """Yield a bar of `total` units, None if unknown; the block calls its `advance`."""
        task = None
        if self.live:
            task = self.live.add_task(title, total=total, count="", rates="", left="", values="")
        last_line = self.clock()

        def show(bar: Bar) -> None:
            nonlocal last_line
            if self.live and task is not None:
                self.live.update(
                    task,
                    completed=bar.done,
                    count=bar.place(),
                    rates=bar.rates(),
                    left=bar.left(),
                    values=bar.values_text(),
                )
            elif self.console and self.clock() - last_line >= LINE_EVERY_S:
                last_line = self.clock()
                self.say(bar.line())

        bar = Bar(title, unit, total, self.clock, show, began=self.clock())
        try:
            yield bar
        finally:
            if self.live and task is not None:
                self.live.remove_task(task)
            self.say(bar.closing_line())

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Print what the block waits for; a terminal shows it meanwhile, and at the end how long it took."""
        if not self.live:
            self.say(text)
            yield
            return
        began = self.clock()
        task = self.live.add_task(text, total=None, count="", rates="", left="", values="")
        try:
            yield
        finally:
            self.live.remove_task(task)
        self.say(f"{text}: {duration(self.clock() - began)}")

    def table(self, table: Table) -> None:
        """Print a table above the bars."""
        if self.console:
            self.console.print(table)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        if self.console:
            self.console.print(visible(text), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def open_display(*, show: bool = True, console: Console | None = None) -> Iterator[Display]:
    """Yield the run's display on stdout; `show` is true on the main rank alone."""
    console = console or Console()
    if not show:
        yield Display(None, None)
    elif not console.is_terminal:
        yield Display(console, None)
    else:
        with Progress(*_columns(console.width), console=console, transient=True, refresh_per_second=4) as live:
            yield Display(console, live)


def new_table(title: str, *columns: str, **style: Any) -> Table:
    """Returns a table in the style of all commands; `>` before a column's name aligns it right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, **style)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return table


def _columns(width: int) -> Iterator[ProgressColumn]:
    """Yields the columns of a bar in a terminal of `width` characters."""
    wide = width >= WIDE
    yield SpinnerColumn()
    yield TextColumn("[bold]{task.description}")
    yield BarColumn(bar_width=24 if wide else 8)
    yield TextColumn("{task.fields[count]}")
    yield TextColumn("[cyan]{task.fields[rates]}")
    if wide:
        yield TimeElapsedColumn()
    yield TextColumn("{task.fields[left]}")
    if wide:
        yield TextColumn("[dim]{task.fields[values]}")


def duration(seconds: float) -> str:
    """Returns seconds as text: 4.2 s, 1:05 or 2:03:04."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short_number(value: float) -> str:
    """Returns a number as short text: 4.21, 355, 9.1k, 123.5k, 1.2M."""
    for limit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{letter}"
    return f"{value:.3g}"
