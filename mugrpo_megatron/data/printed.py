"""Parses texts that stand for a list or an object: Python lists as `print` writes them, and JSON inside a column's
text."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from typing import Any

from mugrpo_megatron.files.json_text import parse_json

_ITEM = r"[rRuU]?'(?:\\.|[^'\\])*'|[rRuU]?\"(?:\\.|[^\"\\])*\"|[+-]?[0-9]+(?:\.[0-9]+)?"
_LIST = re.compile(rf"\[\s*(?:{_ITEM})(?:(?:\s*,\s*|\s+)(?:{_ITEM}))*\s*,?\s*\]", re.DOTALL)
_ITEMS = re.compile(_ITEM, re.DOTALL)
_ARRAY = re.compile(r"(?:(?:np|numpy)\.)?array\((.*?)(?:,\s*dtype=[^()]*)?\)", re.DOTALL)
_CODE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})(?![A-Za-z]))")
_BLANK = re.compile(r"\\[nrt](?![A-Za-z])")


def printed_list(text: str) -> list[str] | None:
    r"""The elements of a list of quoted texts, or of quoted texts and numbers, as Python or NumPy prints it. None for
    any other text.

    Commas separate the elements, or blanks, as NumPy prints. A tuple, a set, an array, and a list whose only element is
    a list are read the same way. An element whose backslashes are all doubled is read as a Python literal. In any other
    element `\frac` and `\theta` keep their backslash: only `\uXXXX` and `\xXX` become characters, and `\n`, `\r` and
    `\t` that are not followed by a letter become blanks.
    """
    text = text.strip()
    text = array[1].strip() if (array := _ARRAY.fullmatch(text)) else text
    if text[:1] + text[-1:] in ("()", "{}"):
        text = f"[{text[1:-1]}]"
    if text[:2] in ("[[", "[(") and _LIST.fullmatch(alone := f"[{text[2:-2]}]"):
        text = alone
    if ("'" not in text and '"' not in text) or not _LIST.fullmatch(text):
        return None
    return [_element(item) for item in _ITEMS.findall(text)]


def _element(item: str) -> str:
    prefix = item[0].lower() if item[0].isalpha() else ""
    item = item[len(prefix) :]
    if item[0] not in "'\"" or prefix == "r":
        return item.strip("'\"")
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
    """The row with each chat, object or list of tools that a column holds as text replaced by its value.

    The text may be JSON, or what Python prints. Raises ValueError for a text that begins like a chat, an object or a
    list of tools and cannot be read.
    """
    texts = {name: row[name] for name in (*STRUCTURES, *OBJECTS, *LISTS) if isinstance(row.get(name), str)}
    values = {name: parsed_text(name, text) for name, text in texts.items()}
    changed = {name: value for name, value in values.items() if value is not texts[name]}
    return {**row, **changed} if changed else row


def parsed_text(name: str, text: str) -> Any:
    """The chat, object or list that the text of the column `name` stands for; any other text is returned unchanged.

    Raises ValueError for a text that begins like the list or object that this column holds and cannot be read.
    """
    kind = dict if name in OBJECTS else list
    is_chat = name not in (*OBJECTS, *LISTS)
    if re.match(r"\s*\"\s*[\[{]", text):  # perhaps a JSON string whose content is JSON again
        with suppress(ValueError):
            text = inner if isinstance(inner := parse_json(text), str) else text
    if name == "messages" and text.strip() == "[]":
        return []
    opening = r"\{\s*[\"'}]" if kind is dict else r"[\[{]\s*[{\"']" if is_chat else r"\[\s*\{"
    if not re.match(rf"\s*{opening}", text):
        return text
    if is_chat and not re.search(r"[\"']role[\"']\s*:", text):
        return text
    try:
        value = _parsed(text)
    except ValueError as error:
        if is_chat and text.lstrip()[0] == "{":
            return text
        form = "an object" if kind is dict else "a list of objects"
        raise ValueError(f"column {name!r} holds text that begins like {form} and is not JSON ({error})") from None
    if is_chat and isinstance(value, dict):  # perhaps a single message, or an object that has messages
        inner = value.get("messages")
        value = inner if isinstance(inner, list) else [value] if isinstance(value.get("role"), str) else value
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
