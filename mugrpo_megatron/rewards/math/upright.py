"""Tells upright letters and words after a number apart: values such as `\\mathrm{i}`, and units."""

from __future__ import annotations

import re

_UNIT_NAMES = """
m km dm cm mm nm pm g kg mg s ms ns ps min h hr hrs sec wk wks mo yr yrs N kN mN MN J kJ MJ GJ mJ W kW MW GW mW
V kV mV A mA K mK C mC nC F pF nF H mH T mT Pa kPa MPa GPa hPa bar atm Hz kHz MHz GHz mol cd lm lx Wb S mS kS Bq Gy
Sv mSv kat rad sr deg L l dL dl cL cl mL ml kL hL ha eV keV MeV GeV kWh Wh Ah cal dB B kB KB MB GB TB bit px rpm
in ft yd mi nmi ly pc AU oz lb lbs gal qt pt mph kph fps pct pts USD EUR GBP INR JPY CNY Rs Re cts ct sq cu
torr psi amu Da M mM Ci cc kgs gms mgs kms cms mms yds ozs mls
"""
_UNITS = frozenset(_UNIT_NAMES.split())
"""Symbols of units; the SI's from BIPM, The International System of Units, tables 2 to 8.

`d`, `a`, `t` and `u` are left out, since they are more often variables.
"""
_SMALL_UNITS = frozenset(symbol.lower() for symbol in _UNITS if len(symbol) > 1)
_OTHER_WORDS = "am pm ad bc ce st nd rd th to of at by if is as on no or be per and not the for mod via dry"
_SHORT_WORDS = frozenset(_OTHER_WORDS.split())
"""Words of two or three letters that are neither a unit nor a value."""
_GREEK_NAMES = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi chi omega"
_GREEK = frozenset(_GREEK_NAMES.split())
"""Names of Greek letters. `psi` is left out, since it is a unit."""
_FUNCTION_NAMES = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh exp log ln"
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_UPRIGHT = re.compile(
    r"\\(?P<font>text|textbf|textrm|textit|textsf|textnormal|mathrm|mathbf|mathit|mathsf|mathnormal|boldsymbol|bm|mbox|hbox"
    r"|operatorname\*?)"
    r"\s*\{\s*(?P<name>[A-Za-z]{1,6}|\\[A-Za-z]+|[A-Za-z]{1,3}(?:\s*[ /*]\s*[A-Za-z]{1,3})+)\s*\}"
)


def italic(text: str) -> str:
    r"""Rewrite constants, variables and functions in upright letters without their macro: `2+3 i` for
    `2+3\mathrm{i}`. Units stay unchanged."""
    return _UPRIGHT.sub(_as_italic, text)


def _as_italic(upright: re.Match[str]) -> str:
    text, name = upright.string, upright["name"]
    if name.startswith("\\"):  # a Greek letter
        return f"{name} "
    if name.lower() in _FUNCTIONS:
        return f"\\{name.lower()} "
    before, after = text[: upright.start()].rstrip(), text[upright.end() :]
    if len(re.findall("[A-Za-z]+", name)) > 1:
        return f" {name} " if has_value(name) and re.search(r"[A-Za-z0-9})]\Z", before) else upright[0]
    is_operand = before.endswith(("+", "-", "^", "_", "{", "(", "[", "="))
    if not is_value(name, upright["font"].startswith("math")) and not (len(name) == 1 and is_operand):
        return upright[0]
    if before[-1:] in ("^", "_"):
        return f"{{{name}}}"
    if re.match(r"_\{?[0-9]", after):
        return name
    front = " " if re.search(r"[A-Za-z0-9})]\Z", before) else ""
    letters = name if is_value(name) else " ".join(name)  # spaced, since `abc` without spaces would be read as a word
    return f"{front}{letters}{' ' if re.match(r'[A-Za-z0-9]', after) else ''}"


def is_value(word: str, is_math: bool = False) -> bool:
    r"""Whether a word after a number is a constant or a product of variables, and not a unit or a noun.

    Words of one or two letters are values unless they are units or usual words such as `of`. Words of three letters are
    values if they have no vowel or are in a mathematical font (`is_math`). A letter that can be both, such as `m`, is a
    unit.
    """
    if word in _UNITS or (len(word) > 1 and word.lower() in _SMALL_UNITS) or word.lower() in _SHORT_WORDS:
        return False
    if word.lower() in _GREEK:
        return True
    return len(word) < 3 or (len(word) == 3 and (is_math or not re.search("[aeiou]", word.lower())))


def has_value(words: str) -> bool:
    """Whether words after a number contain a value besides units: `x/y`, `theta`, but not `units of x`."""
    names = re.findall("[A-Za-z]+", words)
    is_prose = any(len(name) > 3 and name.lower() not in _GREEK for name in names)
    return any(name.lower() in _GREEK or (not is_prose and is_value(name)) for name in names)
