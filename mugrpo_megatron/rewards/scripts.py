"""Decimal digits of every script, and full-width signs, as ASCII.

Models answer in the language that they think in: `٤٢`, `４２` and `४२` are 42. Each of Unicode's decimal digits has one
value (category Nd, Unicode Standard 4.6). Superscripts and circled numbers are other signs and stay what they are.
"""

from __future__ import annotations

import re
import unicodedata

_DIGIT = re.compile(r"(?![0-9])\d")
_FULL_WIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_ARABIC = {0x066B: ".", 0x066C: ",", 0x060C: ","}
"""The decimal separator, the thousands separator and the comma."""
_IDEOGRAPHIC_COMMA = {0x3001: ","}
_SIGNS = _FULL_WIDTH | _ARABIC | _IDEOGRAPHIC_COMMA


def in_ascii_digits(text: str) -> str:
    """Text with every decimal digit and every full-width sign as its ASCII character; idempotent."""
    if text.isascii():
        return text
    return _DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text.translate(_SIGNS))
