"""Translates keys of TRL, verl, slime, Megatron and OpenRLHF to a recipe's keys, by other_trainers.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

MAX_TRANSLATED = 3
"""Most keys that a message translates if a whole section is unknown."""
MAX_DEPTH = 6
"""Most levels of an unknown section in which keys are searched."""


class Equivalent(NamedTuple):
    """The recipe keys that mean the same as another trainer's key."""

    keys: tuple[str, ...]
    """In the form `section.key`."""
    note: str = ""
    """The difference between the values of the two keys; "" without one."""


@cache
def equivalents() -> dict[str, Equivalent]:
    """Returns a dictionary: another trainer's key -> the recipe keys that mean the same.

    A key whose name alone is ambiguous has its section in that trainer in front. The file is read at the first call,
    since only mistakes need it.
    """
    tables = tomllib.loads(files(__package__).joinpath("other_trainers.toml").read_text(encoding="utf-8"))
    return {
        name: Equivalent(tuple(keys.split(" + ")), table.get("note", ""))
        for keys, table in tables.items()
        for name in table["names"]
    }


def equivalent_of(name: str) -> Equivalent | None:
    """Returns the recipe keys that mean the same as another trainer's key or flag (`--tensor-model-parallel-size`), or
    None."""
    parts = name.strip().lstrip("-").replace("-", "_").lower().split(".")
    return equivalents().get(".".join(parts[-2:])) or equivalents().get(parts[-1])


def translate_key(name: str, value: Any = None) -> str:
    """Returns a sentence with the recipe's name for another trainer's key; "" if the key is unknown, or if it has
    the same name here.

    If `value` is a table, the sentence is about the keys in it.
    """
    names = list(_leaves(name, value)) if isinstance(value, dict) else [name]
    known = {leaf: recipe for leaf in names if (recipe := equivalent_of(leaf)) and leaf not in recipe.keys}
    return "; ".join(_sentence(leaf, recipe) for leaf, recipe in list(known.items())[:MAX_TRANSLATED])


def _sentence(name: str, recipe: Equivalent) -> str:
    keys = " and ".join(f"`{key}`" for key in recipe.keys)
    return f"`{name}` of another trainer is {keys} here" + (f" ({recipe.note})" if recipe.note else "")


def _leaves(name: str, value: Any, depth: int = 0) -> list[str]:
    """Returns the dotted names of all values in a section; a table MAX_DEPTH levels deep counts as a value."""
    if not isinstance(value, dict) or depth == MAX_DEPTH:
        return [name]
    return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner, depth + 1)]
