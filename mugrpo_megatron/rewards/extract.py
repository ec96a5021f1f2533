"""Finds the answer in a response. Only string work, microseconds per response; nothing is parsed here."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from mugrpo_megatron.rewards.prose import NUMBER, last_said, said, stated
from mugrpo_megatron.rewards.transcript import after_thoughts, tagged_answers

Extract = Literal["auto", "boxed", "final", "last_number"]

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_BOLD = re.compile(r"(?<![\w)}\]])\*\*(?=\S)([^*\n]+?)\*\*(?![\w(])")
_CONNECTIVE = re.compile(
    r"(?:\s|\$|,|;|\.|\\[()\[\],;:! ]|\\q?quad\b|\\text\s*\{[^{}0-9]{0,40}\}|\b(?:and|or)\b"
    r"|[a-zA-Z](?:_\{?\w\}?)?\s*=)*"
)
_BRACE = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\.|\{|\}", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?![A-Za-z{\s])([^\s${}\\]+)")
_TAIL_CHARS = 8000
"""Only this much of a response's end is searched; an earlier answer does not count."""


def is_integer(text: str) -> bool:
    """Whether text is one integer and nothing else."""
    return _INTEGER.fullmatch(text) is not None


def answer_of(response: str, extract: Extract = "final", text_gold: bool = False) -> str:
    r"""The part of a response that counts as its answer, whitespace stripped; empty when there is no answer.

    Thoughts in tags are left out; where an answer stands in tags, nothing else is searched (transcript.py). "boxed"
    takes the last `\boxed{}` or `\fbox{}` only, joined with the boxes before it when only "and", commas and the like
    stand between. "final" takes, in this order: a response that is one integer; the last box; what follows the last
    `####`; what follows the last "answer is" or "answer:" in its sentence; a displayed `$$...$$` at the end; the last
    line, or in prose its last formula or number. "last_number" takes the last number, wherever it stands. "auto" is
    "final"; a recipe whose prompts ask for a box makes it "boxed".

    With `text_gold` the gold is words or a choice: prose is then the answer, not the numbers in it.
    """
    text = response.strip()
    if extract == "last_number":
        found = NUMBER.findall(text[-_TAIL_CHARS:])
        return found[-1] if found else ""
    if extract != "boxed" and is_integer(text):
        return text
    text = after_thoughts(text).strip()[-_TAIL_CHARS:]
    parts = tagged_answers(text, _CONNECTIVE) or [text]
    if extract == "boxed":
        return ", ".join(dict.fromkeys(boxed_answer(part) or "" for part in parts))
    return ", ".join(dict.fromkeys(_final_answer(part, text_gold) for part in parts))


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
    return last_said(text, text_gold) if statement is None else said(statement, text_gold)


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
