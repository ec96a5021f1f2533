"""The layers that a recipe is composed of: files and `--set`, each over those before it; and which one is to blame."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

Table = dict[str, Any]


class Layer(NamedTuple):
    """One file of a recipe, or one `--set`."""

    name: str
    """As a message calls it."""
    table: Table
    """Its own keys alone."""


def layered(base: Table, top: Table) -> Table:
    """The tables of `base` below those of `top`; another objective in `top` takes its preset whole."""
    section = top.get("objective")
    return merged(for_objective(base, section.get("name") if isinstance(section, dict) else None), top)


def for_objective(table: Table, name: object) -> Table:
    """`table`, its `[objective]` empty if it names another one: a clip range of mu-GRPO is not one of GRPO."""
    section = table.get("objective")
    if name is None or not isinstance(section, dict) or section.get("name", name) == name:
        return table
    return {**table, "objective": {}}


def merged(base: Table, top: Table) -> Table:
    """The keys of both, table by table; where both have one, that of `top`."""
    found = dict(base)
    for key, value in top.items():
        both_tables = isinstance(value, dict) and isinstance(base.get(key), dict)
        found[key] = merged(base[key], value) if both_tables else value
    return found


def to_blame(mistake: str, layers: Sequence[Layer], mistakes: Callable[[Table], Collection[str]]) -> str | None:
    """The name of the layer that brings a mistake in: the first with which it is there and stays to the end.

    `mistakes` are those of a table. None when the layers do not have it, one over the other.
    """
    tables = list(accumulate((layer.table for layer in layers), layered))
    since = list(takewhile(lambda place: mistake in mistakes(tables[place]), reversed(range(len(tables)))))
    return layers[since[-1]].name if since else None
