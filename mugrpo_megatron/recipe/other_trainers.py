"""Translates keys of TRL, verl, slime, Megatron and OpenRLHF to a recipe's keys, by other_trainers.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

MAX_TRANSLATED = 3
"""Number of keys that a message translates where the whole section is unknown."""
MAX_DEPTH = 6
"""Most levels of an unknown section that are searched."""


class Equivalent(NamedTuple):
    """Recipe keys that mean the same as another trainer's key."""

    keys: tuple[str, ...]
    """In the form `section.key`."""
    note: str = ""
    """How the values of the two keys differ."""


@cache
def equivalents() -> dict[str, Equivalent]:
    """Returns another trainer's key, with its section if that is needed -> the recipe's; read only after a mistake."""
    tables = tomllib.loads(files(__package__).joinpath("other_trainers.toml").read_text(encoding="utf-8"))
    return {
        name: Equivalent(tuple(keys.split(" + ")), table.get("note", ""))
        for keys, table in tables.items()
        for name in table["names"]
    }


def equivalent_of(name: str) -> Equivalent | None:
    """Returns the recipe keys for another trainer's key or flag (`--tensor-model-parallel-size`); None if unknown."""
    parts = name.strip().lstrip("-").replace("-", "_").lower().split(".")
    return equivalents().get(".".join(parts[-2:])) or equivalents().get(parts[-1])


def translate_key(name: str, value: Any = None) -> str:
    """Returns a sentence with the recipe's names for a key, or for the keys of a section `value`; "" if unknown."""
    names = list(_leaves(name, value)) if isinstance(value, dict) else [name]
    known = {leaf: recipe for leaf in names if (recipe := equivalent_of(leaf)) and leaf not in recipe.keys}
    return "; ".join(_sentence(leaf, recipe) for leaf, recipe in list(known.items())[:MAX_TRANSLATED])


def _sentence(name: str, recipe: Equivalent) -> str:
    keys = " and ".join(f"`{key}`" for key in recipe.keys)
    return f"`{name}` of another trainer is {keys} here" + (f" ({recipe.note})" if recipe.note else "")


def _leaves(name: str, value: Any, depth: int = 0) -> list[str]:
    """Returns the dotted names of a section's values, down to `MAX_DEPTH` levels."""
    if not isinstance(value, dict) or depth == MAX_DEPTH:
        return [name]
    return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner, depth + 1)]
