"""What grid.toml holds: the study's methods, its blocks of cells, and their order (docs/study/plan.md)."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.sections import ScheduleSection

GRID = Path(__file__).with_name("grid.toml")
SECTIONS = ("schedule", "objective", "optimizer", "lora")
"""Sections of the recipe that a method may set."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train: a row of the study's tables."""

    name: str
    title: str
    settings: Mapping[str, Any]
    """Keys of the recipe, such as `objective.veto`, and their values."""
    mu: int
    """Updates per stage; their mean where stages grow."""
    updates: int
    """Updates of the whole run."""
    rate_of: str | None = None
    """The method whose tuned rate this one takes, because it is too long to be tuned itself."""
    end_rate: float | None = None
    """Learning rate at the end of the decay, as a share of the rate."""
    twin: str | None = None
    """The method without the veto: the same as this one in a run in which no ratio is ever a trigger."""


@dataclass(frozen=True, slots=True)
class Block:
    """Methods that a number of seeds run, in their order, at one rate, or with None at each method's tuned one."""

    name: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    rate: float | None = None
    repeats: int = 0
    """Above 0: the block's cells run this many times, each time from a stage that is generated again."""
    best_of: str | None = None
    """A block with tuned rates: only the best of its methods runs, and it is chosen before any of them runs on a seed
    that is not the tuning seed."""
    beside: tuple[str, ...] = ()
    """Methods of other blocks, at their tuned rates, which this block's methods are compared with."""
    again: tuple[int, ...] = ()
    """Seeds at which the block's cells, those beside them too, are a second draw: the warm start or the stage of the
    first draw is gone, and its cells stay as they are."""

    def draw(self, seed: int) -> int:
        """The repeat of the block's cells at a seed, unless `repeats` says how many there are."""
        return int(seed in self.again)


@dataclass(frozen=True, slots=True)
class Grid:
    """What grid.toml holds."""

    updates: int
    """Of a run whose method says nothing else."""
    every: int
    """Updates between two evaluations; in a longer run as many times more."""
    seeds: int
    warm_starts: int
    tuning_seed: int
    ladder: tuple[float, ...]
    start: tuple[float, ...]
    trigger_ratio: float
    """The threshold of a trigger, of every method that does not set another."""
    order: tuple[tuple[str, ...], ...]
    """Names of blocks: those of one inner tuple run seed by seed, before those of the next."""
    blocks: Mapping[str, Block]
    methods: Mapping[str, Method]
    also_tuned: tuple[int, ...] = ()
    """More seeds that rates are tuned on: a rate's figure is the mean over all of them."""
    last: int = 1
    """The accuracy after training is the mean of so many evaluations, the last ones."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the recipe that every run sets, warm starts too."""
    task: str = "chain"
    """The held-out set. Tuning seeds have the one with `_validation` behind its name."""

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        return (self.tuning_seed, *self.also_tuned)

    def shares_stage(self, method: str) -> bool:
        """Whether the method takes all its updates on the one stage that the methods of a seed share."""
        return self.methods[method].mu == self.methods[method].updates

    def phases(self, method: str) -> int:
        """How often the method's run generates."""
        return self.methods[method].updates // self.methods[method].mu

    def longest(self, method: str) -> int:
        """Updates of the method's longest stage."""
        growth = self.methods[method].settings.get("schedule.growth", 1.0)
        stages = self.phases(method)
        schedule = ScheduleSection(stages=stages, updates_per_stage=self.methods[method].mu, growth=growth)
        return max(schedule.length(stage) for stage in range(stages))

    def threshold(self, method: str) -> float:
        """The ratio below which a token is a trigger of the method's veto."""
        return self.methods[method].settings.get("objective.trigger_ratio", self.trigger_ratio)

    def end(self, accuracies: Sequence[float]) -> float:
        """The accuracy after training, from those of all a run's evaluations."""
        return statistics.fmean(accuracies[-self.last :])

    def set_of(self, seed: int) -> str:
        """The held-out set that a seed's cells are evaluated on."""
        return f"{self.task}_validation" if seed in self.tuning_seeds else self.task


def load_grid(path: Path = GRID) -> Grid:
    """Read the grid in `path`; UserError that names the first of its mistakes."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such grid; the study's own is {GRID}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    methods = {name: _method(name, fields, table["updates"]) for name, fields in table.pop("methods").items()}
    blocks = _blocks(table.pop("blocks"), table["seeds"])
    order = tuple(tuple(names) for names in table.pop("order"))
    lists: dict[str, Any] = {name: tuple(table.pop(name, ())) for name in ("ladder", "start", "also_tuned")}
    grid = Grid(**table, **lists, order=order, blocks=blocks, methods=methods)
    for problem in _problems(grid):
        raise UserError(f"{path}: {problem}")
    return grid


def _method(name: str, fields: Mapping[str, Any], updates: int) -> Method:
    settings = {f"{section}.{key}": value for section in SECTIONS for key, value in fields.get(section, {}).items()}
    own = {key: value for key, value in fields.items() if key not in SECTIONS}
    length = own.get("updates", updates)
    return Method(name, settings=settings, **{"mu": length, "updates": length, **own})


def _blocks(tables: Mapping[str, Mapping[str, Any]], seeds: int) -> dict[str, Block]:
    """The blocks. One that is the best of another has its methods; one without seeds has all."""
    blocks = {}
    defaults = {"seeds": range(seeds), "beside": (), "again": ()}
    for name, fields in tables.items():
        methods = tables.get(fields.get("best_of", name), {}).get("methods", ())
        lists = {key: tuple(fields.get(key, default)) for key, default in defaults.items()}
        blocks[name] = Block(name, **{**fields, **lists, "methods": tuple(methods)})
    return blocks


def _problems(grid: Grid) -> Iterator[str]:
    """Why the study cannot be run, a sentence each."""
    for method in grid.methods.values():
        if method.updates % method.mu:
            yield f"mu = {method.mu} of {method.name} does not divide updates = {method.updates}"
        for other in (method.twin, method.rate_of):
            if other and other not in grid.methods:
                yield f"{other}, which {method.name} names, is not in [methods]"
    for block in grid.blocks.values():
        if unknown := [name for name in (*block.methods, *block.beside) if name not in grid.methods]:
            yield f"{', '.join(unknown)} is not in [methods]; it has {', '.join(grid.methods)}"
        if block.best_of is not None and block.best_of not in grid.blocks:
            yield f"{block.name} is the best of {block.best_of}, which is not in [blocks]"
        if block.repeats and block.rate is None:
            yield f"{block.name} needs a rate, because it repeats cells"
        if outside := [seed for seed in block.seeds if seed not in range(grid.seeds)]:
            yield f"seeds of {block.name} has {outside}; the study's seeds are 0 to {grid.seeds - 1}"
        if outside := [seed for seed in block.again if seed not in block.seeds]:
            yield f"again of {block.name} has {outside}; its seeds are {', '.join(map(str, block.seeds))}"
    if unknown := [name for names in grid.order for name in names if name not in grid.blocks]:
        yield f"{', '.join(unknown)} of order is not in [blocks]; it has {', '.join(grid.blocks)}"
    if not set(grid.start) <= set(grid.ladder):
        yield "start must be rates of the ladder"
