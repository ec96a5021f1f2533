"""The study's grid: its variants, its cells in the order in which they run, and the state of each cell on disk."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError

GRID = Path(__file__).with_name("grid.toml")
EVALUATIONS = 8
"""A cell with more stages than this evaluates about this often; one with fewer after each stage."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train: a row of the study's tables."""

    name: str
    title: str
    mu: int
    """Updates per stage."""
    objective: Mapping[str, Any]
    """Fields of the recipe's [objective]."""
    updates: int
    """Updates of a whole run, those of its part."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of other sections, `section.field`."""


@dataclass(frozen=True, slots=True)
class Part:
    """Variants that answer one question together."""

    name: str
    title: str
    seeds: int
    variants: tuple[Variant, ...]
    every_rate: bool = False
    """Whether every seed runs at every rate, not only at the tuned one."""
    beyond: tuple[float, ...] = ()
    """Further rates, to find where methods break; no variant is tuned on them."""
    beyond_seeds: int = 1


@dataclass(frozen=True, slots=True)
class Grid:
    """What grid.toml holds."""

    updates: int
    """Updates of a run, unless its part sets another number."""
    rates: tuple[float, ...]
    """Learning rates that every variant is tuned on."""
    reference: str
    """Variant whose best rate decides which rates the later parts try first."""
    parts: tuple[Part, ...]

    def variants(self) -> dict[str, Variant]:
        return {variant.name: variant for part in self.parts for variant in part.variants}

    def part_of(self) -> dict[str, str]:
        """The name of each variant's part."""
        return {variant.name: part.name for part in self.parts for variant in part.variants}

    def all_rates(self) -> tuple[float, ...]:
        """The tuned rates and those beyond them, ascending."""
        return tuple(sorted({*self.rates, *(rate for part in self.parts for rate in part.beyond)}))


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run. Its name is its directory below the study's results."""

    variant: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}/lr{self.rate:g}-seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A cell whose rate is unknown until its variant is tuned."""

    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}/lr?-seed{self.seed}"


Accuracies = Mapping[Cell, float]
"""Final held-out accuracy of every finished cell."""


def load_grid(path: Path = GRID) -> Grid:
    """Read the grid in `path`. Raises UserError if a µ does not divide the updates or a variant appears twice."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such grid; the study's own is {GRID}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    updates, rates, reference = table.pop("updates"), table.pop("rates"), table.pop("reference")
    parts = tuple(_part(name, one, updates, path) for name, one in table.items())
    names = [variant.name for part in parts for variant in part.variants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path}: variants {', '.join(twice)} appear twice; rename one")
    if reference not in names:
        raise UserError(f"{path}: reference = {reference!r} is not a variant; take one of {', '.join(names)}")
    return Grid(updates, tuple(sorted(rates)), reference, parts)


def best_rate(grid: Grid, variant: str, done: Accuracies) -> float | None:
    """The rate with the best final accuracy at the first seed, the lower of two equal ones; None until all are done."""
    found = {rate: done[cell] for rate in grid.rates if (cell := Cell(variant, rate, 0)) in done}
    return max(found, key=lambda rate: (found[rate], -rate)) if len(found) == len(grid.rates) else None


def wanted(grid: Grid, done: Accuracies, parts: Sequence[str] = (), seeds: int = 0) -> Iterator[Cell | Waiting]:
    """Every cell of the named parts (all parts by default) in the order in which to run them, finished ones included.

    A part first tunes its variants, starting with the best rate of `reference`, then runs the best rates seed by seed.
    So an interrupted study has compared all variants on the same seeds. `seeds` replaces the number of every part.
    """
    known = best_rate(grid, grid.reference, done)
    rates = sorted(grid.rates, key=lambda rate: abs(math.log(rate / known))) if known else list(grid.rates)
    for part in grid.parts:
        if parts and part.name not in parts:
            continue
        for rate in rates:
            yield from (Cell(variant.name, rate, 0) for variant in part.variants)
        for seed in range(1, seeds or part.seeds):
            for variant in part.variants:
                if part.every_rate:
                    yield from (Cell(variant.name, rate, seed) for rate in rates)
                else:
                    best = best_rate(grid, variant.name, done)
                    yield Waiting(variant.name, seed) if best is None else Cell(variant.name, best, seed)
        for seed in range(part.beyond_seeds):
            yield from (Cell(variant.name, rate, seed) for rate in part.beyond for variant in part.variants)


def overrides(grid: Grid, cell: Cell) -> list[str]:
    """The `--set` values of a cell's `mugrpo train`, except the directories of run and model."""
    variant = grid.variants()[cell.variant]
    stages = variant.updates // variant.mu
    return [
        f"run.seed={cell.seed}",
        f"schedule.stages={stages}",
        f"schedule.updates_per_stage={variant.mu}",
        f"optimizer.lr={cell.rate:g}",
        f"eval.every_stages={max(1, stages // EVALUATIONS)}",
        *(f"objective.{key}={value}" for key, value in variant.objective.items()),
        *(f"{key}={value}" for key, value in variant.settings.items()),
    ]


def _part(name: str, table: dict[str, Any], updates: int, path: Path) -> Part:
    updates = table.pop("updates", updates)
    variants = tuple(Variant(key, updates=updates, **fields) for key, fields in table.pop("variants").items())
    for variant in variants:
        if updates % variant.mu:
            raise UserError(f"{path}: mu = {variant.mu} of {variant.name} does not divide updates = {updates}")
    return Part(name, variants=variants, **table | {"beyond": tuple(sorted(table.get("beyond", ())))})


class State(Enum):
    MISSING = "missing"
    BEGUN = "begun"
    DONE = "done"


def state_of(directory: Path, updates: int) -> State:
    """DONE if the run has finished all `updates`."""
    summary = _summary(directory)
    if summary and summary["updates"] >= updates:
        return State.DONE
    return State.BEGUN if (directory / "metrics.jsonl").exists() else State.MISSING


def minutes_of(directory: Path) -> float:
    """Wall-clock of a finished cell, all its processes added up."""
    return float(json.loads((directory / "summary.json").read_text(encoding="utf-8"))["seconds"]["total"]) / 60


def accuracies(grid: Grid, out: Path) -> dict[Cell, float]:
    """Final held-out accuracy of every finished cell of the grid below `out`."""
    found = {}
    for name, variant in grid.variants().items():
        for directory in sorted((out / name).glob("lr*-seed*")):
            summary = _summary(directory)
            if summary and summary["updates"] >= variant.updates:
                found[cell_at(directory)] = float(summary["accuracy_after"])
    return found


def cell_at(directory: Path) -> Cell:
    """The cell whose run is in `directory`."""
    rate, seed = directory.name.removeprefix("lr").split("-seed")
    return Cell(directory.parent.name, float(rate), int(seed))


def _summary(directory: Path) -> dict[str, Any] | None:
    path = directory / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
