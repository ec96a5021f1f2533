"""The one reader of JSON text: anything wrong with it becomes a one-sentence error, never another exception."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; bytes have to be UTF-8.

    Raises ValueError for text that is not JSON, nested too deep, or holds half of a surrogate pair, which cannot be
    written again.
    """
    text = text if isinstance(text, str) else text.decode("utf-8")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises UserError naming `path` when it is missing, unreadable, not UTF-8, not JSON, or not an object.
    """
    try:
        value = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {_kind(value)} where an object is needed")
    return value


def _kind(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
