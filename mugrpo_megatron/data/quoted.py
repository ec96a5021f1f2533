"""Encodes text that merely quotes control tokens, such as `<|im_end|>` in a question, as plain characters.

Rows, tools and models write text that a template puts between its own special tokens. Before rendering, `mark_special`
marks what must not become a token; after it, `encode_quoting` tokenizes the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROL = re.compile(r"<[|｜].+[|｜]>")
"""Matches control tokens, also those that a tokenizer does not declare special, such as DeepSeek-R1's for turns."""
MARK = "\ufdd0"
"""A character that no text has (a noncharacter of Unicode). It is put after the first character of a quoted token."""
MOST_BRANCHES = 16
"""Most branches inside each other in a regular expression; Python's parser of expressions is recursive."""


def mark_special(value: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A JSON value in whose texts each special token of the tokenizer is marked as quoted."""
    if isinstance(value, str):
        return _special(tokenizer).sub(lambda match: f"{match[0][0]}{MARK}{match[0][1:]}", value)
    if isinstance(value, dict):
        return {mark_special(key, tokenizer): mark_special(inner, tokenizer) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mark_special(inner, tokenizer) for inner in value]
    return value


def count_special(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of special tokens that a text spells out."""
    return sum(1 for _ in _special(tokenizer).finditer(text))


def encode_quoting(text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text in which quoted special tokens are marked: those are encoded as their characters.

    `add_special_tokens` adds the tokenizer's special tokens around the text.
    """
    pieces = _marked(tokenizer).split(text)
    ids: list[int] = tokenizer.encode(pieces[0], add_special_tokens=add_special_tokens)
    if len(pieces) == 1:
        return ids
    # All pieces in one call: a text may quote thousands of tokens, and a call for each piece would be slow.
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
    # `split_special_tokens` has no effect on a token that is in the vocabulary without being declared special.
    if ids == [tokenizer.convert_tokens_to_ids(name)]:
        return [token for half in (name[0], name[1:]) for token in tokenizer.encode(half, add_special_tokens=False)]
    return ids


@lru_cache(maxsize=8)
def _special(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    return re.compile(any_of(_names(tokenizer)))


@lru_cache(maxsize=8)
def _marked(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    return re.compile(f"({any_of([name[0] + MARK + name[1:] for name in _names(tokenizer)])})")


def any_of(texts: Collection[str], depth: int = MOST_BRANCHES) -> str:
    """A regular expression that matches the longest of `texts` at a position; without texts it never matches.

    In it, texts that begin alike share a branch, down to `depth` levels. A plain list of alternatives would try each
    text at each `<`, and a tokenizer may have a thousand control tokens: a million `<` would take seconds.
    """
    if depth == 0 or not texts:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)"
    branches = []
    for _, group in groupby(sorted(set(texts)), key=lambda text: text[:1]):
        alike = list(group)
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(alike[0], alike[-1], strict=False))
        # The texts are sorted, so all of them begin with what the first and the last have in common.
        begin = "".join(character for character, _ in pairs)
        rest = [text[len(begin) :] for text in alike]
        branches.append(re.escape(begin) + (f"(?:{any_of(rest, depth - 1)})" if len(rest) > 1 else ""))
    # An empty text is the first in sorted order; it matches anywhere, so it has to be tried last.
    return "|".join(reversed(branches))


def _names(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of the tokenizer's control tokens; tokens of a single character are left out."""
    added = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or CONTROL.fullmatch(token.content)
    ]
    return sorted({name for name in (*added, *map(str, tokenizer.all_special_tokens)) if len(name) > 1})
