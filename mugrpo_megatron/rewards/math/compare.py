"""Compares an extracted answer with its gold, in the main thread of a worker process."""

from __future__ import annotations

import re
from typing import Literal

from mugrpo_megatron.rewards.math.gold import IN_BASE, Gold, left_side, name_of, read_gold, sides, without_name
from mugrpo_megatron.rewards.math.literal import chosen_letter, chosen_letters, option_of, same_words
from mugrpo_megatron.rewards.math.names import name_different_things
from mugrpo_megatron.rewards.math.normalize import encloses, normalize, split_top, unstyled, without_words
from mugrpo_megatron.rewards.math.units import Unit, money, split_unit, units_differ, with_unit
from mugrpo_megatron.rewards.math.values import (
    PLAIN_NUMBER,
    Number,
    agree,
    hedged,
    is_rounding,
    no_single_value,
    not_worked_out,
    parsed,
    read_number,
    rounded,
    same,
    too_large,
)

_ORDER = r"\s*(<=|>=|<|>|\\(?:le|ge|lt|gt)q?(?:slant)?(?![A-Za-z]))\s*"
_CHAIN = re.compile(rf"([^<>]+?){_ORDER}([A-Za-z]){_ORDER}([^<>]+)")
_ONE_SIDED = re.compile(rf"([A-Za-z]){_ORDER}([^<>]+)|([^<>A-Za-z]+(?:\\[A-Za-z]+[^<>A-Za-z]*)*){_ORDER}([A-Za-z])")
_ABSOLUTE = re.compile(r"(?:\||\\vert ?)([A-Za-z])(?:\||\\vert ?)\s*(<=?|\\(?:le|lt)q?(?![A-Za-z]))\s*([^<>]+)")
_SET_OF = re.compile(
    r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?(?:\\mid(?![A-Za-z])|\\vert(?![A-Za-z])|[|:])\s*(.+?)\s*\\\}"
)
_MEMBER = re.compile(r"[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_UNION = r"\\cup(?![A-Za-z])"


def as_interval(text: str) -> str:
    """Rewrite inequalities of one unknown as an interval or a union of intervals; other text stays unchanged."""
    if described := _SET_OF.fullmatch(text):
        text = described[2]
    intervals = [_interval(inequality) for inequality in split_top(text, ",")]
    return " \\cup ".join(sorted(intervals)) if all(intervals) else text


def is_interval(text: str) -> bool:
    """Whether text is an interval or a union of intervals, each in brackets around two ends."""
    return all(
        interval[:1] in "([" and interval[-1:] in ")]" and encloses(interval) and interval.count(",") == 1
        for interval in split_top(text, _UNION)
    )


def is_range(text: str) -> bool:
    r"""Whether text is an inequality, or an interval that cannot be read as a point: `[0, 1)`, `(-\infty, 2]`."""
    if not is_interval(text):
        return is_interval(as_interval(text))
    return text[0] + text[-1] in ("[)", "(]") or "\\infty" in text


def without_membership(text: str) -> str:
    r"""The set S of a text `x \in S`; other text stays unchanged."""
    return _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text


def _interval(inequality: str) -> str:
    """The interval that an inequality describes; "" for other text."""
    if absolute := _ABSOLUTE.fullmatch(inequality):
        _, sign, bound = absolute.groups()
        return _between(f"-({bound})", sign, bound, sign)
    if chain := _CHAIN.fullmatch(inequality):
        low, first, _, second, high = chain.groups()
        if _is_less(first) and _is_less(second):
            return _between(low, first, high, second)
        if not _is_less(first) and not _is_less(second):
            return _between(high, second, low, first)
    elif one_sided := _ONE_SIDED.fullmatch(inequality):
        name, after, bound, other_bound, before, _ = one_sided.groups()
        above = not _is_less(after) if name else _is_less(before)
        end, sign = (bound, after) if name else (other_bound, before)
        return _between(end, sign, "\\infty", "<") if above else _between("-\\infty", "<", end, sign)
    return ""


def _is_less(sign: str) -> bool:
    return sign[0] == "<" or sign.startswith("\\l")


def _between(low: str, first: str, high: str, second: str) -> str:
    opening, closing = "(["["e" in first or "=" in first], ")]"["e" in second or "=" in second]
    return f"{opening}{low.strip()}, {high.strip()}{closing}"


Policy = Literal["strict", "lenient"]
Outcome = tuple[float, str]
"""The reward, 1.0 or 0.0, and the reason for it."""

_SIDE_BY_SIDE = re.compile("[A-H]{2,8}")
"""Matches the options of a question as some sets write them: `ABD`."""
_OF_X = re.compile(r"[a-zA-Z]\s*\([a-z]\)")
_DECIMAL_COMMA = re.compile(r"([+-]?[0-9]+),([0-9]{2})")
_COLUMN = re.compile(r"\\begin\{([pb]?matrix)\}([^&]*)\\end\{\1\}")
_DECIMALS = re.compile(r"[0-9]\.([0-9]+)")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
_OTHER_UNIT = "another unit than the gold answer's"
_MATCHED_ELEMENTS = 16
"""Most elements of lists that are matched here, which takes the square of their number. math-verify compares longer
lists, as sets."""


def compare_answer(answer: str, gold: str, policy: Policy = "strict") -> Outcome:
    """Compare an answer with its gold; returns the reward and its reason.

    For a gold that is not compared as text, "lenient" also accepts what math-verify finds equal, unless the left sides
    name different things. This function has no time limit of its own: the worker's alarm interrupts it, or the
    dispatcher kills the worker.
    """
    try:
        read = read_gold(gold)
    except ValueError as error:
        return 0.0, str(error)
    text = normalize(answer)
    if not text:
        return 0.0, "no answer found"
    read = _as_quantity(read, text)
    text = with_unit(text, read.text, read.unit)
    if text == read.text:
        return _same_money(money(answer), read)
    if refusal := too_large(text, read.text):
        return 0.0, refusal
    if _SIDE_BY_SIDE.fullmatch(read.text) and "," in text and list(read.text) == sorted(set(read.text)):
        return _outcome(chosen_letters(unstyled(_without_brackets(text))) == ", ".join(read.text))
    if read.kind not in ("number", "other"):
        return _outcome(_same_text(text, read))
    if name_different_things(left_side(text), read.name):
        return 0.0, "another left side than the gold answer's"
    if policy == "lenient" and same(read.parsed, parsed(without_words(text))):
        return _outcome(True)
    return _compare_number(text, read, money(answer)) if read.kind == "number" else _compare_other(text, read)


def _as_quantity(gold: Gold, text: str) -> Gold:
    """The gold, with the letters at its end read as a unit if the answer has that unit (`with_unit`)."""
    spelled = with_unit(gold.text, text) if gold.kind == "other" else gold.text
    return gold if spelled == gold.text else read_gold(spelled)


def _same_money(sign: Unit | None, gold: Gold) -> Outcome:
    """Compare the currencies of an answer and a gold whose normalized texts are equal, since normalization removes
    currency signs."""
    return (0.0, _OTHER_UNIT) if units_differ(sign, gold.unit) else _outcome(True)


def _same_text(text: str, gold: Gold) -> bool:
    """Whether answer and gold are equal as text: choices, words, or numbers in a base. The answer may leave out the
    base."""
    if gold.kind == "choice":
        return _chooses(text, gold)
    if gold.kind == "words":
        return same_words(text, gold.text)
    if gold.kind == "choices":
        return chosen_letters(unstyled(_without_brackets(text))) == gold.text
    text = text if len(sides(text)) > 1 else sides(text)[0]
    answer, target = IN_BASE.fullmatch(text), IN_BASE.fullmatch(gold.text)
    if answer is None or target is None:
        return text == IN_BASE.sub(r"\1", gold.text)
    return answer[1] == target[1] and answer[2].lower() == target[2].lower()


def _chooses(text: str, gold: Gold) -> bool:
    """Whether the answer names the gold's letter, or has no letter and equals the text of the gold's option.

    The letter does not count if the answer has a number beside it that is not the option's.
    """
    if letter := chosen_letter(unstyled(text)):
        beside = option_of(unstyled(text))
        if letter != gold.text or not beside or not gold.option:
            return letter == gold.text
        number, wanted = read_number(split_unit(beside[1])[0]), read_number(split_unit(gold.option)[0])
        return number is None or wanted is None or agree(number, wanted)
    return bool(gold.option) and compare_answer(text, gold.option)[0] == 1.0


def _compare_number(text: str, gold: Gold, sign: Unit | None) -> Outcome:
    """Compare an answer with a numeric gold. In a chain `name = a = b`, a must equal the gold; b must equal the gold or
    be a, rounded."""
    if gold.plain and "." in gold.text and (comma := _DECIMAL_COMMA.fullmatch(text)):
        text = f"{comma[1]}.{comma[2]}"
    text = _single_element(text)
    parts = [split_unit(side) for side in sides(text)]
    values = [value for value, _ in parts]
    for value in values:
        if refusal := no_single_value(value):
            return 0.0, refusal
    if gold.plain and all(not_worked_out(value) for value in values):
        return 0.0, not_worked_out(values[0])
    numbers = [read_number(value) for value in values]
    first = numbers[0]
    if first is None or (gold.repeating and first.decimal) or not _is_gold(first, gold):
        return _outcome(False)
    if len(parts) == 1 and units_differ(parts[0][1] or sign, gold.unit):
        return 0.0, _OTHER_UNIT
    return _outcome(all(_follows(n, v, first, gold) for n, v in zip(numbers[1:], values[1:], strict=True)))


def _is_gold(number: Number, gold: Gold) -> bool:
    return gold.number is not None and agree(number, gold.number)


def _follows(number: Number | None, value: str, first: Number, gold: Gold) -> bool:
    """Whether a later value of a chain equals the gold, or is the first value rounded to the digits that it shows."""
    if number is None:
        return False
    rounded = PLAIN_NUMBER.fullmatch(value) is not None and not first.decimal and is_rounding(number, first.value)
    return rounded or _is_gold(number, gold)


def _compare_other(text: str, gold: Gold) -> Outcome:
    """Compare an answer with a gold that is a list, a tuple, an interval, an equation, or an expression with
    variables."""
    text, target = without_words(text), without_words(gold.text)
    if not text or not target:
        return _outcome(False)
    text, target = _as_intervals(without_membership(text), without_membership(target))
    if refusal := hedged(text, target):
        return 0.0, refusal
    if text.count("'") != target.count("'"):
        return _outcome(False)
    elements, gold_elements = split_top(text, ","), split_top(target, ",")
    if "=" not in target and any(len(sides(element)) > 1 for element in elements):
        return 0.0, "ambiguous: an equation of two values"
    if text.count("=") > max(target.count("="), len(elements)):
        return 0.0, "ambiguous: more equations than in the gold answer"
    if "=" not in target and len(elements) == 1:
        text = without_membership(sides(text)[0])
    if _name_one_function(name_of(text), name_of(target)):
        text, target = split_top(text, "=")[-1], split_top(target, "=")[-1]
    ordered, gold_ordered = _ordered(text), _ordered(target)
    if (ordered and _is_set(target)) or (gold_ordered and _is_set(text)):
        return _outcome(False)
    if ordered and gold_ordered:
        same_brackets = len({side[0] + side[-1] for side in (text, target) if side[:1] in ("(", "[")}) == 1
        return _elementwise(ordered, gold_ordered) if same_brackets or "matrix" in text + target else _outcome(False)
    listed_alone = (not ordered and len(elements) > 1) or (not gold_ordered and len(gold_elements) > 1)
    if listed_alone and is_range(text) != is_range(target):
        return _outcome(False)
    if len(ordered or elements) > 1 and len(gold_ordered or gold_elements) > 1 and (ordered or gold_ordered):
        return _elementwise(ordered or _by_name(elements), gold_ordered or _by_name(gold_elements))
    unordered, gold_unordered = _unordered(text), _unordered(target)
    if min(len(unordered), len(gold_unordered)) > 1 and is_interval(text) == is_interval(target):
        return _in_any_order(unordered, gold_unordered, gold)
    return _outcome(_same_values(text, target, gold))


def _name_one_function(one: str, other: str) -> bool:
    """Whether one of two left sides is `y`, and the other a function of one variable, such as `f(x)`."""
    return any(left.strip() == "y" and _OF_X.fullmatch(right.strip()) for left, right in ((one, other), (other, one)))


def _same_values(text: str, wanted: str, gold: Gold) -> bool:
    """Whether math-verify finds the two texts equal. If the gold is a decimal with three places or more, exact values
    in the answer, such as roots, are also rounded to as many places."""
    wanted_values = gold.parsed if wanted == gold.text else parsed(without_name(wanted))
    values = parsed(without_name(text))
    if same(wanted_values, values):
        return True
    places = min((len(decimals) for decimals in _DECIMALS.findall(wanted)), default=0)
    return places >= 3 and "." not in text and same(wanted_values, [rounded(value, places) for value in values])


def _as_intervals(text: str, wanted: str) -> tuple[str, str]:
    """Rewrite an inequality as an interval if the other text is an interval; returns both texts."""
    if is_interval(wanted):
        return as_interval(text), wanted
    return (text, as_interval(wanted)) if is_interval(text) else (text, wanted)


def _elementwise(elements: list[str], golds: list[str]) -> Outcome:
    same_length = len(elements) == len(golds)
    return _outcome(same_length and all(compare_answer(a, b)[0] == 1.0 for a, b in zip(elements, golds, strict=False)))


def _by_name(elements: list[str]) -> list[str]:
    """Sort elements such as `y = 2, x = 1` by their names, as the tuple `(x, y)` has them. The order stays unless each
    name is a single letter, and no two are the same."""
    names = [name_of(element).strip() for element in elements]
    lettered = len(set(names)) == len(names) and all(len(name) == 1 for name in names)
    return sorted(elements, key=name_of) if lettered else elements


def _in_any_order(elements: list[str], golds: list[str], gold: Gold) -> Outcome:
    """Compare two lists: each element must equal a gold, and each gold an element. Repeating an element gains nothing.

    The order does not count, unless the gold has names (`x = 1, y = 2`) and the elements have none, or other names.
    Lists of more than _MATCHED_ELEMENTS golds are compared by math-verify.
    """
    if len(elements) < len(golds):
        return _outcome(False)
    if len(golds) > _MATCHED_ELEMENTS:
        return _outcome(same(gold.parsed, parsed(without_name(", ".join(elements)))))
    names = {name_of(target) for target in golds}
    named = len(names) == len(golds) and names == {name_of(element) for element in elements}
    if len(names) == len(golds) and "" not in names and not named:
        others = [name_of(element) for element in elements]
        # If answer and gold name their unknowns differently, by single letters, the names are left out.
        if all(len(name.strip()) == 1 for name in (*names, *others)) and names.isdisjoint(others):
            return _elementwise(*([split_top(pair, "=")[-1] for pair in pairs] for pairs in (elements, golds)))
        return _elementwise(elements, golds)

    def matches(element: str, target: str) -> bool:
        if named and name_of(element) != name_of(target):
            return False
        return element == target or compare_answer(element, target)[0] == 1.0

    remaining = list(golds)
    for element in elements:
        match = next((target for target in [*remaining, *golds] if matches(element, target)), None)
        if match is None:
            return _outcome(False)
        if match in remaining:
            remaining.remove(match)
    return _outcome(not remaining)


def _unordered(text: str) -> list[str]:
    """The elements of a list, a set or a union of intervals; an element with one plus-minus sign becomes two."""
    text = text[2:-2] if _is_set(text) else text
    elements = split_top(text, _UNION) if is_interval(text) else split_top(text, ",")
    return [
        _PLUS_MINUS.sub(lambda _, sign=sign: sign, element)  # type: ignore[misc]
        for element in elements
        for sign in ("+-" if len(_PLUS_MINUS.findall(element)) == 1 else "+")
    ]


def _single_element(text: str) -> str:
    r"""The element of a set that has only one: `3` for `\{3\}`; other text stays unchanged."""
    return text[2:-2].strip() if _is_set(text) and "," not in text else text


def _without_brackets(text: str) -> str:
    r"""The elements of a list without the braces or parentheses around it."""
    return text[2:-2] if _is_set(text) else text[1:-1] if text[:1] == "(" and "," in text and encloses(text) else text


def _is_set(text: str) -> bool:
    r"""Whether text is one set: `\{1, 2\}`."""
    return text[:2] == "\\{" and text[-2:] == "\\}" and "\\}" not in text[2:-2]


def _ordered(text: str) -> list[str]:
    """The elements of a tuple, an interval or a column vector in order; empty for other text."""
    if column := _COLUMN.fullmatch(text):
        return [row.strip() for row in column[2].split("\\\\") if row.strip()]
    if text and text[0] in "([" and encloses(text):
        inner = split_top(text[1:-1], ",")
        return inner if len(inner) > 1 else []
    return []


def _outcome(equal: bool) -> Outcome:
    return (1.0, "equal") if equal else (0.0, "differs from the gold answer")
