"""Values of Parquet columns and figures, as values that JSON has."""

from __future__ import annotations

import base64
import json
import math
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID


def json_value(value: Any) -> Any:
    """`value` with everything that JSON lacks replaced, inside dictionaries and lists too.

    NaN and infinities become null, dates and times ISO 8601 text, durations seconds, decimals and UUIDs their text,
    and bytes base64 text.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): json_value(inner) for key, inner in value.items()}
        case list() | tuple():
            return [json_value(inner) for inner in value]
        case date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case bytes():
            return base64.b64encode(value).decode("ascii")
        case Decimal() | UUID():
            return str(value)
        case _:
            raise TypeError(f"{type(value).__name__} has no form in JSON")


def as_text(value: Any) -> str:
    """A text itself, any other JSON value as JSON; what UTF-8 lacks (half of a surrogate pair) becomes `?`."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()
