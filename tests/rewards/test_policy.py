"""The policy as a whole: labelled answers, and properties of numbers, lists and units."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.rewards.math.compare import compare_answer
from mugrpo_megatron.rewards.math.extract import answer_of
from mugrpo_megatron.rewards.math.literal import literal_verdict
from mugrpo_megatron.rewards.math.units import split_unit
from tests.rewards.labelled import labelled_cases

DIGITS = st.integers(1, 10**6)
POWERS = st.integers(-30, 30)


def right(answer: str, gold: str) -> bool:
    verdict = literal_verdict(answer, gold)
    return compare_answer(answer, gold)[0] == 1.0 if verdict is None else verdict


def test_labelled_answers() -> None:
    cases = labelled_cases()
    assert len(cases) >= 300
    verdicts = [right(answer_of(case.response), case.gold) for case in cases]
    assert [case for case, verdict in zip(cases, verdicts, strict=True) if verdict and not case.right] == []
    agreeing = sum(case.right == verdict for case, verdict in zip(cases, verdicts, strict=True))
    assert agreeing >= 0.99 * len(cases)


def renderings(mantissa: int, power: int) -> list[str]:
    """Spellings of mantissa x 10^power; fractions and plain decimals for small powers alone."""
    text = str(mantissa)
    made = [
        f"{text} \\times 10^{{{power}}}",
        f"{text} \\cdot 10^{{{power}}}",
        f"{text}e{power}",
        f"{text[0]}.{text[1:]}0 \\times 10^{{{power + len(text) - 1}}}",
    ]
    if -9 <= power < 0:
        made += [decimal(mantissa, power), f"\\frac{{{mantissa}}}{{{10**-power}}}"]
    if 0 <= power <= 9:
        made += [str(mantissa * 10**power), f"{mantissa * 10**power:,}", f"{mantissa * 10**power}.0"]
    return made


def decimal(mantissa: int, power: int) -> str:
    digits = str(mantissa).rjust(1 - power, "0")
    return f"{digits[:power]}.{digits[power:]}"


@given(DIGITS, POWERS, st.data(), st.sampled_from(["", "-"]))
def test_renderings_of_one_value_are_accepted(mantissa: int, power: int, data: st.DataObject, sign: str) -> None:
    made = renderings(mantissa, power)
    answer, gold = data.draw(st.sampled_from(made)), data.draw(st.sampled_from(made))
    assert right(sign + answer, sign + gold)


@given(DIGITS, POWERS, DIGITS, POWERS, st.data())
def test_another_value_is_never_accepted(one: int, power: int, other: int, shift: int, data: st.DataObject) -> None:
    """Of any size: also 0, the other sign, and one unit in the last place of a small or large number."""
    gold = data.draw(st.sampled_from(renderings(one, power)))
    wrong = [(one + 1, power), (one, power + 1), (one, power - 1), (other, shift), (-one, power)]
    mantissa, exponent = data.draw(st.sampled_from(wrong))
    if Fraction(mantissa) * Fraction(10) ** exponent != Fraction(one) * Fraction(10) ** power:
        sign, size = ("-", -mantissa) if mantissa < 0 else ("", mantissa)
        assert not right(sign + data.draw(st.sampled_from(renderings(size, exponent))), gold)
    assert not right(data.draw(st.sampled_from(["0", "0.0", "-0.0", "0.0000001", "10^{-9}"])), gold) or (
        Fraction(one) * Fraction(10) ** power in (Fraction(1, 10**7), Fraction(1, 10**9))
    )


@given(DIGITS, st.sampled_from(["E", "e", " E+", "e-"]), st.integers(10**8, 10**12), st.sampled_from(["365", "x+1"]))
def test_a_huge_exponent_is_refused_before_it_is_computed(mantissa: int, e: str, power: int, gold: str) -> None:
    """math-verify would compute all digits; a run met `75+97=172E572252225}`."""
    for answer in (f"{mantissa}{e}{power}", f"75+97={mantissa}.5{e}{power}}}"):
        assert compare_answer(answer, gold) == (0.0, "too large: a number that no answer needs")


@given(st.integers(1, 10**4), st.integers(1, 999))
def test_a_changed_decimal_is_never_accepted(whole: int, thousandths: int) -> None:
    gold = f"{whole}.{thousandths:03d}"
    for change in (-1, 1, 10, -100):
        moved = whole * 1000 + thousandths + change
        assert not right(f"{moved // 1000}.{moved % 1000:03d}", gold)


@settings(max_examples=40)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6, unique=True), st.data())
def test_the_order_of_a_list_is_free_and_that_of_a_tuple_is_not(numbers: list[int], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(numbers))
    gold, answer = ", ".join(map(str, numbers)), ", ".join(map(str, shuffled))
    assert right(answer, gold)
    assert right(f"\\{{{answer}\\}}", gold)
    assert right(f"({answer})", f"({gold})") == (shuffled == numbers)
    changed = [*shuffled[:-1], shuffled[-1] + 100]
    assert not right(", ".join(map(str, changed)), gold)
    assert not right(", ".join(map(str, shuffled[:-1])), gold)


@given(st.integers(2, 999), st.sampled_from(["2x + 1", "x + 1", "3x", "x^2", "-x", "\\sqrt{x}", "x/2", "1 - y"]))
def test_only_the_value_of_a_name_is_an_answer(value: int, side: str) -> None:
    assert right(f"x = {value}", str(value))
    assert not right(f"{side} = {value}", str(value))


@given(st.integers(1, 999), st.sampled_from(["cm", "kg", "hours", "dollars"]), st.sampled_from(["m", "g", "minutes"]))
def test_units_may_be_left_out_but_not_exchanged(value: int, unit: str, other: str) -> None:
    gold = f"{value} \\text{{ {unit}}}"
    assert right(str(value), gold)
    assert right(gold, str(value))
    assert not right(f"{value} \\text{{ {other}}}", gold)


@given(st.integers(1, 99))
def test_a_percent_sign_is_a_hundredth_or_left_out(value: int) -> None:
    gold = f"{value}\\%"
    assert right(str(value), gold)
    assert right(gold, str(value))
    assert right(f"\\frac{{{value}}}{{100}}", gold)
    assert not right(f"{value + 1}\\%", gold)
    assert not right(f"\\frac{{{value}}}{{10}}", gold)


@given(st.text(st.sampled_from("5 cm\\{}textapples/^2,."), max_size=60))
def test_taking_a_unit_off_leaves_what_stands_before_it(text: str) -> None:
    value, unit = split_unit(text)
    assert text.startswith(value) or "\\%" in value or "\\times" in value
    assert unit is None or len(value) < len(text)
