"""The study's methods and cells, in the order in which they run (docs/study/plan.md).

A block of cells has one rate for all methods, or each method's own, tuned with the tuning seed right before the first
cell that needs it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError

GRID = Path(__file__).with_name("grid.toml")


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train: a row of the study's tables."""

    name: str
    title: str
    objective: Mapping[str, Any]
    """Fields of the recipe's [objective]."""
    mu: int
    """Updates per stage."""
    twin: str | None = None
    """The method without the veto: the same as this one in a run in which no ratio is ever a trigger."""


@dataclass(frozen=True, slots=True)
class Block:
    """Methods that every seed runs, in their order, at one rate, or with None at each method's tuned one."""

    name: str
    methods: tuple[str, ...]
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Noise:
    """The cell that is repeated, in a block with a rate."""

    block: str
    method: str
    seed: int
    times: int


@dataclass(frozen=True, slots=True)
class Grid:
    """What grid.toml holds."""

    updates: int
    every: int
    seeds: int
    warm_starts: int
    tuning_seed: int
    ladder: tuple[float, ...]
    start: tuple[float, ...]
    trigger_ratio: float
    """The threshold of a trigger, of every method with a veto."""
    order: tuple[tuple[str, ...], ...]
    """Names of blocks: those of one inner tuple run seed by seed, before those of the next."""
    blocks: Mapping[str, Block]
    noise: Noise
    methods: Mapping[str, Method]

    def shares_stage(self, method: str) -> bool:
        """Whether the method takes all its updates on the one stage that the methods of a seed share."""
        return self.methods[method].mu == self.updates

    def set_of(self, seed: int) -> str:
        """The held-out set that a seed's cells are evaluated on."""
        return "chain_validation" if seed == self.tuning_seed else "chain"


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
    """A cell whose rate is not known yet."""

    seed: int
    method: str

    @property
    def name(self) -> str:
        return f"{draw_name(self.seed, 0)}/{self.method}-tuned"


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


@dataclass(frozen=True, slots=True)
class Search:
    """The search for a rate: the cells that it has asked for, in order, and what it found."""

    cells: list[Cell] = field(default_factory=list)
    rate: float | None = None
    """None until all `cells` are done."""


def draw_name(seed: int, repeat: int) -> str:
    """The name of one stage and of the cells that share it."""
    return f"seed{seed}" + (f"-again{repeat}" if repeat else "")


def load_grid(path: Path = GRID) -> Grid:
    """Read the grid in `path`; UserError when a µ does not divide the updates or a block names an unknown method."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such grid; the study's own is {GRID}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    updates = table["updates"]
    methods = {
        name: Method(name, fields["title"], fields["objective"], fields.get("mu", updates), fields.get("twin"))
        for name, fields in table.pop("methods").items()
    }
    for method in methods.values():
        if updates % method.mu:
            raise UserError(f"{path}: mu = {method.mu} of {method.name} does not divide updates = {updates}")
    blocks = {
        name: Block(name, tuple(fields["methods"]), fields.get("rate")) for name, fields in table.pop("blocks").items()
    }
    named = {name for block in blocks.values() for name in block.methods} | {table["noise"]["method"]}
    if unknown := sorted(named - methods.keys()):
        raise UserError(f"{path}: {', '.join(unknown)} is not in [methods]; it has {', '.join(methods)}")
    ladder, start = tuple(table.pop("ladder")), tuple(table.pop("start"))
    if not set(start) <= set(ladder):
        raise UserError(f"{path}: start must be rates of the ladder")
    order = tuple(tuple(names) for names in table.pop("order"))
    noise = Noise(**table.pop("noise"))
    return Grid(**table, ladder=ladder, start=start, order=order, blocks=blocks, noise=noise, methods=methods)


def wanted(grid: Grid, done: Outcomes) -> Iterator[Cell | Waiting]:
    """Every cell in the order in which to run them, finished ones included; some come twice."""
    for together in grid.order:
        for seed in range(grid.seeds):
            for name in together:
                yield from _of_block(grid, done, grid.blocks[name], seed)
    again, rate = grid.noise, grid.blocks[grid.noise.block].rate
    if rate is not None:
        yield from (Cell(again.seed, again.method, rate, repeat) for repeat in range(1, again.times + 1))


def _of_block(grid: Grid, done: Outcomes, block: Block, seed: int) -> Iterator[Cell | Waiting]:
    for method in block.methods:
        if block.rate is not None:
            yield Cell(seed, method, block.rate)
            continue
        search = tuned_rate(grid, done, method)
        yield from search.cells
        yield Waiting(seed, method) if search.rate is None else Cell(seed, method, search.rate)


def tuned_rate(grid: Grid, done: Outcomes, method: str) -> Search:
    """The best of the starting rates and, while the best is an end of those tried, of the next one on the ladder."""
    tried = set(grid.start)
    while True:
        cells = [Cell(grid.tuning_seed, method, rate) for rate in sorted(tried)]
        if not all(cell in done for cell in cells):
            return Search(cells)
        best = max(cells, key=lambda cell: (done[cell].after, -cell.rate)).rate
        place = grid.ladder.index(best)
        near = {grid.ladder[k] for k in (place - 1, place + 1) if 0 <= k < len(grid.ladder)}
        if near <= tried:
            return Search(cells, best)
        tried |= near


def of_twin(grid: Grid, done: Outcomes, cell: Cell) -> Outcome | None:
    """The outcome of the cell's twin, if no ratio of its run was a trigger: then the veto had nothing to drop."""
    twin = grid.methods[cell.method].twin
    found = done.get(replace(cell, method=twin)) if twin else None
    return found if found and found.least_ratio >= grid.trigger_ratio else None


def settings(grid: Grid, cell: Cell) -> list[str]:
    """The `--set` values of a cell's run, except the directories of run and model."""
    method = grid.methods[cell.method]
    stages = grid.updates // method.mu
    return [
        *stage_settings(grid, cell.seed, cell.repeat, method.mu),
        f"optimizer.lr={cell.rate:g}",
        f"eval.every_stages={max(1, grid.every // method.mu)}",
        f"eval.every_updates={grid.every if stages == 1 else 0}",
        *(f"objective.{key}={value}" for key, value in method.objective.items()),
    ]


def stage_settings(grid: Grid, seed: int, repeat: int, mu: int) -> list[str]:
    """The `--set` values that decide what is generated. A repeat differs by nothing but chance."""
    return [
        f"run.seed={seed}",
        f"schedule.stages={grid.updates // mu}",
        f"schedule.updates_per_stage={mu}",
        f"data.eval={grid.set_of(seed)}",
    ]
