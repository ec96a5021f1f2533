"""Replaces characters that mean the same by one of them: digits of every script, compatibility forms, spaces, signs.

Unicode Standard Annex 15 defines the compatibility forms. Not all are replaced by what they are compatible with: a
superscript becomes an exponent, a subscript an index, and a circled digit stays, since it is a label.
"""

from __future__ import annotations

import re
import unicodedata

_SIGNS = {
    # a minus: hyphens, and dashes as wide as a digit; not the em dash, which is punctuation
    "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u02d7": "-", "\u2796": "-", "\u2795": "+",
    "\u2236": ":", "\u2215": "/", "\u2044": "/", "\u2217": "*", "\u2223": "|", "\u00b4": "'",
    "\u2032": "'", "\u2033": "''", "\u2034": "'''", "\u02b9": "'", "\u02ba": "''", "\u02da": "\u00b0",
    "\u2715": "\u00d7", "\u2716": "\u00d7", "\u2a2f": "\u00d7", "\u22c5": "\u00b7", "\u2219": "\u00b7",
    "\u2027": "\u00b7",
    "\u2266": "\u2264", "\u2a7d": "\u2264", "\u2267": "\u2265", "\u2a7e": "\u2265",
    "\u2329": "\u27e8", "\u3008": "\u27e8", "\u232a": "\u27e9", "\u3009": "\u27e9",
    "\u066a": "%", "\u066b": ".", "\u066c": ",", "\u060c": ",", "\u061b": ";", "\u3001": ", ", "\uff64": ", ",
    "\u2063": ",", "\u2212": "-", "\ufe63": "-", "\u29b5": "\u2205",
    "\u211d": "\\mathbb{R}", "\u2115": "\\mathbb{N}", "\u2124": "\\mathbb{Z}", "\u211a": "\\mathbb{Q}",
    "\u2102": "\\mathbb{C}", "\u2119": "\\mathbb{P}",
}  # fmt: skip
"""Sign -> the usual sign for it, which is taken even if the sign has a compatibility form; and letters of number sets,
which stay blackboard letters."""
_AS_THEY_ARE = frozenset("\u2026\u2025\u2122\u2120\u00a8\u00af\u00b8\u1fbd\u203c\u2047\u2048\u2049")
"""Characters that stay, because their compatibility form is longer and no clearer."""
_NO_UNITS = frozenset("\u33c2\u33c7\u33cd\u33d1\u33d2\u33d8")
"""Squared abbreviations that are not units, such as ln and log."""
_RAISED = "\u00b2\u00b3\u00b9\u2070\u2071\u2074-\u207f\u02b0-\u02b8\u02e1-\u02e3\u1d2c-\u1d6a\u1d9c-\u1dbf"
_LOWERED = "\u2080-\u209c\u1d62-\u1d6a\u2c7c"
FRACTIONS = "\u00bc-\u00be\u2150-\u215f\u2189"
SQUARED_UNITS = "\u3371-\u33df"
RAISED = rf"[{_RAISED}]"
_SCRIPT = re.compile(f"(?P<low>[{_LOWERED}]+)|(?P<raised>[{_RAISED}]+)")
_ORDINAL = re.compile(r"(?<=[0-9])\.?[\u00ba\u00aa]")
_LABELLED = re.compile(r"^\s*[A-J\uff21-\uff2a](?=\u3001)", re.MULTILINE)
"""Matches the letter of an option in the form that Chinese text has: a letter and an ideographic comma."""
_TILDE = re.compile(r"(?<=[0-9])\s*[\uff5e\u301c]\s*(?=[0-9])")
_REPEATED = re.compile("(?:[0-9][\u0304\u0305])+|[0-9]\u0307(?:[0-9]*[0-9]\u0307)?")
"""Matches the digits of a repeating decimal under a line or between dots."""
OVER_DIGITS = "\u0304\u0305\u0307"
_OVER = re.compile(f"[{OVER_DIGITS}]")
_FRACTION_AFTER = re.compile(r"(?<=[0-9])[\s\u2064]*(?=\\frac\{[0-9]{1,2}\}\{[0-9]{1,2}\})")

