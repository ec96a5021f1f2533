"""Units, money and the words behind a number: what changes a value, and what only names it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.rewards.math.compare import Policy, compare_answer
from mugrpo_megatron.rewards.math.units import money, split_unit
from tests.rewards.verdicts import right

WHOLE = st.integers(2, 999)
SAME = [
    ("{} \\text{{ N}}", "{}\\,\\text{{kg}}\\cdot\\text{{m/s}}^2"),
    ("{} \\text{{ J}}", "{} \\text{{ N m}}"),
    ("{} \\text{{ W}}", "{} \\text{{ J/s}}"),
    ("{} mph", "{} \\text{{ miles per hour}}"),
    ("{} \\text{{ cm}}^2", "{}\\,\\mathrm{{cm^2}}"),
    ("{} \\text{{ cm}}^2", "{}\\,\\mathrm{{cm^{{2}}}}"),
    ("{} \\text{{ cm}}^2", "{} cm²"),
    ("{} \\text{{ m/s}}^2", "{}\\,\\mathrm{{m/s^2}}"),
    ("{}^\\circ", "{}°"),
    ("{}^\\circ", "{} \\text{{ degrees}}"),
    ("{}^\\circ\\text{{C}}", "{}°C"),
    ("{}^\\circ\\text{{C}}", "{} \\text{{ degrees Celsius}}"),
    ("{}^\\circ\\text{{C}}", "{}^\\circ"),
    ("\\${}", "{} \\text{{ dollars}}"),
    ("\\${}", "US\\${}"),
    ("{} \\text{{ euros}}", "€{}"),
    ("{} \\text{{ cents}}", "{}¢"),
    ("{} \\text{{ pounds}}", "£{}"),
    ("{}\\%", "{}\\text{{%}}"),
]
OTHER = [
    ("{} \\text{{ N}}", "{} \\text{{ kN}}"),
    ("{} \\text{{ N}}", "{} \\text{{ J}}"),
    ("{} \\text{{ cm}}^2", "{}\\,\\mathrm{{cm^3}}"),
    ("{} \\text{{ cm}}^2", "{}\\,\\mathrm{{m^2}}"),
    ("{}^\\circ", "{} \\text{{ radians}}"),
    ("{}^\\circ\\text{{C}}", "{}^\\circ\\text{{F}}"),
    ("\\${}", "{} \\text{{ cents}}"),
    ("\\${}", "€{}"),
    ("\\${}", "{} \\text{{ kg}}"),
    ("{} \\text{{ cents}}", "\\${}"),
    ("{} \\text{{ euros}}", "\\${}"),
]
CHANGING = [
    "!", "?", " + x", " × ", "‰", " (approx)", " roughly", " half", " squared", " cubed", " factorial",
    " percent off", " th", " nor any other", " versus", " too small", " fails", " rejected", " unknown", " perhaps",
    " i guess", " 万", "不对", " tenths", " lakh", " per mille", " to the power of two", " increased by one",
    " nineteen", " trillion", " dozens", " millions", " apples, pears", " apples or pears", " if even", " or more",
]  # fmt: skip
NAMING = [
    "apples", "apples in total", "m/s", "square units", "ways (in all)", "hours per day", "students' books", "个",
    "(forty-two)",
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), SAME)
@settings(max_examples=5)
@given(WHOLE)
def test_one_unit_has_several_spellings(gold: str, answer: str, value: int) -> None:
    for left, other in ((gold, answer), (answer, gold)):
        assert right(f"\\boxed{{{other.format(value)}}}", left.format(value))
        assert right(f"\\boxed{{{value}}}", left.format(value))
        assert not right(f"\\boxed{{{other.format(value + 1)}}}", left.format(value))


@pytest.mark.parametrize(("gold", "answer"), OTHER)
@settings(max_examples=5)
@given(WHOLE)
def test_two_known_units_differ(gold: str, answer: str, value: int) -> None:
    assert not right(f"\\boxed{{{answer.format(value)}}}", gold.format(value))


@pytest.mark.parametrize("words", CHANGING)
@settings(max_examples=5)
@given(WHOLE)
def test_what_changes_a_number_is_no_unit(words: str, value: int) -> None:
    assert not right(f"\\boxed{{{value}\\text{{{words}}}}}", str(value))


@pytest.mark.parametrize("words", NAMING)
@settings(max_examples=5)
@given(WHOLE)
def test_what_is_counted_is_no_difference(words: str, value: int) -> None:
    assert right(f"\\boxed{{{value} \\text{{ {words}}}}}", str(value))
    assert not right(f"\\boxed{{{value + 1} \\text{{ {words}}}}}", str(value))


SYMBOLS = (
    ("L", "liters"),
    ("kW", "kilowatts"),
    ("N", "newtons"),
    ("V", "volts"),
    ("A", "amperes"),
    ("F", "farads"),
    ("C", "coulombs"),
    ("T", "tesla"),
    ("K", "kelvin"),
    ("Hz", "hertz"),
    ("MPa", "megapascals"),
    ("eV", "electronvolts"),
    ("mol", "moles"),
    ("ha", "hectares"),
    ("ms", "milliseconds"),
    ("dL", "deciliters"),
)


@pytest.mark.parametrize(("symbol", "word"), SYMBOLS)
@pytest.mark.parametrize("policy", ["strict", "lenient"])
def test_a_bare_symbol_is_the_unit_that_the_other_side_has(symbol: str, word: str, policy: Policy) -> None:
    other, name = SYMBOLS[SYMBOLS.index((symbol, word)) - 1]
    for bare, spelled in ((f"7 {symbol}", f"7 {word}"), (f"7{symbol}", f"7\\,\\mathrm{{{symbol}}}")):
        assert compare_answer(bare, spelled, policy)[0] == compare_answer(spelled, bare, policy)[0] == 1.0
        assert compare_answer(f"1{bare}", spelled, policy)[0] == 0.0
    if policy == "strict":
        assert compare_answer(f"7 {other}", f"7 {word}")[0] == 0.0
        assert compare_answer(f"7\\text{{ {name}}}", f"7\\text{{ {symbol}}}")[0] == 0.0


@pytest.mark.parametrize(
    ("bare", "gold"),
    [
        ("9 N·m", "9\\text{ J}"),
        ("9 kg·m/s", "9\\text{ N s}"),
        ("9 mol·L⁻¹", "9\\text{ mol/L}"),
        ("9 g cm^{-3}", "9\\text{ g/cm}^3"),
        ("9 J/mol", "9\\,\\mathrm{J\\cdot mol^{-1}}"),
        ("9 sq. ft.", "9\\text{ ft}^2"),
        ("9 sq km", "9\\text{ square kilometers}"),
        ("9 cu. m", "9\\text{ m}^3"),
        ("9 cc", "9\\text{ cm}^3"),
        ("9 kgs", "9 kg"),
        ("9 kms", "9\\text{ km}"),
        ("9ℓ", "9\\text{ L}"),
        ("9\\,\\ell", "9 liters"),
        ("9^o", "9^\\circ"),
        ("9^{\\text{o}}", "9"),
        ("9\\degree", "9°"),
        ("¥9", "9元"),
        ("¥9", "9円"),
        ("9千瓦", "9\\text{ kW}"),
        ("9毫安", "9 mA"),
        ("9克/立方厘米", "9\\text{ g/cm}^3"),
        ("9百万", "9000000"),
        ("9千万元", "90000000"),
    ],
)
def test_bare_units_made_of_units_and_other_spellings(bare: str, gold: str) -> None:
    assert right(bare, gold)
    assert right(gold, bare)
    assert not right(bare.replace("9", "8"), gold)


@pytest.mark.parametrize(
    ("bare", "gold"),
    [
        ("9 N·m", "9\\text{ N}"),
        ("9 J/mol", "9\\text{ J/kg}"),
        ("9 sq. ft.", "9\\text{ ft}"),
        ("9 sq. m", "9\\text{ m}^3"),
        ("9 cc", "9\\text{ mm}^3"),
        ("9千瓦", "9\\text{ W}"),
        ("9毫安", "9\\text{ A}"),
        ("9円", "9元"),
        ("¥9", "\\$9"),
        ("9xy", "9"),
        ("9cu", "9"),
    ],
)
def test_bare_units_that_differ(bare: str, gold: str) -> None:
    assert not right(bare, gold)
    assert not right(gold, bare)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("MW", "mW", False),
        ("MJ", "mJ", False),
        ("MPa", "kPa", False),
        ("ms", "s", False),
        ("J/mol", "kJ/mol", False),
        ("A", "V", False),
        ("mA", "A", False),
        ("H", "F", False),
        ("J/(mol K)", "J/mol/K", True),
        ("A s", "C", True),
        ("T m^2", "V s", True),
        ("ms^{-1}", "m/s", True),
        ("ms^{-2}", "m/s^2", True),
        ("ms^{-1}", "m", False),
    ],
)
def test_prefixes_and_units_made_of_units(one: str, other: str, equal: bool) -> None:
    for left, gold in ((one, other), (other, one)):
        assert right(f"7\\text{{ {left}}}", f"7\\text{{ {gold}}}") == equal


@pytest.mark.parametrize(
    ("sign", "power"),
    [("‰", 3), ("\\text{‰}", 3), (" per mille", 3), ("\\text{ permille}", 3), ("‱", 4), ("\\text{ basis points}", 4)],
)
@given(WHOLE)
@settings(max_examples=2)
def test_parts_of_a_thousand_are_a_value(sign: str, power: int, value: int) -> None:
    decimal, percent = f"{value / 10**power:.{power}f}", f"{value / 10 ** (power - 2):.{power - 2}f}\\%"
    parts = f"\\boxed{{{value}{sign}}}"
    for written in (decimal, percent, f"{value}{sign}"):
        assert right(parts, written)
        assert right(f"\\boxed{{{written}}}", f"{value}{sign}")
    assert not right(parts, str(value))
    assert not right(parts, f"{value}\\%")
    if "text" not in sign:
        assert right(f"The salinity of the lake is {value}{sign}.", decimal)
        assert not right(f"The salinity of the lake is {value}{sign}.", str(value))


@pytest.mark.parametrize(
    "form", ["\\pounds {}", "₹{}", "Rs. {}", "INR {}", "US\\${}", "\\text{{\\${}}}", "{} rupees", "{} USD"]
)
@given(WHOLE)
def test_signs_of_money_leave_the_number(form: str, value: int) -> None:
    assert right(f"\\boxed{{{form.format(value)}}}", str(value))
    assert not right(f"\\boxed{{{form.format(value + 1)}}}", str(value))


def test_a_formula_shows_no_money() -> None:
    assert [money(text) for text in ("$5$", "5", "£5", "x = $5$")] == [None] * 4
    assert [money(text) for text in ("$5", "\\$5", "€5", "₹5")] == [
        ((name, 1),) for name in ("dollar", "dollar", "euro", "rupee")
    ]


@given(WHOLE)
def test_magnitudes_multiply(value: int) -> None:
    assert right(f"\\boxed{{{value} \\text{{ trillion}}}}", f"{value}000000000000")
    assert right(f"\\boxed{{{value} \\text{{ millions}}}}", f"{value}000000")
    assert split_unit(f"{value} \\text{{ dozens}}")[0] == f"{value} \\times 12"


VALUES = [
    (r"{}\mathrm{{i}}", "{}i"),
    (r"7-{}\mathbf{{i}}", "7-{}i"),
    (r"{}\,\mathrm{{e}}^{{-3}}", "{}e^{{-3}}"),
    (r"{}\text{{e}}", "{}e"),
    (r"{}\mathrm{{\pi}}", r"{}\pi"),
    (r"{}\text{{\theta}}", r"{}\theta"),
    (r"{}\mathrm{{y}}^2", "{}y^2"),
    (r"{}\mathsf{{k}}", "{}k"),
    (r"{}\mathrm{{pq}}", "{}pq"),
    (r"{}\mathrm{{bcd}}", "{}bcd"),
    (r"{}\,\text{{u v}}", "{}uv"),
    (r"{}\mathrm{{p/q}}", r"\frac{{{}p}}{{q}}"),
    (r"{}\mathrm{{ln}}\,3", r"{}\ln 3"),
    (r"{}x^3+\mathrm{{C}}", "{}x^3+C"),
    (r"{}\mathrm{{d}}", "{}d"),
]


@pytest.mark.parametrize(("upright", "italic"), VALUES)
def test_upright_letters_are_values(upright: str, italic: str) -> None:
    """An answer without the constant or variable differs from the gold, in both directions; italic letters do not."""
    value, other = upright.format(4), italic.format(4)
    for answer, gold in ((value, other), (other, value), (value, value)):
        assert right(f"\\boxed{{{answer}}}", gold), (answer, gold)
    for answer, gold in ((value, "4"), ("4", value), (value, italic.format(5))):
        assert not right(f"\\boxed{{{answer}}}", gold), (answer, gold)


@pytest.mark.parametrize("values", ["6 theta", "6 phi", "6xyz", "6 rst"])
def test_spelled_out_variables_are_no_units(values: str) -> None:
    assert not right("\\boxed{6}", values)
    assert not right(f"\\boxed{{{values}}}", "6")


@pytest.mark.parametrize(
    "unit", ["\\mathrm{m}", "\\text{ kg}", "\\,\\mathrm{mol}", "\\text{ W}", "\\text{ apples}", "\\text{ men}"]
)
def test_units_and_nouns_may_be_omitted(unit: str) -> None:
    assert right("\\boxed{6}", f"6{unit}")
    assert right(f"\\boxed{{6{unit}}}", "6")


@pytest.mark.parametrize(
    ("shorter", "formula"),
    [
        (r"\frac{1}{3}\pi r^{2}", r"\frac{1}{3}\pi r^{2} h"),
        (r"x^{2}", r"x^{2}t"),
        ("6", "6c"),
        (r"\sqrt{2}", r"\sqrt{2} o"),
        (r"5a^{2}", r"5a^{2}bc"),
        (r"\frac{a}{b}", r"\frac{a}{b}s"),
        ("9", "2+7m"),
    ],
)
def test_last_variables_are_no_units(shorter: str, formula: str) -> None:
    """math-verify drops them."""
    assert not right(f"\\boxed{{{shorter}}}", formula)
    assert not right(f"\\boxed{{{formula}}}", shorter)
    assert right(f"\\boxed{{0+{formula}}}", formula)


@pytest.mark.parametrize("value", ["7", r"\frac{7}{2}", "2.5", r"4\sqrt{3}", "0.04"])
@pytest.mark.parametrize(
    ("letter", "other"), [("m", "km"), ("g", "kg"), ("s", "min"), ("h", "s"), ("N", "J"), ("L", "mL")]
)
def test_a_letter_that_is_also_a_unit(value: str, letter: str, other: str) -> None:
    r"""`7\mathrm{m}` is 7 metres, so 7; `7m` is that or 7 times m, so equal to the first and not to 7."""
    italic, *upright = f"{value}{letter}", rf"{value}\mathrm{{{letter}}}", rf"{value}\,\text{{ {letter}}}"
    for unit in upright:
        for answer, gold in ((unit, italic), (italic, unit), (unit, value), (value, unit)):
            assert right(f"\\boxed{{{answer}}}", gold), (answer, gold)
            assert not right(f"\\boxed{{{answer}+1}}", gold)
    for strange in (value, rf"{value}\mathrm{{{other}}}", rf"{value}\mathrm{{{letter}}}^2", f"2{italic}"):
        for answer, gold in ((strange, italic), (italic, strange)):
            assert not right(f"\\boxed{{{answer}}}", gold), (answer, gold)
