"""Multiple choice: the letter of a gold, and the letter that an answer chooses.

An answer may give the option's text behind its letter, whatever the text says. The first letter is the chosen one, so
naming others gains nothing; an answer that names another letter beside it, or says that it is wrong, chooses none.
"""

from __future__ import annotations

import re

_PREFIX = r"(?i:(?:the )?(?:correct )?(?:answer )?(?:option|choice)\b ?:? ?)?"
_LETTER = re.compile(rf"{_PREFIX}(?:\(([A-Z])\)|([A-Z])\)?)")
_SMALL = re.compile(r"\(?([a-z])\)?")
_SIDE_BY_SIDE = re.compile(r"[A-Z]{2,}")
_LABEL = re.compile(
    rf"{_PREFIX}(?:\(([A-Z])\)|([A-Z])(?:\)|(?=[.:]\s|\Z| is (?:the )?(?:correct|right|best)\b)))(?=[\s.:]|\Z)"
)
_BESIDE = re.compile(r"[\s.:-]*(?:,|\([A-Z]\)|[A-Z](?: [A-Z])*\s*(?:\Z|[.:),(/&|]))")
"""A comma (an "or", once normalized), another bracketed letter, or letters that stand alone."""
_ANOTHER = re.compile(
    r"\([A-Z]\)|(?<![\w(])[A-Z]\)|\b(?i:option|choice) \(?[A-Z]\b"
    r"|\b(?i:no,|(?:wait|but|rather|actually|instead|sorry)\b,?) (?:[a-z]+ )*[A-Z]\Z"
)
_ALONE = re.compile(r"(?<![\w'])[A-Z](?!\w)")
_RIGHT = r"(?:the |an? )?(?:right|correct|true|valid|possible|best|answer)\b"
_REJECTED = re.compile(
    r"[\s.:-]*(?:"
    r"(?:is|was|seems|looks|would be|must be) (?:(?:[a-z]+ly|also|just|the|an?) )*"
    rf"(?:(?:wrong|incorrect|false|untrue|invalid|impossible|excluded|eliminated|ruled out)\b|not {_RIGHT})"
    rf"|(?:isn|wasn)['’]?t {_RIGHT}|can(?:not| not|['’]?t) be {_RIGHT})",
    re.IGNORECASE,
)


def letter_of(gold: str) -> str | None:
    """The letter of a normalized gold that is a choice and nothing else: `C`, `(C)`, `Option C`."""
    match = _LETTER.fullmatch(gold)
    return match[1] or match[2] if match else None


def letters_of(gold: str) -> str | None:
    """The letters of a normalized gold that is a list of choices, sorted: `A, C` for `C, A` and `(A), (C)`."""
    letters = [letter_of(element.strip()) for element in gold.split(",")]
    found = {letter for letter in letters if letter}
    return ", ".join(sorted(found)) if 1 < len(found) == len(letters) else None


def all_chosen(answer: str) -> str | None:
    """The letters that a normalized answer chooses, sorted as in `letters_of`; they may stand side by side: `AC`."""
    if letters := _SIDE_BY_SIDE.fullmatch(answer):
        return ", ".join(sorted(set(letters[0])))
    found = [chosen(element.strip()) for element in answer.split(",")]
    return ", ".join(sorted({letter for letter in found if letter})) if all(found) else None


def chosen(answer: str) -> str | None:
    """The letter that a normalized answer chooses; None when it chooses none, or names another one beside it.

    A small letter counts when nothing else is there.
    """
    if small := _SMALL.fullmatch(answer):
        return small[1].upper()
    label = _LABEL.match(answer)
    if label is None:
        return None
    rest = answer[label.end() :]
    if _BESIDE.match(rest) or _ANOTHER.search(rest) or _REJECTED.match(rest) or _ends_with_another(rest):
        return None
    return label[1] or label[2]


def _ends_with_another(rest: str) -> bool:
    """Whether a comma and one letter end it, and no other letter stands alone: `Paris, D`, but not `points A, B`."""
    before, comma, last = rest.rpartition(",")
    return bool(comma and _ALONE.fullmatch(last.strip()) and not _ALONE.search(before))
