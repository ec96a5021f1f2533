"""Finds the answer in a response. Only string work, microseconds per response; nothing is parsed here."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Extract = Literal["auto", "boxed", "final", "last_number"]

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_PHRASE = re.compile(
    r"\b(?:final\s+answer|answer|correct\s+(?:option|choice))\s*(?:(?:is|would\s+be|must\s+be)\b|:|=)\s*:?\s*",
    re.IGNORECASE,
)
_BOLD = re.compile(r"(?<![\w)}\]])\*\*(?=\S)([^*\n]+?)\*\*(?![\w(])")
_REASON = re.compile(r"[\s,]\s*(?:because|since)\b", re.IGNORECASE)
_DENIED = re.compile(r"(?:\bnot|n't)\s+(?:(?:equal\s+to|the|a)\s+)*\Z", re.IGNORECASE)
_NEGATED = re.compile(r"\b(?:not?|cannot|unknown|neither)\b|n't\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z])|\.\s*$|\n")
_PROSE = re.compile(
    r"(?<![\\A-Za-z{])[A-Za-z']{2,}\s+(?:[A-Za-z']{1,}\s+)?(?:[A-Za-z']{2,}|(?=[$\\0-9]))|(?<!\\)\b[A-Za-z]{3,}\s*:"
)
_MATH = re.compile(r"\$\$.+?\$\$|(?<!\\)\$.+?(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]")
_NUMBER = re.compile(
    r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+(?:,[0-9]{2}(?![0-9]))?)(?:\.[0-9]+)?(?:\s?/\s?[0-9]+|%)?"
)
_VALUE = re.compile(f"{_MATH.pattern}|{_NUMBER.pattern}")
_TEXT = re.compile(
    r"(?!\$[0-9])(?:.*?(?<![\\A-Za-z])[A-Za-z]{3,}|[\\$(\s]*(?:\\[a-z]+\{)*\(?[A-Z]\)?\}*[\\$).\s]*\Z)", re.DOTALL
)
"""A formula with words in it, or one that is the letter of a choice; no amount of money."""
_CONNECTIVE = re.compile(
    r"(?:\s|\$|,|;|\.|\\[()\[\],;:! ]|\\q?quad\b|\\text\s*\{[^{}0-9]{0,40}\}|\b(?:and|or)\b"
    r"|[a-zA-Z](?:_\{?\w\}?)?\s*=)*"
)
_BRACE = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\.|\{|\}", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?![A-Za-z{\s])([^\s${}\\]+)")
_PROSE_CHARS = 1000
_TAIL_CHARS = 8000
"""Only this much of a response's end is searched; an earlier answer does not count."""


def is_integer(text: str) -> bool:
    """Whether text is one integer and nothing else."""
    return _INTEGER.fullmatch(text) is not None


def answer_of(response: str, extract: Extract = "final", text_gold: bool = False) -> str:
    r"""The part of a response that counts as its answer, whitespace stripped; empty when there is no answer.

    "boxed" takes the last `\boxed{}` or `\fbox{}` only, joined with the boxes before it when only "and", commas and the
    like stand between. "final" takes, in this order: a response that is one integer; the last box; what follows the
    last `####`; what follows the last "answer is" or "answer:" in its sentence; a displayed `$$...$$` at the end; the
    last line, or in prose its last formula or number. "last_number" takes the last number, wherever it stands. "auto"
    is "final"; a recipe whose prompts ask for a box makes it "boxed".

    With `text_gold` the gold is words or a choice: prose is then the answer, not the numbers in it.
    """
    text = response.strip()
    if extract == "last_number":
        found = _NUMBER.findall(text[-_TAIL_CHARS:])
        return found[-1] if found else ""
    if extract == "boxed":
        return boxed_answer(text[-_TAIL_CHARS:]) or ""
    return text if is_integer(text) else _final_answer(text[-_TAIL_CHARS:], text_gold)


def stated(text: str) -> str | None:
    """What follows the last "answer is" or "answer:" in its sentence; None without such a phrase."""
    phrases = list(_PHRASE.finditer(text))
    return _SENTENCE_END.split(text[phrases[-1].end() :].strip(), maxsplit=1)[0].strip() if phrases else None


def _final_answer(text: str, text_gold: bool) -> str:
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    text = _BOLD.sub(r"\1", text)
    if "####" in text:
        after = text.rsplit("####", 1)[1].strip().split("\n", 1)[0].strip()
        if not after.lower().startswith(("final answer", "answer")):
            return after
    statement = stated(text)
    if statement is not None:
        return committed(statement, text_gold)
    if text.endswith("$$") and text.count("$$") >= 2:
        return text.rsplit("$$", 2)[1].strip()
    line = text.rsplit("\n", 1)[-1].strip()
    if not _is_prose(line[-_PROSE_CHARS:]):
        return line
    line = line[-_PROSE_CHARS:]
    found = [match for match in _VALUE.finditer(line) if not text_gold or _TEXT.match(match[0])]
    if not found or _NEGATED.search(line, found[-1].end()) or _DENIED.search(line[: found[-1].start()]):
        return line
    return found[-1][0].strip("$ ")


def _is_prose(line: str) -> bool:
    """Whether words stand around formulas or numbers."""
    return bool(_PROSE.search(line) or (_MATH.search(line) and re.search(r"[A-Za-z]{2,}", _MATH.sub(" ", line))))


def committed(statement: str, text_gold: bool = False) -> str:
    """The answer in a statement: the statement itself, or in prose all its formulas, or else all its numbers.

    What follows "because" or "since" is no part of it. With `text_gold`, formulas without words and numbers are none.
    """
    statement = _REASON.split(statement, maxsplit=1)[0].rstrip()
    statement = statement[:_PROSE_CHARS] if _is_prose(statement[:_PROSE_CHARS]) else statement
    if not _is_prose(statement[:_PROSE_CHARS]) or _NEGATED.match(statement):
        return statement
    found = _MATH.findall(statement) or _NUMBER.findall(statement)
    found = [part for part in found if not text_gold or _TEXT.match(part)]
    return ", ".join(dict.fromkeys(part.strip("$ ") for part in found)) if found else statement


def boxed_answer(text: str) -> str | None:
    r"""Contents of the last group of `\boxed{}`, joined by commas; None without a complete box.

    Boxes form a group when only connectives stand between them. Several answers make a list, and a list never equals a
    single gold, so boxing many candidates gains nothing.
    """
    boxes = _boxes(text)
    if not boxes:
        bare = _BARE_BOX.findall(text)
        return bare[-1].rstrip(".,;") if bare else None
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
