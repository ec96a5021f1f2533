"""Times, dates, scores and ranges: numbers that are one answer together, and no arithmetic.

A data set's golds are worked out, so a gold that is nothing but `3-2` is a score or a range: neither 1 nor `4-3` is
right. The same holds for the dates `2021-05-03` and `5/3/2021`. Nothing is converted: `17:30` is not `5:30 p.m.`.
"""

from __future__ import annotations

import re
from fractions import Fraction

from mugrpo_megatron.rewards.normalize import unstyled
from mugrpo_megatron.rewards.units import split_unit

_NUMBER = r"[0-9]{1,40}(?:\.[0-9]{1,40})?(?:/[0-9]{1,40})?"
_RANGE = re.compile(rf"({_NUMBER}) ?(?:-{{1,3}}|to) ?({_NUMBER})")
_DATE = re.compile(r"([0-9]{1,4})([-/])([0-9]{1,2})\2([0-9]{1,4})")
_TIME = re.compile(r"([0-9]{1,2}):([0-9]{2}) ?(?:([ap])\.? ?m\b\.?)?|([0-9]{1,2}) ?([ap])\.? ?m\b\.?", re.IGNORECASE)
_FRACTION = re.compile(r"\\frac ?(?:\{([0-9]+)\}|([0-9])) ?(?:\{([0-9]+)\}|([0-9]))")

Span = tuple[str, ...]
"""The kind (`time`, `date` or `range`), then its numbers; a time ends with `a` or `p`, its half of the day, or ""."""


def span_of(text: str) -> Span | None:
    """What a normalized text is, if it is a time, a date, a score or a range, with or without a unit behind it."""
    found = _span(text)
    return found if found is not None or "-" not in text + unstyled(text) else _span(split_unit(text)[0])


def same_span(answer: Span | None, gold: Span) -> bool:
    """Whether both say the same; a half of the day that one side leaves out is no difference."""
    if answer is None or answer[0] != gold[0]:
        return False
    return answer == gold or (gold[0] == "time" and answer[:3] == gold[:3] and not (answer[3] and gold[3]))


def _span(text: str) -> Span | None:
    plain = _FRACTION.sub(r"\1\2/\3\4", unstyled(text))
    if time := _TIME.fullmatch(plain):
        return ("time", str(int(time[1] or time[4])), time[2] or "00", (time[3] or time[5] or "").lower())
    if date := _DATE.fullmatch(plain):
        return ("date", *(str(int(part)) for part in date.group(1, 3, 4)))
    if ends := _RANGE.fullmatch(plain):
        try:
            return (
                "range",
                *(str(Fraction(end)) if "/" not in end or "." not in end else end for end in ends.groups()),
            )
        except ZeroDivisionError:
            return None
    return None
