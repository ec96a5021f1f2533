"""Reads the grid of a sweep from the command line and a TOML file, and makes the recipe of each cell.

[set]                                   # one value: for every cell
"eval.samples" = 4
[axes]                                  # every combination of the axes is a cell
"objective.name" = ["mu_grpo", "grpo"]
"optimizer.lr" = [1e-4, 2e-4]
[[cells]]                               # cells besides them
"objective.name" = "gspo"
"objective.clip_high" = 1.001
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.load import coerce_override, parse_toml, read_toml, validate
from mugrpo_megatron.run.directory import RunDirectory

Settings = dict[str, Any]
"""Settings of a recipe: `section.key` -> value."""

PARTS = ("set", "axes", "cells")
"""Names of the tables that a grid file may have."""
MOST_CELLS = 1000
LONGEST_NAME = 120


@dataclass(frozen=True, slots=True)
class Grid:
    common: Settings
    axes: Mapping[str, Sequence[Any]]
    extra: Sequence[Settings]


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    """Name of the cell's directory in the sweep's. It follows from the cell's settings alone, so a grid may grow."""
    settings: Settings
    recipe: Recipe


def read_grid(overrides: Iterable[str], file: Path | None) -> Grid:
    """Read the grid from `--set` words, of which those with several values are axes, and from a grid file.

    A word replaces the value or the axis that the file has for its key. Raises UserError for a malformed word or file.
    """
    table = read_toml(file) if file else {}
    if unknown := sorted(table.keys() - set(PARTS)):
        raise UserError(f"{file}: `{unknown[0]}` is not a table of a grid; there are [set], [axes] and [[cells]]")
    extra = table.get("cells", [])
    if not isinstance(extra, list) or not all(isinstance(settings, dict) for settings in extra):
        raise UserError(f"{file}: write each cell as [[cells]] and its keys below")
    common, axes = _flat(table.get("set", {}), f"{file}: [set]"), _flat(table.get("axes", {}), f"{file}: [axes]")
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{file}: the axis {key} needs a list of values, as in {key} = [1, 2]")
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if not equals or not text or "." not in key:
            raise UserError(f"--set {override}: write it as section.key=value, or section.key=value,value for an axis")
        values = _values(text)
        common.pop(key, None)
        axes.pop(key, None)
        if len(values) == 1:
            common[key] = coerce_override(key, text, values[0])
        else:
            axes[key] = values
    return Grid(common, axes, [_flat(settings, f"{file}: [[cells]]") for settings in extra])


def cells_of(grid: Grid, run: RunDirectory, out: Path) -> list[Cell]:
    """Make every cell with its recipe: the recipe of `run`, with the cell's settings and a directory of its own.

    If a cell or `[set]` names an objective, that preset replaces all of the run's `[objective]`, because the keys there
    hold values of the run's own preset. Raises UserError for a key that cells cannot differ in, for a grid with two
    equal cells, none or too many, and for a recipe that is not valid.
    """
    several = {key for key, values in grid.axes.items() if len(values) > 1} | {
        key for settings in grid.extra for key in settings
    }
    if "run.dir" in {*grid.common, *several}:
        raise UserError("run.dir: each cell has its own, inside the directory of --out; leave it out")
    if wrong := sorted(key for key in several if Recipe.changes_of(key) != "method"):
        raise UserError(
            f"{wrong[0]} cannot differ between the cells, which all train on the same stage's responses; give it one "
            f"value outside [[cells]]; cells may differ in {', '.join(_varied())}"
        )
    count = math.prod(map(len, grid.axes.values())) * bool(grid.axes) + len(grid.extra)
    if count > MOST_CELLS:
        raise UserError(f"the grid has {count:,} cells, more than {MOST_CELLS:,}; sweep a part of it")
    points = [dict(zip(grid.axes, values, strict=True)) for values in product(*grid.axes.values())] if grid.axes else []
    points += grid.extra
    if not points:
        raise UserError("the grid has no cells; give an axis, as in --set optimizer.lr=1e-4,2e-4, or a file, --grid")
    run.check_exists()
    base = read_toml(run.recipe)
    cells: dict[str, Cell] = {}
    for settings in points:
        name = name_of(settings)
        if name in cells:
            raise UserError(f"two cells of the grid are both {name}; leave one out")
        table = applied(base, {**grid.common, **settings, "run.dir": str(out / name)})
        cells[name] = Cell(name, settings, validate(table, source=f"cell {name}"))
    return list(cells.values())


def name_of(settings: Settings) -> str:
    """A cell's name, such as `name=grpo,lr=0.0001`; a long name is shortened and ends with a digest."""
    words = [f"{key.rpartition('.')[2]}={text_of(value)}" for key, value in sorted(settings.items())]
    name = re.sub(r"[^\w.,=+-]", "_", ",".join(words))
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{sha256(repr(sorted(settings.items())).encode()).hexdigest()[:8]}"


def text_of(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def applied(base: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The tables of the recipe `base` with `settings` applied; a new `objective.name` first removes all keys of
    `[objective]`."""
    table = {name: dict(section) if isinstance(section, dict) else section for name, section in base.items()}
    if "objective.name" in settings:
        table["objective"] = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        into: Any = table
        for parent in parents:
            into = into.setdefault(parent, {})
            if not isinstance(into, dict):
                raise UserError(f"{key}: {parent} is a value, not a section")
        into[last] = value
    return table


def _varied() -> list[str]:
    """Sections and keys that cells may differ in, as a message lists them."""
    names: list[str] = []
    for name, field in Recipe.model_fields.items():
        section: Any = field.annotation
        keys = [f"{name}.{key}" for key in section.model_fields if section.change_of(key) == "method"]
        names += [f"[{name}]"] if section.change_of("") == "method" else keys
    return names


def _values(text: str) -> list[Any]:
    """Parse `1e-4,2e-4` or `grpo,mu_grpo` or `"a,b","c"`: TOML values if they parse, else words."""
    try:
        table = parse_toml(f"values = [{text}]")
    except ValueError:
        return [_value(word.strip()) for word in text.split(",")]
    return list(table["values"]) if table.keys() == {"values"} else [text]


def _value(word: str) -> Any:
    try:
        table = parse_toml(f"value = {word}")
    except ValueError:
        return word
    return table["value"] if table.keys() == {"value"} else word


def _flat(table: Any, where: str, prefix: str = "") -> Settings:
    """Nested tables as `section.key`, so that keys may be written with or without quotation marks."""
    if not isinstance(table, dict):
        raise UserError(f'{where}: write keys and values, as in "optimizer.lr" = 1e-4')
    flat: Settings = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, where, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    if not prefix and (bare := sorted(key for key in flat if "." not in key)):
        raise UserError(f"{where}: `{bare[0]}` needs its section, as in optimizer.lr")
    return flat
