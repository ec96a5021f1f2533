"""Text that a chat quotes: control tokens that it spells out are encoded as their characters.

Rows, tools and models write text that a template puts between its own special tokens. `mark_special` marks what must
not become a token before it is rendered, `encode_quoting` tokenizes the rendered text.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROL = re.compile(r"<[|｜].+[|｜]>")
"""Matches control tokens, also those that are not declared special, such as the turns of DeepSeek-R1's tokenizers."""
MARK = "\ufdd0"
"""A noncharacter of Unicode, after the first character of a quoted special token."""


def mark_special(value: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A JSON value with each special token of the tokenizer in its texts marked."""
    if isinstance(value, str):
        return _special(tokenizer).sub(lambda match: f"{match[0][0]}{MARK}{match[0][1:]}", value)
    if isinstance(value, dict):
        return {mark_special(key, tokenizer): mark_special(inner, tokenizer) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mark_special(inner, tokenizer) for inner in value]
    return value


def count_special(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Special tokens that a text spells out."""
    return sum(1 for _ in _special(tokenizer).finditer(text))


def encode_quoting(text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text with marked special tokens; `add_special_tokens` adds the tokenizer's special tokens around
    it."""
    pieces = _marked(tokenizer).split(text)
    ids: list[int] = tokenizer.encode(pieces[0], add_special_tokens=add_special_tokens)
    if len(pieces) == 1:
        return ids
    # One call for all: a text may spell out thousands, and a call for each costs more than its tokens.
    between = sorted({piece for piece in pieces[2::2] if piece})
    encoded = tokenizer(between, add_special_tokens=False)["input_ids"] if between else []
    of_piece = dict(zip(between, encoded, strict=True))
    of_name = {name: _characters(name.replace(MARK, ""), tokenizer) for name in set(pieces[1::2])}
    for name, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        ids += of_name[name]
        ids += of_piece.get(piece, ())
    return ids


def _characters(name: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids: list[int] = tokenizer.encode(name, add_special_tokens=False, split_special_tokens=True)
    # The name is one token in the vocabulary, but not one that transformers splits off as special.
    if ids == [tokenizer.convert_tokens_to_ids(name)]:
        return [token for half in (name[0], name[1:]) for token in tokenizer.encode(half, add_special_tokens=False)]
    return ids


@lru_cache(maxsize=8)
def _special(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, _names(tokenizer))) or r"(?!)")


@lru_cache(maxsize=8)
def _marked(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    return re.compile(f"({'|'.join(re.escape(name[0] + MARK + name[1:]) for name in _names(tokenizer)) or '(?!)'})")


def _names(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of the control tokens that have more than one character, longest first."""
    added = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or CONTROL.fullmatch(token.content)
    ]
    names = {*added, *map(str, tokenizer.all_special_tokens)}
    return sorted((name for name in names if len(name) > 1), key=len, reverse=True)
