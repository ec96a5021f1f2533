"""The cells of part eight (a way at a rate with a seed): what a grid lists, and which cells are still to run.

docs/study/part-eight.md is the plan; docs/study/eight_*/grid.toml are its grids.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from mugrpo_megatron.errors import UserError

STEPS = ("tune", "test", "best")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train: an objective and a schedule."""

    title: str
    mu: int
    """Updates that a stage's responses are sampled for."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the recipe and their values."""
    rate: float | None = None
    """The learning rate, if it is fixed; without one the tuning seeds find it."""
    k: float = 1.0
    """Hours of GRPO divided by hours of this way for the same updates, from the plan's table."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the plan: its ways run before those of the next step.

    `tune` runs each way on the tuning seeds, and finds its rate there unless one stands; `test` runs each way at its
    rate on the test seeds; `best` runs the way with the highest tuned mean on the test seeds.
    """

    kind: str
    ways: tuple[str, ...]
    like: tuple[str, ...] = ()
    """Ways that were tuned before, as many as `ways`: only the way at the place of the best of them takes part in the
    step."""


@dataclass(frozen=True, slots=True)
class Grid:
    updates: int
    every: int
    """Updates between two evaluations."""
    tuning_seeds: tuple[int, ...]
    test_seeds: tuple[int, ...]
    ladder: tuple[float, ...]
    """Learning rates, ascending."""
    start: tuple[float, ...]
    """Learning rates with which the search for a way's rate begins."""
    shared: Mapping[str, Any]
    """Keys of the recipe that every run sets; the runs of `mugrpo sft` set them, too."""
    ways: Mapping[str, Way]
    order: tuple[Step, ...]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    way: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.way}-{self.rate:g}/seed{self.seed}"


Ends = Mapping[Cell, float]
"""Finished cell -> its accuracy at the end."""


def load_grid(path: Path) -> Grid:
    """Read a grid. Raises UserError with its first mistake."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        ways = {name: Way(**fields) for name, fields in table.pop("ways").items()}
        order = tuple(_step(fields) for fields in table.pop("order"))
        lists: dict[str, Any] = {
            key: tuple(table.pop(key)) for key in ("tuning_seeds", "test_seeds", "ladder", "start")
        }
        grid = Grid(**table, **lists, ways=ways, order=order)
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a grid: {error}") from None
    for problem in _problems(grid):
        raise UserError(f"{path}: {problem}")
    return grid


def _step(fields: Mapping[str, Sequence[str]]) -> Step:
    [kind] = fields.keys() - {"like"}
    return Step(kind, tuple(fields[kind]), tuple(fields.get("like", ())))


def _problems(grid: Grid) -> Iterator[str]:
    for name, way in grid.ways.items():
        if grid.updates % way.mu or max(way.mu, grid.every) % min(way.mu, grid.every):
            yield f"mu = {way.mu} of {name} fits neither {grid.updates} updates nor evaluations every {grid.every}"
    for step in grid.order:
        if step.kind not in STEPS:
            yield f"an entry of order is {', '.join(STEPS)}, not {step.kind}"
        if unknown := [name for name in (*step.ways, *step.like) if name not in grid.ways]:
            yield f"order names {', '.join(unknown)}, which [ways] does not have"
        if step.like and len(step.like) != len(step.ways):
            yield f"{', '.join(step.ways)} and {', '.join(step.like)} are not as many"
    if not set(grid.start) <= set(grid.ladder):
        yield "start has rates that are not in ladder"


def settings(grid: Grid, cell: Cell, task: str = "chain") -> dict[str, Any]:
    """The recipe keys of a cell's run, except the directories of run and model.

    Tuning seeds are evaluated on the validation split, all others on the test split.
    """
    way = grid.ways[cell.way]
    return {
        "run.seed": cell.seed,
        "schedule.stages": grid.updates // way.mu,
        "schedule.updates_per_stage": way.mu,
        "data.eval": f"{task}_validation" if cell.seed in grid.tuning_seeds else task,
        "optimizer.lr": cell.rate,
        "eval.every_stages": max(1, grid.every // way.mu),
        "eval.every_updates": grid.every if way.mu > grid.every else 0,
        "checkpoint.every_stages": max(1, 2 * grid.every // way.mu),
        **way.set,
    }


def tuning_mean(grid: Grid, ends: Ends, name: str, rate: float) -> float:
    """The mean end of a way over the tuning seeds, which have all run at the rate."""
    return fmean(ends[Cell(name, rate, seed)] for seed in grid.tuning_seeds)


def tuned_rate(grid: Grid, ends: Ends, name: str) -> tuple[list[Cell], float | None]:
    """The tuning cells of a way, and its rate; None as the rate until all these cells have run.

    The rate is the one with the highest mean end, in a tie the lower one. As long as it is the lowest or the highest
    that was tried, the next one of the ladder is tried too. A rate that stands has one cell for each tuning seed.
    """
    if (rate := grid.ways[name].rate) is not None:
        return [Cell(name, rate, seed) for seed in grid.tuning_seeds], rate
    tried = set(grid.start)
    while True:
        cells = [Cell(name, rate, seed) for rate in sorted(tried) for seed in grid.tuning_seeds]
        if not all(cell in ends for cell in cells):
            return cells, None
        means = {rate: tuning_mean(grid, ends, name, rate) for rate in tried}
        best = min(means, key=lambda rate: (-means[rate], rate))
        place = grid.ladder.index(best)
        near = set(grid.ladder[max(0, place - 1) : place + 2])
        if near <= tried:
            return cells, best
        tried |= near


def best_way(grid: Grid, ends: Ends, names: Sequence[str]) -> str | None:
    """The way whose tuning cells end highest at its tuned rate, in a tie the first; None until all ways are tuned."""
    means = {}
    for name in names:
        rate = tuned_rate(grid, ends, name)[1]
        if rate is None:
            return None
        means[name] = tuning_mean(grid, ends, name, rate)
    return max(names, key=lambda name: means[name])


def wanted(grid: Grid, ends: Ends) -> Iterator[Cell]:
    """Yield the cells of the plan in the order in which they run, as far as finished cells decide which they are."""
    for step in grid.order:
        names = _taking_part(grid, ends, step)
        if step.kind == "tune":
            for name in names:
                yield from tuned_rate(grid, ends, name)[0]
            continue
        rates = {name: tuned_rate(grid, ends, name)[1] for name in names}
        for seed in grid.test_seeds:
            yield from (Cell(name, rate, seed) for name, rate in rates.items() if rate is not None)


def _taking_part(grid: Grid, ends: Ends, step: Step) -> Sequence[str]:
    names: Sequence[str] = step.ways
    if step.like:
        best = best_way(grid, ends, step.like)
        names = [step.ways[step.like.index(best)]] if best else []
    if step.kind == "best":
        best = best_way(grid, ends, names)
        names = [best] if best else []
    return names
