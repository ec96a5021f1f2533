"""What keys of TRL, verl, slime, Megatron and OpenRLHF are called in a recipe, as other_trainers.toml lists them."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

MAX_TRANSLATED = 3
"""Keys of one unknown section that a message translates."""
MAX_DEPTH = 6
"""Levels of an unknown section that are searched for them."""


class Equivalent(NamedTuple):
    """The keys that do the same in a recipe."""

    keys: tuple[str, ...]
    """As `section.key`."""
    note: str = ""
    """How the value differs."""


@cache
def equivalents() -> dict[str, Equivalent]:
    """A key of another trainer, with what stands before it if that decides -> ours; read for a mistake alone."""
    tables = tomllib.loads(files(__package__).joinpath("other_trainers.toml").read_text(encoding="utf-8"))
    return {
        name: Equivalent(tuple(keys.split(" + ")), table.get("note", ""))
        for keys, table in tables.items()
        for name in table["names"]
    }


def equivalent_of(name: str) -> Equivalent | None:
    """What a key of another trainer is called here, whatever stands before it; None for one that is not known.

    The name may be written as a flag: `--tensor-model-parallel-size`.
    """
    parts = name.strip().lstrip("-").replace("-", "_").lower().split(".")
    return equivalents().get(".".join(parts[-2:])) or equivalents().get(parts[-1])


def translate_key(name: str, value: Any = None) -> str:
    """A sentence on the keys that a name, and those of the section `value` below it, have here; empty without any."""
    names = list(_leaves(name, value)) if isinstance(value, dict) else [name]
    known = {one: there for one in names if (there := equivalent_of(one)) and one not in there.keys}
    return "; ".join(_sentence(one, there) for one, there in list(known.items())[:MAX_TRANSLATED])


def _sentence(name: str, there: Equivalent) -> str:
    keys = " and ".join(f"`{key}`" for key in there.keys)
    return f"`{name}` of another trainer is {keys} here" + (f" ({there.note})" if there.note else "")


def _leaves(name: str, value: Any, deep: int = 0) -> list[str]:
    """The dotted names of a section's values, down to `MAX_DEPTH` levels."""
    if not isinstance(value, dict) or deep == MAX_DEPTH:
        return [name]
    return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner, deep + 1)]
