"""Measures a request before any of it is rendered: bytes of all its texts, number of values, depth of nesting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

MOST_BYTES = 1 << 20
"""Most bytes, as UTF-8, of all texts of a request: more than fits into a context, and tokenized in about a second.

Bytes are counted, not characters: a million Chinese characters or emoji take three to four times as long to tokenize as
a million letters.
"""
MOST_VALUES = 1 << 15
"""Most values of a chat request; an object and a list are a value each, besides what they hold."""
MOST_IDS = 1 << 20
"""Most values of a function's request, in which each token id is a value."""
MOST_DEPTH = 64
"""Most objects and lists inside each other."""


class Size(NamedTuple):
    """Size of a JSON value."""

    bytes: int
    """Bytes of all its texts, keys and numbers, as UTF-8."""
    values: int
    depth: int


def size_of(value: Any, most_values: int = MOST_VALUES) -> Size:
    """The size of a JSON value; stops counting beyond `most_values` or `MOST_DEPTH`."""
    size, values, depth = 0, 0, 0
    level: list[Any] = [value]
    while level and values <= most_values and depth <= MOST_DEPTH:
        inner: list[Any] = []
        values += len(level)
        for entry in level:
            if isinstance(entry, str):
                size += utf8_bytes(entry)
            elif isinstance(entry, int):
                size += entry.bit_length() // 3 + 1  # at least as many bytes as the integer has digits
            elif isinstance(entry, float):
                size += 24
            elif isinstance(entry, dict):
                size += sum(map(utf8_bytes, map(str, entry)))
                inner.extend(entry.values())
            elif isinstance(entry, list | tuple):
                inner.extend(entry)
            if len(inner) > most_values:
                break
        depth += bool(inner)
        level = inner
    return Size(size, values + len(level), depth)


def utf8_bytes(text: str) -> int:
    """Bytes of a text as UTF-8; a lone surrogate, which JSON may spell out, counts as three."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def check_size(value: Any, most_values: int = MOST_VALUES, most_bytes: int = MOST_BYTES) -> None:
    """Raise ValueError for a JSON value that is too large to be rendered."""
    size = size_of(value, most_values)
    if size.depth > MOST_DEPTH:
        raise ValueError(f"objects and lists nested deeper than {MOST_DEPTH}")
    if size.values > most_values:
        raise ValueError(f"more than {most_values:,} values, such as messages, their fields and a tool's parameters")
    if size.bytes > most_bytes:
        raise ValueError(f"texts of {size.bytes:,} bytes, and at most {most_bytes:,} go to the model")


def texts_in(value: Any) -> Iterator[str]:
    """All texts of a JSON value, keys included."""
    level = [value]
    while level:
        entry = level.pop()
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            yield from map(str, entry)
            level.extend(entry.values())
        elif isinstance(entry, list | tuple):
            level.extend(entry)
