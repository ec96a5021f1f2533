"""Finds the answer in a response. Only string work, microseconds per response; nothing is parsed here."""

from __future__ import annotations

import re
from typing import NamedTuple

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_PHRASE = re.compile(r"\b(?:final\s+)?answer\s*(?:is\b|:|=)\s*:?\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z])|\.\s*$|\n")
_PROSE = re.compile(
    r"(?<![\\A-Za-z{])[A-Za-z']{2,}\s+(?:[A-Za-z']{1,}\s+)?(?:[A-Za-z']{2,}|(?=[$\\0-9]))|(?<!\\)\b[A-Za-z]{3,}\s*:"
)
_MATH = re.compile(r"\$\$.+?\$\$|(?<!\\)\$.+?(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]")
_NUMBER = re.compile(
    r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+(?:,[0-9]{2}(?![0-9]))?)(?:\.[0-9]+)?(?:\s?/\s?[0-9]+|%)?"
)
_VALUE = re.compile(f"{_MATH.pattern}|{_NUMBER.pattern}")
_CONNECTIVE = re.compile(
    r"(?:\s|\$|,|;|\.|\\[()\[\],;:! ]|\\q?quad\b|\\text\s*\{[^{}0-9]{0,40}\}|\b(?:and|or)\b"
    r"|[a-zA-Z](?:_\{?\w\}?)?\s*=)*"
)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|\{|\}", re.DOTALL)
_PROSE_CHARS = 1000
_TAIL_CHARS = 8000
"""Only this much of a response's end is searched; an earlier answer does not count."""


def is_integer(text: str) -> bool:
    """Whether text is one integer and nothing else."""
    return _INTEGER.fullmatch(text) is not None


def answer_of(response: str) -> str:
    r"""The part of a response that counts as its answer, whitespace stripped; empty when there is no answer.

    Tried in this order: a response that is one integer; the last `\boxed{}`, joined with the boxes before it when only
    "and", commas and the like stand between; what follows the last `####`; what follows the last "answer is" or
    "answer:" in its sentence; a displayed `$$...$$` at the end; the last line, or in prose its last formula or number.
    """
    text = response.strip()
    if is_integer(text):
        return text
    text = text[-_TAIL_CHARS:]
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n", 1)[0].strip()
    phrases = list(_PHRASE.finditer(text))
    if phrases:
        return committed(_SENTENCE_END.split(text[phrases[-1].end() :].strip(), maxsplit=1)[0].strip())
    if text.endswith("$$") and text.count("$$") >= 2:
        return text.rsplit("$$", 2)[1].strip()
    line = text.rsplit("\n", 1)[-1].strip()
    if not _PROSE.search(line[-_PROSE_CHARS:]):
        return line
    found = [*_VALUE.finditer(line[-_PROSE_CHARS:])]
    return found[-1][0].strip("$ ") if found else line


def committed(statement: str) -> str:
    """The answer in a statement: the statement itself, or in prose all its formulas, or else all its numbers."""
    if not _PROSE.search(statement[:_PROSE_CHARS]):
        return statement
    statement = statement[:_PROSE_CHARS]
    found = _MATH.findall(statement) or _NUMBER.findall(statement)
    return ", ".join(dict.fromkeys(part.strip("$ ") for part in found)) if found else statement


def boxed_answer(text: str) -> str | None:
    r"""Contents of the last group of `\boxed{}`, joined by commas; None without a complete box.

    Boxes form a group when only connectives stand between them. Several answers make a list, and a list never equals a
    single gold, so boxing many candidates gains nothing.
    """
    boxes = _boxes(text)
    if not boxes:
        return None
    group = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _CONNECTIVE.fullmatch(text, box.end, group[0].start):
            break
        group.insert(0, box)
    return ", ".join(dict.fromkeys(text[box.inside : box.end - 1].strip() for box in group))


class _Box(NamedTuple):
    start: int
    inside: int
    end: int


def _boxes(text: str) -> list[_Box]:
    r"""Every complete, outermost `\boxed{...}` or `\fbox{...}`, in one pass; escaped braces are text."""
    found: list[_Box] = []
    open_braces: list[re.Match[str]] = []
    for token in _BRACE.finditer(text):
        if token[0].endswith("{") and token[0] != "\\{":
            open_braces.append(token)
        elif token[0] == "}" and open_braces:
            opening = open_braces.pop()
            if opening[0] != "{":
                while found and found[-1].start > opening.start():
                    found.pop()
                found.append(_Box(opening.start(), opening.end(), token.end()))
    return found
