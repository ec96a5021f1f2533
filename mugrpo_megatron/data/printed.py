"""Texts that hold a list or an object: Python lists as `print` wrote them, and columns of JSON text."""

from __future__ import annotations

import ast
import re
from typing import Any

from mugrpo_megatron.files.json_text import parse_json

_ITEM = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|[+-]?[0-9]+(?:\.[0-9]+)?"
_LIST = re.compile(rf"\[\s*(?:{_ITEM})(?:(?:\s*,\s*|\s+)(?:{_ITEM}))*\s*,?\s*\]", re.DOTALL)
_ITEMS = re.compile(_ITEM, re.DOTALL)
_CODE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})(?![A-Za-z]))")
_BLANK = re.compile(r"\\[nrt](?![A-Za-z])")


def printed_list(text: str) -> list[str] | None:
    r"""The elements of a printed list of quoted texts and numbers, by commas or, as NumPy prints, by blanks; else None.

    An element whose backslashes are all doubled is a Python literal. Otherwise `\f` and `\t` are not control
    characters but the beginning of `\frac` and `\theta`, and every backslash stays.
    """
    text = text.strip()
    if ("'" not in text and '"' not in text) or not _LIST.fullmatch(text):
        return None
    return [_element(item) for item in _ITEMS.findall(text)]


def _element(item: str) -> str:
    if item[0] not in "'\"":
        return item
    text = item[1:-1].replace("\\" + item[0], item[0])
    if all(len(run) % 2 == 0 for run in re.findall(r"\\+", text)):
        return text.replace("\\\\", "\\")
    return _BLANK.sub(" ", _CODE.sub(lambda code: chr(int(code[1] or code[2], 16)), text))


STRUCTURES = ("messages", "prompt", "question", "problem", "completion", "response", "responses")
"""Columns that may hold a chat."""
OBJECTS = ("reward_model", "extra_info", "metadata", "chat_template_kwargs")
"""Columns that hold an object."""
LISTS = ("tools", "tool_calls")


def with_parsed_texts(row: dict[str, Any]) -> dict[str, Any]:
    """The row with chats, objects and tools in place of their JSON text, or of their text as Python prints them.

    Raises ValueError for a text that begins like one and cannot be read.
    """
    texts = {name: row[name] for name in (*STRUCTURES, *OBJECTS, *LISTS) if isinstance(row.get(name), str)}
    values = {name: parsed_text(name, text) for name, text in texts.items()}
    changed = {name: value for name, value in values.items() if value is not texts[name]}
    return {**row, **changed} if changed else row


def parsed_text(name: str, text: str) -> Any:
    """The structure in the text of the column `name`; the text itself for plain text."""
    kind = dict if name in OBJECTS else list
    opening = r"\{\s*[\"'}]" if kind is dict else r"\[\s*\{"
    if not re.match(rf"\s*{opening}", text):
        return text
    is_chat = name not in (*OBJECTS, *LISTS)
    if is_chat and not re.search(r"[\"']role[\"']\s*:", text):
        return text
    try:
        value = _parsed(text)
    except ValueError as error:
        form = "an object" if kind is dict else "a list of objects"
        raise ValueError(f"column {name!r} holds text that begins like {form} and is not JSON ({error})") from None
    is_expected = isinstance(value, kind) and (kind is dict or all(isinstance(entry, dict) for entry in value))
    return value if is_expected else text


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            raise error from None
