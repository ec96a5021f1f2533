"""Reads JSON; whatever is wrong with it becomes a ValueError or UserError of one sentence."""

from __future__ import annotations

import base64
import json
import math
import re
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from mugrpo_megatron.errors import UserError

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text; bytes have to be UTF-8.

    Raises ValueError for text that is not JSON, is nested too deep, or has an integer of over 4,300 digits or half of a
    surrogate pair, which UTF-8 cannot express.
    """
    text = text if isinstance(text, str) else text.decode("utf-8")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects are nested too deep") from None
    except ValueError as error:
        if "integer string conversion" in str(error):  # CPython's own message advises a call that the user cannot make
            raise ValueError("an integer has more than 4,300 digits; write it as text") from None
        raise
    if SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def read_json(path: Path, remedy: str = "restore it from its source") -> dict[str, Any]:
    """Returns the JSON object in a file; UserError, which ends with `remedy`, if the file is missing, unreadable, or no
    JSON object."""
    try:
        value = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {remedy}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        kind = {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")
        raise UserError(f"{path} holds a JSON {kind} where an object is needed; {remedy}")
    return value


def to_json_value(value: Any) -> Any:
    """Returns `value` with everything that JSON lacks replaced, inside dictionaries and lists too.

    NaN and infinities become null, dates and times ISO 8601 text, durations seconds, decimals and UUIDs their text,
    and bytes base64 text. Keys become text, and tuples lists. Raises TypeError for a value of any other type.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): to_json_value(inner) for key, inner in value.items()}
        case list() | tuple():
            return [to_json_value(inner) for inner in value]
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
    """Returns text as it is and any other value as JSON. Half of a surrogate pair, which UTF-8 cannot express, becomes
    `?`."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


MAX_NAME_BYTES = 255
"""Most bytes of a file name on Linux."""


def file_inside(index: Path, name: Any) -> Path:
    """Returns the path of the file `name` in the directory of `index`, the file that lists it.

    Raises UserError if the file is missing, or if `name` is not a plain file name. Links are followed, since snapshots
    in the hub's cache consist of them.
    """
    # Without this check an index from somebody else could make a command read outside its directory.
    if not is_file_name(name):
        raise UserError(
            f"{index} names the file {name!r}, but only names of files beside it are allowed; restore {index.name} "
            "from its source"
        )
    path = index.parent / str(name)
    if not path.is_file():
        raise UserError(f"{path} is missing, though {index.name} names it; restore it from its source")
    return path


def is_file_name(name: Any) -> bool:
    """Whether `name` is a plain file name, which cannot lead out of a directory."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return len(encoded) <= MAX_NAME_BYTES and name.isprintable() and not {"/", "\\"} & set(name)
