"""Reads the unit after a number, in any of its spellings, and tells whether two units differ."""

from __future__ import annotations

import re

from mugrpo_megatron.rewards.math.upright import has_value

_EXPONENT = r"\s*\^\s*(?:\{\s*[+-]?[0-9]\s*\}|[0-9])"
_MACRO = r"\\(?:text|textbf|textrm|textit|textsf|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname)"
_SYMBOL = (
    r"(?:[mck]m|cc|mi|ft|in|yd|[mk]g|lb|oz|ml|hr|mph|kph)\b|(?:(?<= )|(?<=[a-z]/))[mgslh]\b"
    r"|(?<=\\circ )[CF]\b|(?<=\\circ\})[CF]\b"
)
_LAST = re.compile(
    rf"(?:{_MACRO}\s*\{{(?P<macro>(?:[^{{}}0-9^]|\^\s*(?:-?[0-9]|\{{-?[0-9]\}}))*)\}}|(?<![\\A-Za-z_^{{])(?P<word>[A-Za-z]{{3,}}|{_SYMBOL}))"
    rf"(?P<exponent>{_EXPONENT})?[\s.]*\Z"
)
_VALUE_END = re.compile(r"(?:[0-9})!%]|\\(?:pi|circ|%))\s*\Z")
_JOINT = re.compile(r"(?:\s|~|/|-|\.|\\cdot(?![A-Za-z])|\\[,;:! ])+\Z")
_REFUSED = re.compile(
    r",|not?|or|and|at|least|most|more|less|fewer|than|if|maybe|about|approximately|around|nearly|almost|mod|modulo|unless|"
    r"is|isn|was|are|be|will|could|can|might|may|never|none|wrong|incorrect|false|impossible|so|"
    r"except|when|where|for|over|under|above|below|plus|minus|times|divided|base|approx|roughly|circa|half|factorial|off|"
    r"nor|but|versus|vs|too|fails?|failed|rejected|excluded|unknown|unlikely|perhaps|possibly|probably|guess|wait|actually|"
    r"st|nd|rd|th|halves|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s|mille|basis|power|"
    r"multiplied|increased|decreased|added|subtracted|choose|nope|doubtful|estimated"
)
"""Matches words that change the number before them, so that they are no unit."""
_NUMERAL = re.compile(
    r"\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)\b(?![^()]*\))"
)
"""Matches a number in words, unless it is in parentheses: in `5 (five)` it repeats the number."""
NOT_IN_A_UNIT = re.compile(
    r"[^\w\s.,'’\"/()·^{}$\\%-]|[半百千万萬亿億兆打成折或不非未没沒无無约約]|な[いか]|ません|아[니닙님닌]|없|以[上下内內外]|左右|上下|[多余餘](?:个|個|\W|\Z)|未満|程度|ほど|[くぐ]らい"
    r"|[천만억]|이상|이하|미만|정도|또는"
    r"|\b(?:mil|mill[oó]n(?:es)?|mille|milliers?|milliards?|milh(?:ão|ões|ares)|tausend|hundert|dutzend|million(?:en)"
    r"|milliarden?|cientos?|docenas?|douzaines?|тысяч\w*|миллион\w*|миллиард\w*|сот(?:ен|ни|ня)"
    r"|o(?!['’])|ou|oder|или|más|menos|moins|mais|mehr|weniger|больше|меньше|более|менее|rund|etwa|environ|около)\b"
)
"""Matches signs of arithmetic and doubt, and words of other languages for magnitudes, "or", "more", "not" and
"about"."""
_MAGNITUDES = {
    "dozen": "12", "hundred": "100", "thousand": "10^{3}", "million": "10^{6}", "billion": "10^{9}",
    "trillion": "10^{12}", "lakh": "10^{5}", "crore": "10^{7}",
}  # fmt: skip
_MONEY = re.compile(
    r"(?P<dollar>\\\$|\A\s*\$(?!.*\$)|\\textdollar|\bUSD\b)|(?P<euro>€|\\euro|\bEUR\b)"
    r"|(?P<yen_or_yuan>¥)|(?P<rupee>₹|\b(?:Rs|INR)\b)"
)
_DEGREE_SIGN = re.compile(r"\^\s*\{?\s*\\circ\s*\}?\s*\Z")
_SCALES = frozenset(("celsius", "fahrenheit"))
_SAME_LETTER = {"celsius": "coulomb", "fahrenheit": "farad"}
_PERCENT = frozenset(("percent", "percents", "pct"))
_POWERS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}
_NAMES = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile", "mg": "milligram", "g": "gram", "kg": "kilogram",
    "lb": "lbs pound", "oz": "ounce", "ml": "milliliter millilitre", "l": "liter litre", "gal": "gallon",
    "s": "sec second", "min": "minute", "h": "hr hour", "day": "", "week": "", "month": "", "year": "yr",
    "dollar": "usd", "cent": "", "euro": "", "degree": "deg", "radian": "rad", "celsius": "c", "fahrenheit": "f",
    "newton": "n", "kn": "kilonewton", "joule": "j", "kj": "kilojoule", "watt": "w", "kw": "kilowatt", "volt": "v",
    "hz": "hertz", "khz": "kilohertz", "pa": "pascal", "kpa": "kilopascal", "cal": "calorie", "kcal": "kilocalorie",
    "yen": "", "rupee": "rs inr", "yuan": "cny", "won": "", "ruble": "", "mph": "", "kph": "", "unit": "",
    "nm": "nanometer nanometre", "angstrom": "", "jin": "", "micrometer": "micrometre", "microliter": "microlitre",
    "tonne": "", "cc": "",
    "kelvin": "k", "ohm": "", "kiloohm": "kilohm", "megaohm": "megohm", "gigaohm": "", "milliohm": "", "nanoohm": "",
    "microsecond": "", "microgram": "", "microampere": "", "microfarad": "", "microcoulomb": "", "microvolt": "",
    "microwatt": "", "microtesla": "", "microhenry": "", "microjoule": "", "micronewton": "", "micromole": "",
    "ampere": "amp", "milliampere": "milliamp", "coulomb": "", "farad": "", "tesla": "", "henry": "henrie",
    "mole": "mol", "millimole": "mmol", "millisecond": "ms msec", "nanosecond": "ns", "hectare": "ha",
    "millivolt": "", "kilovolt": "kv", "megavolt": "", "milliwatt": "", "megawatt": "", "gigawatt": "gw",
    "millijoule": "", "megajoule": "", "millinewton": "", "meganewton": "", "hectopascal": "hpa", "megapascal": "",
    "gigapascal": "gpa", "megahertz": "", "gigahertz": "ghz", "electronvolt": "ev", "kiloelectronvolt": "kev",
    "megaelectronvolt": "", "gigaelectronvolt": "gev", "centiliter": "cl centilitre", "deciliter": "dl decilitre",
    "atmosphere": "atm", "decibel": "db",
}  # fmt: skip
_KNOWN = {name: unit for unit, names in _NAMES.items() for name in (unit, *names.split())}
_CASED = {
    "A": "ampere", "H": "henry", "T": "tesla", "mA": "milliampere", "mV": "millivolt", "MV": "megavolt",
    "mW": "milliwatt", "MW": "megawatt", "mJ": "millijoule", "MJ": "megajoule", "mN": "millinewton",
    "MN": "meganewton", "MPa": "megapascal", "MHz": "megahertz", "MeV": "megaelectronvolt",
}  # fmt: skip
"""Symbols that mean another unit, or none, if written in small letters."""
_ALONE = (
    "mm cm km mi ft in yd mg kg lb oz hr mph kph A C F H J K L N T V W g h l m s kA mA kV mV MV kW mW MW GW kJ mJ MJ"
    " kN mN MN Pa kPa hPa MPa GPa Hz kHz MHz GHz eV keV MeV GeV mol mmol ms ns mL ml dL dl cL cl ha atm dB"
)
_LETTERS_ALONE = {"C": "coulomb", "F": "farad"}
_SYMBOL_ALONE = re.compile(rf"(?<=[0-9)}}])\s*(?P<symbol>{'|'.join(sorted(_ALONE.split(), key=len, reverse=True))})\Z")
"""Matches a unit's symbol after a number and without a macro around it; it could also be variables."""
_UNITS_ALONE = re.compile(
    r"(?<=[0-9)}])\s*(?P<units>(?:\\cdot(?![A-Za-z])|\\ell(?![A-Za-z])|[A-Za-z]{1,4}|[\s/.]|\^\s*\{?\s*-?[0-9]\s*\}?)+)\Z"
)
"""Matches several symbols without a macro, such as `N\\cdot m` and `mol L^{-1}`."""
_DERIVED = {
    "cc": (("cm", 3),),
    "newton": (("kg", 1), ("m", 1), ("s", -2)),
    "joule": (("kg", 1), ("m", 2), ("s", -2)),
    "watt": (("kg", 1), ("m", 2), ("s", -3)),
    "pascal": (("kg", 1), ("m", -1), ("s", -2)),
    "hz": (("s", -1),),
    "coulomb": (("ampere", 1), ("s", 1)),
    "volt": (("kg", 1), ("m", 2), ("s", -3), ("ampere", -1)),
    "ohm": (("kg", 1), ("m", 2), ("s", -3), ("ampere", -2)),
    "farad": (("kg", -1), ("m", -2), ("s", 4), ("ampere", 2)),
    "tesla": (("kg", 1), ("s", -2), ("ampere", -1)),
    "henry": (("kg", 1), ("m", 2), ("s", -2), ("ampere", -2)),
    "mph": (("mi", 1), ("h", -1)),
    "kph": (("km", 1), ("h", -1)),
}
"""Unit -> the units of which it is made; SI units from BIPM, The International System of Units, table 4."""
_TOKEN = re.compile(r"[A-Za-z]+|/|\^\s*\{?\s*(?P<power>[+-]?[0-9])")

