"""What keys of TRL, verl, slime, Megatron and OpenRLHF are called in a recipe, as other_trainers.toml lists them."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

MOST_SHOWN = 3
"""Keys of one unknown section that a message translates."""
DEEPEST = 6
"""Levels of an unknown section that are searched for them."""


class Ours(NamedTuple):
    """The keys that do the same in a recipe."""

    keys: tuple[str, ...]
    """As `section.key`."""
    note: str = ""
    """How the value differs."""


@cache
def others() -> dict[str, Ours]:
    """A key of another trainer, with what stands before it if that decides -> ours; read for a mistake alone."""
    tables = tomllib.loads(files(__package__).joinpath("other_trainers.toml").read_text(encoding="utf-8"))
    return {
        name: Ours(tuple(keys.split(" + ")), table.get("note", ""))
        for keys, table in tables.items()
        for name in table["names"]
    }


def ours(name: str) -> Ours | None:
    """What a key of another trainer is called here, whatever stands before it; None for one that is not known.

    The name may be written as a flag: `--tensor-model-parallel-size`.
    """
    parts = name.strip().lstrip("-").replace("-", "_").lower().split(".")
    return others().get(".".join(parts[-2:])) or others().get(parts[-1])


def translated(name: str, value: Any = None) -> str:
    """A sentence on the keys that a name, and those of the section `value` below it, have here; empty without any."""
    names = list(_leaves(name, value)) if isinstance(value, dict) else [name]
    known = {one: there for one in names if (there := ours(one)) and one not in there.keys}
    return "; ".join(_sentence(one, there) for one, there in list(known.items())[:MOST_SHOWN])


def _sentence(name: str, there: Ours) -> str:
    keys = " and ".join(f"`{key}`" for key in there.keys)
    return f"`{name}` of another trainer is {keys} here" + (f" ({there.note})" if there.note else "")


def _leaves(name: str, value: Any, deep: int = 0) -> list[str]:
    """The dotted names of a section's values, down to `DEEPEST` levels."""
    if not isinstance(value, dict) or deep == DEEPEST:
        return [name]
    return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner, deep + 1)]
