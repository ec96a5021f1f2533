"""Reads a run directory: its rows in order, without those that a resumed run replaced, and a clock of its running
time."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import read_json
from mugrpo_megatron.observe.log import FILE_NAME, Row, read_rows
from mugrpo_megatron.observe.metrics import in_order
from mugrpo_megatron.recipe.load import read_toml

ROLLOUT_PHASES = ("sync", "generate", "score")
"""Phases of the paper's T_rollout (`paper_seconds`), from the weight sync to the stage's last scored response."""

TRAINING_PHASES = (*ROLLOUT_PHASES, "logprobs", "optimize")
"""Phases of the paper's T_total. Evaluations and saves are left out, since their number is the user's choice."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Maps Unix time to the seconds for which the run has been running; time between a stop and a resume does not
    count."""

    starts: tuple[float, ...]
    """Unix time at which each process of the run started."""
    offsets: tuple[float, ...]
    """Seconds for which the run had been running before each of these starts."""

    def __call__(self, time: float) -> float:
        process = max(bisect_right(self.starts, time) - 1, 0)
        return self.offsets[process] + time - self.starts[process]


@dataclass(frozen=True, slots=True)
class RunData:
    """The content of a run directory; the run may be finished, running or interrupted."""

    path: Path
    recipe: dict[str, Any]
    """The tables of recipe.toml, by section."""
    summary: dict[str, Any] | None
    """summary.json; None until the run has finished."""
    updates: list[Row]
    stages: list[Row]
    evals: list[Row]
    phases: list[Row]
    events: list[Row]
    processes: list[Row]
    clock: Clock
    seconds: float
    """Seconds for which the run has been running; time between a stop and a resume does not count."""
    last: float
    """Unix time of the last row."""

    def setting(self, key: str) -> float | None:
        """Returns the number that the run's recipe has at `section.key`; None if it has none there."""
        section, _, name = key.partition(".")
        value = self.recipe.get(section, {}).get(name)
        return value if type(value) in (int, float) else None

    @property
    def total_updates(self) -> int:
        """The number of updates in the recipe's schedule or, if more were taken, the number of those; at least 1."""
        factors = [self.setting(f"schedule.{name}") or 1 for name in ("stages", "updates_per_stage", "epochs")]
        return max(round(math.prod(factors)), len(self.updates), 1)

    def stage_starts(self) -> list[Row]:
        """Returns the first update row of each stage."""
        return [next(rows) for _, rows in groupby(self.updates, key=itemgetter("stage"))]

    def seconds_left(self) -> float | None:
        """Returns an estimate of the seconds left, from the pace so far; None until a stage has two updates."""
        seconds_between = [
            self.clock(later["time"]) - self.clock(earlier["time"])
            for earlier, later in pairwise(self.updates)
            if earlier["stage"] == later["stage"]
        ]
        if not seconds_between:
            return None
        update, before = statistics.fmean(seconds_between), []
        # The seconds that each stage took before its first update, for weight sync, generation and the like.
        for first in self.stage_starts():
            starts = [row["start"] for row in self.phases if row["stage"] == first["stage"] and row["phase"] != "start"]
            if starts:
                before.append(max(0.0, self.clock(first["time"]) - self.clock(min(starts)) - update))
        stages = max(0, round(self.setting("schedule.stages") or 1) - len(self.stage_starts()))
        waits = stages * statistics.fmean(before) if before else 0.0
        return (self.total_updates - len(self.updates)) * update + waits


