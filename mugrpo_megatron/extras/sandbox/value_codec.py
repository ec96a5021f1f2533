"""Encodes values that a program and its tests exchange as JSON. Runs in jails too, so it imports only the standard
library.

Values of builtin types, and named tuples, are copied and arrive as builtin values, so a program's own `__eq__` never
decides a comparison. Any other value stays where it is, and a handle of it is sent.
"""

from __future__ import annotations

import collections
import math
import types
from collections.abc import Callable
from typing import Any

MOST = 100_000
"""Most elements read from an iterable that stays with the program."""
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS = (dict, collections.Counter, collections.defaultdict, collections.OrderedDict)


def pack(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Encode a value as JSON; `keep` returns the handle of a value that cannot be copied."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is list:
        return [pack(item, keep) for item in value]
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind in (bytes, bytearray):
        return {"bytes": bytes(value).hex()}
    if kind in _MAPPINGS:
        return {"dict": [[pack(key, keep), pack(item, keep)] for key, item in dict.items(value)]}
    if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
        return {kind.__name__: [pack(item, keep) for item in value]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"tuple": [pack(item, keep) for item in tuple.__iter__(value)]}
    if kind is types.ModuleType:
        return {"module": str(value.__name__)}
    return keep(value)


def unpack(packed: Any, handle: Callable[[dict[str, Any]], Any]) -> Any:
    """Decode a value; `handle` resolves handles. Raises ValueError, TypeError or OverflowError for JSON
    that `pack` never writes."""
    if isinstance(packed, list):
        return [unpack(item, handle) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "dict":
        return {unpack(key, handle): unpack(value, handle) for key, value in content}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](unpack(item, handle) for item in content)
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    return handle(packed)
