"""Characters that mean the same, in answers and golds: other inputs of the kinds that public reports showed."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.rewards.math.characters import plain_characters
from tests.rewards.verdicts import right

DIGITS = [chr(code) for code in range(sys.maxunicode) if unicodedata.category(chr(code)) == "Nd"]
ZEROS = [digit for digit in DIGITS if unicodedata.decimal(digit) == 0]
WIDE = {code: chr(code + 0xFEE0) for code in range(0x21, 0x7F)}
"""ASCII -> full-width form."""


def test_every_decimal_digit_has_its_value() -> None:
    assert len(ZEROS) > 60
    assert all(plain_characters(digit) == str(unicodedata.decimal(digit)) for digit in DIGITS)


@given(
    st.integers(-(10**9), 10**9), st.sampled_from(ZEROS), st.sampled_from(["{}", "The answer is {}.", "\\boxed{{{}}}"])
)
def test_numbers_of_every_script(value: int, zero: str, response: str) -> None:
    written = str(value).translate({ord(str(digit)): chr(ord(zero) + digit) for digit in range(10)})
    assert right(response.format(written), str(value))
    assert right(str(value), written)
    assert not right(response.format(written), str(value + 1))


@pytest.mark.parametrize(
    "answer", ["-7", "(3,4)", "[0,1)", "7.25", "1,234", "25%", "x=7", "y=3x-1", "7/8", "2:3", "x<7"]
)
def test_full_width_forms(answer: str) -> None:
    assert right(answer.translate(WIDE), answer)
    assert right(answer, answer.translate(WIDE))


@given(st.text(max_size=30))
def test_plain_text_stays_plain(text: str) -> None:
    once = plain_characters(text)
    assert plain_characters(once) == once
    assert plain_characters(text.encode("ascii", "ignore").decode()) == text.encode("ascii", "ignore").decode()


EQUAL = (
    ("y³", "y^3"),
    ("10⁻⁴", "0.0001"),
    ("3×10⁶", "3000000"),
    ("a₂", "a_2"),
    ("¾", "0.75"),
    ("2⅝", "2.625"),
    ("7⁄8", "7/8"),
    ("It takes 2½ days.", "2.5"),
    ("There are 10⁴ ways.", "10000"),
    ("√7", "\\sqrt{7}"),
    ("√12/5", "\\frac{\\sqrt{12}}{5}"),
    ("x≧7", "x\\ge 7"),
    ("x⩽7", "x\\le 7"),
    ("‐9", "-9"),
    ("﹣9", "-9"),
    ("5∶7", "5:7"),
    ("9∕4", "9/4"),
    ("⟨3,4⟩", "(3,4)"),
    ("3λ", "3\\lambda"),
    ("φ", "\\phi"),
    ("𝑛+2", "n+2"),
    ("ℚ", "\\mathbb{Q}"),
    ("12\u202f345", "12345"),
    ("6\u200b7", "67"),
    ("\u200e67", "67"),
    ("67\ufeff", "67"),
    ("6️⃣7️⃣", "67"),
    ("70˚", "70"),
    ("6、8", "6,8"),
    ("٦٧٫٥", "67.5"),
    ("١٢٬٣٤٥", "12345"),
    ("٢٥٪", "25\\%"),
    ("Zu\u0308rich", "Zürich"),
    ("ﾄﾖﾀﾞ", "トヨタ\u3099"),
    ("0.6\u0305", "2/3"),
    ("0.1\u03052\u0305", "4/33"),
    ("0.1\u03073\u0307", "13/99"),
    ("Ⅷ", "VIII"),
    ("Ø", "\\emptyset"),
    ("1’234", "1234"),
)
DIFFERENT = (
    ("y³", "y3"),
    ("2⁴", "24"),
    ("5½", "51/2"),
    ("½", "12"),
    ("①", "1"),
    ("②③", "23"),
    ("√16", "\\sqrt{1}6"),
    ("～9", "-9"),
    ("2～9", "2"),
    ("6．7", "6.8"),
    ("ℚ", "\\mathbb{R}"),
    ("λ", "\\mu"),
    ("九", "9"),
    ("0.6\u0305", "0.6"),
    ("The answer is 0.6\u0305", "0.6"),
    ("Ⅷ", "8"),
    ("ⓑ", "2"),
)


@pytest.mark.parametrize(("answer", "gold"), EQUAL)
def test_spellings_of_one_value(answer: str, gold: str) -> None:
    assert right(answer, gold)
    assert right(f"\\boxed{{{answer}}}", gold) or " " in answer


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_spellings_of_different_values(answer: str, gold: str) -> None:
    assert not right(answer, gold)


UNITS = (
    ("9厘米", "9\\text{ cm}"),
    ("9毫米", "9 mm"),
    ("9公斤", "9 kg"),
    ("9平方厘米", "9\\text{ cm}^2"),
    ("9立方米", "9\\text{ m}^3"),
    ("9元", "9"),
    ("9名", "9"),
    ("9キログラム", "9 kg"),
    ("9センチメートル", "9 cm"),
    ("9킬로미터", "9 km"),
    ("9 мм", "9 mm"),
    ("9 км/ч", "9 km/h"),
    ("9万", "90000"),
    ("2.5万元", "25000"),
    ("3億", "3\\times 10^8"),
    ("45度", "45^\\circ"),
    ("百分之9", "9\\%"),
    ("9㎜", "9 mm"),
    ("9㎢", "9\\text{ km}^2"),
    ("9㎨", "9\\text{ m/s}^2"),
    ("30℃", "30^\\circ C"),
    ("9 \u2126", "9 ohm"),
    ("9 kΩ", "9\\,k\\Omega"),
    ("9 MΩ", "9\\text{ M}\\Omega"),
    ("250 \u212a", "250\\text{ K}"),
    ("3 \u212b", "3\\,\\AA"),
    ("9 µs", "9\\ \\mu s"),
    ("9 μg", "9\\,\\mu\\mathrm{g}"),
    ("9 µF", "9"),
)
OTHER_UNITS = (
    ("9厘米", "9\\text{ m}"),
    ("9平方米", "9\\text{ m}"),
    ("9万", "9"),
    ("9米以上", "9"),
    ("9多个", "9"),
    ("约9米", "9"),
    ("9個ではない", "9"),
    ("9 또는 8", "9"),
    ("9㎝", "9 km"),
    ("9 kΩ", "9\\ \\Omega"),
    ("9 MΩ", "9\\text{ m}\\Omega"),
    ("9\\Omega", "9"),
    ("9 µF", "9 µC"),
    ("9 µm", "9 mm"),
    ("250 K", "250^\\circ C"),
    ("9元", "\\$9"),
    ("9折", "9"),
    ("9秒", "9 min"),
)


@pytest.mark.parametrize(("answer", "gold"), UNITS)
def test_units_of_other_scripts_and_signs(answer: str, gold: str) -> None:
    assert right(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), OTHER_UNITS)
def test_another_unit_or_a_changed_number(answer: str, gold: str) -> None:
    assert not right(answer, gold)


@pytest.mark.parametrize("spelling", ["{}{}", "{}^{{{}}}", "{}^{{\\text{{{}}}}}", "{}\\text{{{}}}", "{}\\mathrm{{{}}}"])
@pytest.mark.parametrize(
    ("number", "ending"), [(41, "st"), (52, "nd"), (63, "rd"), (11, "th"), (112, "th"), (20, "th")]
)
def test_ordinals(spelling: str, number: int, ending: str) -> None:
    ordinal = spelling.format(number, ending)
    assert right(ordinal, str(number))
    assert right(str(number), ordinal)
    assert right(ordinal, f"{number}{ending}")
    assert not right(spelling.format(number + 10, "th" if ending == "th" else ending), str(number))


def test_an_ending_of_another_number_is_no_ordinal() -> None:
    assert not right("22rd", "22")
    assert not right("22\\text{ nd}", "22")
    assert not right("n^{th}", "n")
    assert right("May 3rd", "May 3")
