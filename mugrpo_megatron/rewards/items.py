"""Inputs and results of a reward function: the records between the verifier and its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Row = Mapping[str, Any]
"""A row of the data, every column of it, as JSON has it."""
Asked = str | Sequence[Mapping[str, str]]
"""What the model was asked: a text, or the messages of a chat (`role`, `content`)."""


@dataclass(frozen=True, slots=True)
class Item:
    """A response, and all that is known of it."""

    response: str
    gold: Any
    """The gold as the data has it, any JSON value."""
    answer: str
    """What `math` compares the response's answer with."""
    row: Row = field(default_factory=dict)
    prompt: Asked = ""
    source: str = ""
    """The problem's `data_source`."""
    ids: Sequence[int] = ()
    """The response's token ids."""


class Needs(NamedTuple):
    """How a worker's function is called, as the worker reports it: the rest is not sent."""

    responses: int = 1
    """At most so many in one call."""
    row: bool = False
    prompt: bool = False
    ids: bool = False


class Verdict(NamedTuple):
    """What one reward function says of one response; this goes over the socket."""

    reward: float | None
    """None: the function does not apply to this response."""
    extracted: str
    """The answer that was compared; empty when none was found, or when the function does not name it."""
    why: str
    seconds: float = 0.0
    failed: bool = False
    """Whether the function raised, returned something else than a finite number, or ran into a limit."""
    well_formed: bool | None = None
    """Whether the response matches `reward.format_pattern` once; None where nothing is to be matched."""
    parts: Mapping[str, float] = {}
    """Other numbers that the function returned, by name."""
