"""Verdicts that need neither parser nor process: equal strings, and written-out numbers."""

from __future__ import annotations

import re
from fractions import Fraction

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.extract import answer_of, in_ascii_digits, is_integer
from mugrpo_megatron.rewards.items import Verdict
from mugrpo_megatron.rewards.words import is_text

_WRITTEN_OUT = re.compile(
    r"\$?(?P<sign>[+-]?)(?:(?P<whole>[0-9]{1,40}|[0-9]{1,3}(?:,[0-9]{3}){1,10})(?:\.(?P<decimals>[0-9]{1,40}))?"
    r"|(?P<top>[0-9]{1,40})/(?P<under>[0-9]{1,40})"
    r"|\\[dt]?frac\{(?P<numerator>[0-9]{1,40})\}\{(?P<denominator>[0-9]{1,40})\})\$?"
)


def settle(response: str, gold: str, section: RewardSection) -> Verdict | str:
    """The verdict on a response when its characters decide it, else the answer that math-verify has to compare."""
    response, gold = in_ascii_digits(response), in_ascii_digits(gold)
    answer = answer_of(response, section.extract, is_text(gold))
    verdict = literal_verdict(answer, gold)
    if verdict is not None:
        return Verdict(float(verdict), answer, "equal" if verdict else "differs from the gold answer")
    if not answer:
        return Verdict(0.0, "", "no answer found")
    if len(answer) > section.max_answer_chars:
        return Verdict(0.0, answer[:200], f"answer longer than {section.max_answer_chars} characters")
    return answer


def literal_verdict(answer: str, gold: str) -> bool | None:
    """Whether answer and gold are equal, when their characters decide it; None leaves it to math-verify.

    True needs equal strings or equal rational numbers. False needs two integers or fractions that differ: a decimal may
    still be the other's rounding.
    """
    if answer == gold:
        return True
    if is_integer(answer) and is_integer(gold):
        return int(answer) == int(gold)
    left, right = _exact(answer), _exact(gold)
    if left is None or right is None:
        return None
    if left == right:
        return True
    return None if "." in answer + gold else False


def _exact(text: str) -> Fraction | None:
    match = _WRITTEN_OUT.fullmatch(text)
    if match is None:
        return None
    if match["whole"] is not None:
        decimals = match["decimals"] or ""
        value = Fraction(int(match["whole"].replace(",", "") + decimals), 10 ** len(decimals))
    else:
        under = int(match["under"] or match["denominator"])
        if under == 0:
            return None
        value = Fraction(int(match["top"] or match["numerator"]), under)
    return -value if match["sign"] == "-" else value