def read_run(path: Path) -> RunData:
    """Read recipe.toml, metrics.jsonl and, if it exists, summary.json of a run directory.

    Raises UserError when recipe or metrics are missing, when there is no row yet, or when a file is damaged.
    """
    recipe = _recipe(path / "recipe.toml")
    rows = read_rows(path / FILE_NAME)
    if not rows:
        raise UserError(f"{path / FILE_NAME}: no rows yet, since the run has not started; wait until it has")
    clock, seconds = _clock(rows)
    return RunData(
        path=path,
        recipe=recipe,
        summary=_summary(path / "summary.json"),
        updates=in_order(rows, "update"),
        stages=in_order(rows, "stage"),
        evals=in_order(rows, "eval"),
        phases=_of_kind(rows, "phase"),
        events=_of_kind(rows, "event"),
        processes=_of_kind(rows, "process"),
        clock=clock,
        seconds=seconds,
        last=max(float(row["end"] if row["kind"] == "phase" else row["time"]) for row in rows),
    )


def seconds_by_phase(phases: Iterable[Row]) -> dict[str, float]:
    """Returns phase -> its seconds of wall-clock, in the order in which phases first started.

    The time of a phase inside another, such as a save inside `optimize`, is not counted for the outer one.
    """
    seconds: dict[str, float] = {}
    enclosing: list[Row] = []
    for row in sorted(phases, key=lambda row: (row["start"], -row["end"])):
        while enclosing and enclosing[-1]["end"] < row["end"]:
            enclosing.pop()
        length = row["end"] - row["start"]
        seconds[row["phase"]] = seconds.get(row["phase"], 0.0) + length
        if enclosing:
            seconds[enclosing[-1]["phase"]] -= length
        enclosing.append(row)
    return seconds


def paper_seconds(phases: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the paper's T_rollout and T_total in seconds, from a run's phase rows.

    The time of a phase inside another one counts as the outer one's if the inner phase is one of `TRAINING_PHASES`,
    such as `logprobs` inside `optimize`. Otherwise, as for a save, it is subtracted. A `sync` that serves only an
    evaluation is left out.
    A phase that a resumed run repeated counts twice.
    """
    durations = [(name, seconds) for name, seconds in _outermost(phases) if name != "eval"]
    totals: dict[str, float] = {}
    for (name, seconds), (following, _) in pairwise([*durations, ("", 0.0)]):
        if name != "sync" or following == "generate":
            totals[name] = totals.get(name, 0.0) + seconds
    return {
        "T_rollout": sum(totals.get(name, 0.0) for name in ROLLOUT_PHASES),
        "T_total": sum(totals.get(name, 0.0) for name in TRAINING_PHASES),
    }


def _outermost(phases: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Returns (name, seconds) of the phases that are inside no other phase, in order.

    The seconds of inner phases that are not in `TRAINING_PHASES` are subtracted.
    """
    outer: list[tuple[str, float]] = []
    outer_end = inner_end = float("-inf")
    for row in sorted(phases, key=lambda row: (row["start"], -row["end"])):
        name, start, end = itemgetter("phase", "start", "end")(row)
        if end > outer_end:
            outer.append((name, end - start))
            outer_end, inner_end = end, start
        elif start >= inner_end and name not in TRAINING_PHASES:
            outer[-1] = (outer[-1][0], outer[-1][1] - (end - start))
            inner_end = end
    return outer


def _of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _clock(rows: Sequence[Row]) -> tuple[Clock, float]:
    """Returns the run's clock, and the seconds for which the run has been running. Each process of a run begins with a
    row of kind `process`."""
    starts: list[float] = []
    offsets: list[float] = []
    alive, last = 0.0, 0.0
    for row in rows:
        begin = row["start"] if row["kind"] == "phase" else row["time"]
        if not starts or row["kind"] == "process":
            alive += last - starts[-1] if starts else 0.0
            starts.append(begin)
            offsets.append(alive)
            last = begin
        last = max(last, row["end"] if row["kind"] == "phase" else begin)
    return Clock(tuple(starts), tuple(offsets)), alive + last - starts[-1]


def _recipe(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; name the directory of a run")
    recipe = read_toml(path)
    if values := [name for name, table in recipe.items() if not isinstance(table, dict)]:
        raise UserError(f"{path}: `{values[0]}` is not a section; restore the run's recipe")
    return recipe


def _summary(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    return read_json(path, remedy="delete it, the report does not need it")