_UNIT_PER = re.compile(r"(\\text\{ [A-Za-z\u03bc]+)\}/([A-Za-z]{1,4})(?![A-Za-z])")
"""Matches a unit divided by another one in the form that `㎞/h` has here: `\\text{ km}/h`."""


def plain_characters(text: str, scripts: bool = True) -> str:
    r"""Replace characters that mean the same by one of them; ASCII text and letters of any script are unchanged.

    Decimal digits of every script become 0 to 9; wide, narrow and styled forms become plain; `x²` becomes `x^{2}`, `x₁`
    `x_{1}`, `3½` `3\frac{1}{2}`; spaces become one kind; invisible characters vanish. Circled digits stay, since they
    are labels; a circled letter becomes an option, `(C)`. Without `scripts`, superscripts, subscripts, fractions
    and units in one character stay too, so that a number in a sentence ends before them.
    """
    if text.isascii():
        return text
    text = _ORDINAL.sub("\u00b0", text)  # Spanish ordinal signs, which are often typed instead of a degree sign
    text = _TILDE.sub("-", _LABELLED.sub(r"\g<0>. ", text).replace(". \u3001", ". "))
    if not scripts:
        return unicodedata.normalize("NFC", text.translate(_TABLE_WITH_SCRIPTS))
    text = _REPEATED.sub(
        lambda digits: f"\\overline{{{_OVER.sub('', digits[0])}}}", _SCRIPT.sub(_raised_or_lowered, text)
    )
    text = unicodedata.normalize("NFC", _FRACTION_AFTER.sub("", text.translate(_TABLE)))
    return _UNIT_PER.sub(r"\1/\2}", text) if "{ " in text else text


def _raised_or_lowered(match: re.Match[str]) -> str:
    inside = unicodedata.normalize("NFKC", match[0]).translate(_TABLE)
    return f"_{{{inside}}}" if match["low"] else f"^{{{inside}}}"


def _plain(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category == "Zs":
        return " "
    if category == "Cf" or "\ufe00" <= character <= "\ufe0f" or character == "\u20e3":
        return ""  # characters that are not shown: joiners, direction marks, invisible operators, styles of emoji
    form = unicodedata.decomposition(character)
    tag = form[: form.find(">") + 1]
    if tag == "<circle>" and (letter := chr(int(form.split()[1], 16))).isalpha() and letter.isascii():
        return f"({letter})"  # an option of a question
    if not form or character in _AS_THEY_ARE or tag == "<circle>":
        return character
    if tag == "<fraction>":
        above, _, under = unicodedata.normalize("NFKC", character).partition("\u2044")
        return f"\\frac{{{above}}}{{{under or 1}}}"
    if not tag:  # a canonical form is taken only if it is another single character, such as an omega for the ohm sign
        return unicodedata.normalize("NFC", character)
    parts = "".join(chr(int(code, 16)) for code in form.removeprefix(tag).split())
    if tag == "<square>" and "\u3371" <= character <= "\u33df" and character not in _NO_UNITS:
        unit, power, digits = plain_characters(parts).partition("^")
        return f"\\text{{ {unit}}}{power}{digits}"
    return plain_characters(parts)


class _Table(dict[int, str]):
    """Code point -> its plain text, computed for each character when it first occurs."""

    def __init__(self, kept: str = "") -> None:
        super().__init__()
        self._kept = re.compile(f"[{kept}]") if kept else None

    def __missing__(self, code: int) -> str:
        stays = code < 128 or (self._kept is not None and self._kept.match(chr(code)))
        self[code] = text = chr(code) if stays else _plain(chr(code))
        return text


_TABLE, _TABLE_WITH_SCRIPTS = _Table(), _Table(_RAISED + _LOWERED + FRACTIONS + SQUARED_UNITS)