Unit = tuple[tuple[str, int], ...]
"""Units with their powers, sorted by name: square inches are (("in", 2),)."""


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""Split text into a number and the unit after it. The unit is None if there is none, or if a word in it is not a
    known unit.

    "percent" becomes a percent sign and "million" a power of ten. The whole text is returned if there is nothing before
    the words, or if a word changes the number ("5 or more").
    """
    value, named, words, plain = text, "", list[str](), False
    while match := _LAST.search(value):
        before = value[: match.start()]
        unit = match["macro"] or match["word"] or ""
        if has_value(unit):
            return text, None
        words += re.findall("[a-z]+|,(?=.*[a-z])", unit.lower())
        plain |= match["word"] is not None
        joint = _JOINT.search(before)
        separator = "/" if joint and "/" in joint[0] else " "
        named = f"{separator}{unit}{match['exponent'] or ''} {named}"
        value = before[: joint.start()] if joint else before
    if not value.strip() or (plain and not _VALUE_END.search(value)) or _changes_it(named.lower(), words):
        return text, None
    if scales := [scale for scale in map(_magnitude, words) if scale]:
        return " \\times ".join([value, *scales]), None
    if not _PERCENT.isdisjoint(words) or ("%" in named and not words):
        return value + "\\%", None
    return value, _unit("degree " * bool(_DEGREE_SIGN.search(value)) + named)


def with_unit(text: str, other: str, unit: Unit | None = None) -> str:
    r"""Read letters after a number as a unit if the other text, or `unit`, has that unit: `7\text{ m}` for `7m`.

    Otherwise a letter after a number is a variable. `other` may be `7\mathrm{m}` or `7 metres`.
    """
    wanted = unit or split_unit(other)[1]
    if wanted is None:
        return text
    spelled: list[tuple[int, str]] = []
    if found := _SYMBOL_ALONE.search(text):
        symbol = found["symbol"]
        spelled = [(found.start(), name) for name in (symbol, _LETTERS_ALONE.get(symbol, symbol))]
    elif found := _UNITS_ALONE.search(text):
        spelled = [(found.start(), " ".join(re.sub(r"\\cdot|\.", " ", found["units"].replace("\\ell", "L")).split()))]
    texts = (f"{text[:start]}\\text{{ {name}}}" for start, name in spelled)
    return next((one for one in texts if split_unit(one)[1] == wanted), text)


def money(text: str) -> Unit | None:
    r"""The currency whose sign an answer or a gold has; None without one, and for `£`, which may also be a weight.

    A single `$` at the beginning is a dollar; two of them enclose a formula.
    """
    sign = _MONEY.search(text)
    return ((sign.lastgroup, 1),) if sign and sign.lastgroup else None


def units_differ(left: Unit | None, right: Unit | None) -> bool:
    """Whether both units are known and differ. The word "unit" alone equals any unit of the same power, and a degree
    equals any temperature scale.

    The letter C alone is read as Celsius and F as Fahrenheit, so these do not differ from coulomb and farad; the sign
    ¥ stands for yen and for yuan.
    """
    if left is None or right is None or left == right:
        return False
    names = {left[0][0], right[0][0]}
    if names in ({"yen_or_yuan", "yen"}, {"yen_or_yuan", "yuan"}):
        return False
    if "degree" in names and not _SCALES.isdisjoint(names):
        return False
    if any({left, right} == {((scale, 1),), _unit(other)} for scale, other in _SAME_LETTER.items()):
        return False
    return not (left[0][0] == "unit" or right[0][0] == "unit") or left[0][1] != right[0][1]


def _changes_it(named: str, words: list[str]) -> bool:
    """Whether the words after a number change, deny or doubt it. "squared" does so if no unit is before it."""
    first = next(iter(re.findall("[a-z]+", named)), "")
    is_power = first in _POWERS and first.endswith("d")
    odd = NOT_IN_A_UNIT.search(named) or _NUMERAL.search(named)
    return is_power or odd is not None or any(map(_REFUSED.fullmatch, words))


def _magnitude(word: str) -> str:
    return _MAGNITUDES.get(word) or _MAGNITUDES.get(word.removesuffix("s")) or ""


def _unit(words: str) -> Unit | None:
    powers: dict[str, int] = {}
    last, pending, sign = "", 1, 1
    for token in _TOKEN.finditer(words.replace("\\cdot", " ")):
        word = _CASED.get(token[0], token[0].lower())
        if (
            token["power"] is not None and last == "millisecond" and int(token["power"]) < 0
        ):  # `ms^{-1}` is metres a second
            powers |= {"m": powers.get("m", 0) + powers.pop(last), "s": powers.get("s", 0) + int(token["power"])}
        elif token["power"] is not None:
            powers[last] = powers.get(last, 0) * int(token["power"])
        elif word in ("/", "per"):
            sign = -1
        elif word in _POWERS and not word.endswith("d"):
            pending = _POWERS[word]
        elif word in _POWERS:
            powers[last] = powers.get(last, 0) * _POWERS[word]
        else:
            known = _KNOWN.get(word) or _KNOWN.get(word.removesuffix("s"))
            if known is None:
                return None
            last, powers[known], pending = known, powers.get(known, 0) + sign * pending, 1
    for name in _DERIVED.keys() & powers.keys():
        power = powers.pop(name)
        powers |= {base: powers.get(base, 0) + power * exponent for base, exponent in _DERIVED[name]}
    if not _SCALES.isdisjoint(powers):
        powers.pop("degree", None)
    return tuple(sorted((name, power) for name, power in powers.items() if name and power)) or None
