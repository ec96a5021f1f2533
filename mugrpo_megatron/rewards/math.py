"""Compares one extracted answer with its gold by math-verify; runs in a worker process's main thread."""

from __future__ import annotations

import re
from typing import Literal

from mugrpo_megatron.rewards.ambiguity import hedged, no_single_value, not_worked_out, too_large
from mugrpo_megatron.rewards.gold import CHOICE, Gold, read_gold, sides, without_name
from mugrpo_megatron.rewards.normalize import encloses, normalize, split_top, without_unit
from mugrpo_megatron.rewards.values import decimals, is_rounding, number, parsed, same

Policy = Literal["strict", "lenient"]
Verdict = tuple[float, str]

_CHOSEN = re.compile(r"\(?([A-Z])\)?(?:[.:)]\s.*)?", re.DOTALL)
_DECIMAL_COMMA = re.compile(r"([+-]?[0-9]+),([0-9]{2})")
_COLUMN = re.compile(r"\\begin\{([pb]?matrix)\}([^&]*)\\end\{\1\}")


def grade(answer: str, gold: str, policy: Policy = "strict") -> Verdict:
    """(1.0 or 0.0, why). Has no time limit of its own: the worker's alarm and the pool's kill set it."""
    try:
        read = read_gold(gold)
    except ValueError as error:
        return 0.0, str(error)
    text = normalize(answer)
    if not text:
        return 0.0, "no answer found"
    if text == read.text:
        return 1.0, "equal"
    if refusal := too_large(text, read.text):
        return 0.0, refusal
    if read.kind == "choice":
        chosen = _CHOSEN.fullmatch(text)
        return _verdict(chosen is not None and chosen[1] == CHOICE.sub(r"\1", read.text))
    if read.kind == "words":
        return _verdict(text.casefold() == read.text.casefold())
    if policy == "lenient":
        return _verdict(same(read.parsed, parsed(text)))
    return _number_verdict(without_unit(text), read) if read.kind == "number" else _other_verdict(text, read)


def _number_verdict(text: str, gold: Gold) -> Verdict:
    """Every side of a chain `name = a = b` has a value: the first must equal the gold, the others the first."""
    if gold.plain and "." in gold.text and (comma := _DECIMAL_COMMA.fullmatch(text)):
        text = f"{comma[1]}.{comma[2]}"
    values = [without_unit(side) for side in sides(text)]
    for value in values:
        if refusal := no_single_value(value):
            return 0.0, refusal
    if gold.plain and all(not_worked_out(value) for value in values):
        return 0.0, not_worked_out(values[0])
    if not _same_number(values[0], gold):
        return _verdict(False)
    return _verdict(all(_same_number(v, gold) or is_rounding(v, number(values[0])) for v in values[1:]))


def _same_number(value: str, gold: Gold) -> bool:
    """Equal in math-verify, or one exact and the other its rounding: a gold to two decimals, an answer to four."""
    found = number(value)
    if found is None:
        return False
    if "%" in value + gold.text or found.is_Float == gold.parsed[0].is_Float:
        return same(gold.parsed, [found])
    return (
        same(gold.parsed, [found])
        or (decimals(gold.text) >= 2 and is_rounding(gold.text, found))
        or (decimals(value) >= 4 and is_rounding(value, gold.parsed[0]))
    )


def _other_verdict(text: str, gold: Gold) -> Verdict:
    """Lists, tuples, intervals, equations and expressions with variables."""
    if refusal := hedged(text, gold.text):
        return 0.0, refusal
    if text.count("'") != gold.text.count("'"):
        return _verdict(False)
    elements, gold_elements = split_top(text, ","), split_top(gold.text, ",")
    if "=" not in gold.text and any(len(sides(element)) > 1 for element in elements):
        return 0.0, "ambiguous: an equation of two values"
    if text.count("=") > max(gold.text.count("="), len(elements)):
        return 0.0, "ambiguous: more equations than in the gold answer"
    ordered, gold_ordered = _ordered(text), _ordered(gold.text)
    if ordered and gold_ordered:
        same_brackets = len({text[0] + text[-1] for text in (text, gold.text) if text[0] in "(["}) == 1
        return _elementwise(ordered, gold_ordered) if same_brackets or "matrix" in text + gold.text else _verdict(False)
    if len(ordered or elements) > 1 and len(gold_ordered or gold_elements) > 1 and (ordered or gold_ordered):
        return _elementwise(ordered or elements, gold_ordered or gold_elements)
    if "=" not in gold.text and len(elements) == 1:
        text = sides(text)[0]
    return _verdict(same(gold.parsed, parsed(without_name(text))))


def _elementwise(elements: list[str], golds: list[str]) -> Verdict:
    same_length = len(elements) == len(golds)
    return _verdict(same_length and all(grade(a, b)[0] == 1.0 for a, b in zip(elements, golds, strict=False)))


def _ordered(text: str) -> list[str]:
    """The elements of a tuple, an interval or a column vector, in their order; empty for everything else."""
    if column := _COLUMN.fullmatch(text):
        return [row.strip() for row in column[2].split("\\\\") if row.strip()]
    if text[0] in "([" and encloses(text):
        inner = split_top(text[1:-1], ",")
        return inner if len(inner) > 1 else []
    return []


def _verdict(equal: bool) -> Verdict:
    return (1.0, "equal") if equal else (0.0, "differs from the gold answer")
