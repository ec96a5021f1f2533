"""Loads a recipe from TOML files and `--set` overrides, validates it, and writes it back as TOML."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.sections import Recipe

Table = dict[str, Any]


def load_recipe(path: Path | None, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe in `path`, composed with its `base` files and overridden by `a.b=c` strings, validated.

    None stands for an empty recipe: every key at its default. A recipe may start with `base = "other.toml"`, or a list
    of such paths (relative to itself); its own keys win over its bases', a later base's over an earlier one's.
    Raises UserError for a missing file, broken TOML, an unknown key or a value out of range.
    """
    table = _read_with_base(path, seen=()) if path else {}
    for override in overrides:
        _apply(table, override)
    return validate(table, source=str(path or "--set"))


def validate(table: Table, source: str) -> Recipe:
    """The typed recipe of a table; UserError lists every wrong key of `source` in one sentence each."""
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        raise UserError("; ".join(f"{source}: {_sentence(e)}" for e in error.errors())) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as TOML, unset optional fields left out; `load_recipe` of the text gives the same recipe."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def _read_with_base(path: Path, seen: tuple[Path, ...]) -> Table:
    if path.resolve() in seen:
        raise UserError(f"{path}: its `base` leads back to itself; break the cycle")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe; the bundled ones are in run_scripts/recipes/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a recipe ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    base = table.pop("base", None)
    if base is None:
        return table
    names = [base] if isinstance(base, str) else base
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'{path}: `base` is the path of another recipe, or a list of them, as in base = "common.toml"')
    tables = [_read_with_base(path.parent / name, (*seen, path.resolve())) for name in names]
    return reduce(_merge, [*tables, table])


def _merge(base: Table, top: Table) -> Table:
    merged = dict(base)
    for key, value in top.items():
        both_tables = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if both_tables else value
    return merged


def _apply(table: Table, override: str) -> None:
    """Set `a.b=c` in place; c is TOML where it parses as such (numbers, booleans, lists), else a plain string."""
    dotted, equals, text = override.partition("=")
    *sections, key = dotted.strip().split(".")
    if not equals or not key or not sections:
        raise UserError(f"--set {override}: write it as section.key=value, for instance --set schedule.stages=8")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {override}: {section} is a value, not a section")
    try:
        table[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[key] = text


def _sentence(error: ErrorDetails) -> str:
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = _known_keys(error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"known keys: {', '.join(sorted(known))}"
        return f"`{place}` is not a recipe key; {hint}"
    message = error["msg"].removeprefix("Value error, ")
    value = "" if isinstance(error["input"], dict) else f" = {error['input']!r}"
    return f"`{place}`{value}: {message}" if place else message


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Recipe
    parts = iter(loc)
    for part in parts:
        annotation = model.model_fields[str(part)].annotation
        if get_origin(annotation) is dict:  # tables whose names the user chooses
            next(parts)
            annotation = get_args(annotation)[1]
        assert isinstance(annotation, type)
        model = annotation
    return list(model.model_fields)
