"""Loads a recipe from TOML files and `--set` overrides, validates it, and writes it back as TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import tomli_w
from pydantic import ValidationError

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.layers import Layer, Table, for_objective, layered, to_blame
from mugrpo_megatron.recipe.mistakes import sentence, shown
from mugrpo_megatron.recipe.other_trainers import translated
from mugrpo_megatron.recipe.sections import Recipe

MOST_BASES = 64
"""Recipes that one recipe may be composed of."""
MOST_BYTES = 1 << 20
"""Bytes of one TOML file; a device has no end."""
MOST_SHOWN = 100
"""Characters of a `--set` that a message shows."""


def load_recipe(
    path: Path | None, overrides: Sequence[str] = (), tell: Callable[[str], object] = lambda line: None
) -> Recipe:
    """The recipe in `path`, composed with its `base` files and overridden by `a.b=c` strings, validated.

    None stands for an empty recipe: every key at its default. A recipe may start with `base = "other.toml"`, or a list
    of such paths (relative to itself); its own keys win over its bases', a later base's over an earlier one's. The name
    of another objective takes that preset whole: the keys of `[objective]` below it are dropped, and `tell` gets a line
    if `--set` drops some. Raises UserError for a missing file, broken TOML, an unknown key or a value out of range.
    """
    layers: list[Layer] = []
    read = _read_with_base(path, within=(), read=[], layers=layers) if path else {}
    given = {override.partition("=")[0].strip(): override for override in overrides}
    base = table = for_objective(read, _objective_of(given))
    for override in overrides:
        table = _applied(table, override)
        layers.append(Layer(f"--set {_short(override)}", _applied({}, override)))
    recipe = validate(table, str(path or "--set"), layers)
    if base is not read and (line := _dropped(read["objective"], recipe)):
        tell(f"{path}: {line}")
    return recipe


def validate(table: Table, source: str, layers: Sequence[Layer] = ()) -> Recipe:
    """The typed recipe of a table; UserError lists every wrong key in one sentence each.

    A sentence names the one of the `layers` that brings the mistake in, else `source`, the whole table's name.
    """
    if not (wrong := _mistakes(table)):
        return Recipe.model_validate(table)
    raise UserError("; ".join(f"{to_blame(one, layers, _mistakes) or source}: {one}" for one in wrong))


def _mistakes(table: Table) -> list[str]:
    """A sentence for every wrong key of a table."""
    try:
        Recipe.model_validate(table)
    except ValidationError as error:
        return [sentence(one) for one in error.errors()]
    return []


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as TOML, unset optional fields left out; `load_recipe` of the text gives the same recipe."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def read_toml(path: Path) -> Table:
    """The tables of a TOML file; UserError when it is missing, unreadable or not TOML."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise UserError(f"{path}: longer than {MOST_BYTES:,} bytes, so not a recipe")
        return parse_toml(raw.decode("utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe; the bundled ones are in run_scripts/recipes/") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read as a recipe ({reason})") from None
    except ValueError as error:  # also for a path with a null character
        raise UserError(f"{path}: not valid TOML: {error}") from None


def parse_toml(text: str) -> Table:
    """The tables of a TOML text; ValueError when it is not TOML, nested too deep, or has a number of 4,300 digits."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _read_with_base(path: Path, within: tuple[Path, ...], read: list[Path], layers: list[Layer]) -> Table:
    """The tables of a recipe and its bases.

    `within` are the recipes that lead to it, `read` all those read so far; `layers` gets each with its own keys alone.
    """
    table = read_toml(path)
    if (own := path.resolve()) in within:
        raise UserError(f"{path}: its `base` leads back to itself; break the cycle")
    read.append(own)
    if len(read) > MOST_BASES:
        raise UserError(f"{path}: more than {MOST_BASES} recipes are composed by `base`; write fewer")
    base = table.pop("base", None)
    names = [] if base is None else [base] if isinstance(base, str) else base
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'{path}: `base` is the path of another recipe, or a list of them, as in base = "common.toml"')
    tables = [_read_with_base(path.parent / name, (*within, own), read, layers) for name in names]
    layers.append(Layer(str(path), table))
    return reduce(layered, [*tables, table])


def _dropped(section: Table, recipe: Recipe) -> str | None:
    """A sentence on the keys of an `[objective]` that another name has replaced; None if all values are the same."""
    now = recipe.objective.model_dump(mode="json")
    keys = [key for key, value in section.items() if key != "name" and now.get(key) != value]
    if not keys:
        return None
    listed = ", ".join(f"{key} = {shown(section[key])}" for key in keys)
    return (
        f"its objective is {shown(section['name'])}, and --set objective.name={recipe.objective.name} takes that "
        f"preset whole; no longer in force: {listed}; use --set to keep one"
    )


def _applied(table: Table, override: str) -> Table:
    """`table` with `a.b=c`; c is TOML where it parses as such (numbers, booleans, lists), else a plain string.

    A key that takes text alone gets the text (`fitting`).
    """
    dotted, equals, text = override.partition("=")
    *sections, key = dotted.strip().split(".")
    if not equals or not key or not sections:
        meant = translated(dotted)
        raise UserError(
            f"--set {override}: write it as section.key=value, for instance --set schedule.stages=8"
            + (f"; {meant}" if meant else "")
        )
    found = inner = dict(table)
    for section in sections:
        below = inner.get(section, {})
        if not isinstance(below, dict):
            raise UserError(f"--set {override}: {section} is a value, not a section")
        inner[section] = inner = dict(below)
    inner[key] = fitting(dotted.strip(), text.strip(), _value(override, text))
    return found


def _objective_of(overrides: Mapping[str, str]) -> object:
    """The objective that `--set` names, None without one."""
    override = overrides.get("objective.name")
    return None if override is None else _value(override, override.partition("=")[2])


def _short(override: str) -> str:
    """The override as it can be printed, cut where it is long."""
    text = override if override.isprintable() else ascii(override)[1:-1]
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def fitting(key: str, text: str, value: Any) -> Any:
    """`value`, the TOML value of `text`; the text where `key` takes texts or paths alone.

    `model.revision=1.0` is no number, and `run.dir=2026-05-01` no date.
    """
    model: Any = Recipe
    for name in key.split("."):
        fields = getattr(model, "model_fields", {})
        model = fields[name].annotation if name in fields else None
    texts = {*(get_args(model) or (model,))} <= {str, Path, NoneType}
    return text if texts and isinstance(value, int | float | date | time) else value


def _value(override: str, text: str) -> Any:
    """The value of an override's text: TOML where it parses as such, else the text itself."""
    try:
        override.encode("utf-8")
        found = parse_toml(f"value = {text}")
    except UnicodeEncodeError:
        raise UserError(f"--set {override}: not UTF-8 text") from None
    except tomllib.TOMLDecodeError:
        return text
    except ValueError as error:
        raise UserError(f"--set {shown(override)}: {error}") from None
    if found.keys() != {"value"}:
        raise UserError(f"--set {override}: sets several keys; pass --set once for each")
    return found["value"]
