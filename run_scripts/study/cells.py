"""Cells of the study: their names, their outcomes, and the settings of their runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from run_scripts.study.grid import Grid


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run. Cells of a seed and a repeat share a stage."""

    seed: int
    method: str
    rate: float
    repeat: int = 0

    @property
    def name(self) -> str:
        """Its directory below the study's cells."""
        return f"{draw_name(self.seed, self.repeat)}/{self.method}-{self.rate:g}"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A cell that waits for the tuning seed: for its rate, or for the choice of its method."""

    seed: int
    what: str
    """The method, or the block that chooses it."""

    @property
    def name(self) -> str:
        return f"{draw_name(self.seed, 0)}/{self.what}-tuned"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Accuracy of a finished cell before its first update and after its last, on `problems` problems."""

    before: float
    after: float
    problems: int
    least_ratio: float
    """The smallest ratio of a token with negative advantage, over the whole run."""

    @property
    def collapsed(self) -> bool:
        """Whether it ended below its start by more than 1.96 standard errors of a difference of two shares."""
        variance = sum(share * (1 - share) for share in (self.before, self.after)) / self.problems
        return self.after < self.before - 1.96 * math.sqrt(variance)


Outcomes = Mapping[Cell, Outcome]


def draw_name(seed: int, repeat: int) -> str:
    """The name of one stage and of the cells that share it."""
    return f"seed{seed}" + (f"-again{repeat}" if repeat else "")


def settings(grid: Grid, cell: Cell) -> list[str]:
    """The `--set` values of a cell's run, except the directories of run and model."""
    method = grid.methods[cell.method]
    every = grid.every * method.updates // grid.updates
    end = [] if method.end_rate is None else [f"optimizer.min_lr={cell.rate * method.end_rate:g}"]
    return [
        *stage_settings(grid, cell.seed, grid.phases(cell.method), method.mu),
        f"optimizer.lr={cell.rate:g}",
        *end,
        f"eval.every_stages={max(1, every // method.mu)}",
        f"eval.every_updates={every if grid.longest(cell.method) > every else 0}",
        *(f"{key}={value}" for key, value in method.settings.items()),
    ]


def stage_settings(grid: Grid, seed: int, stages: int, mu: int) -> list[str]:
    """The `--set` values that decide what is generated. A repeat has the same: it differs by nothing but chance."""
    return [
        f"run.seed={seed}",
        f"schedule.stages={stages}",
        f"schedule.updates_per_stage={mu}",
        f"data.eval={grid.set_of(seed)}",
    ]
