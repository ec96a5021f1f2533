"""Text that a model or a file gave, made safe for a terminal."""

from __future__ import annotations

import unicodedata

INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories that a terminal obeys instead of showing: control, format (text direction), line separators."""
KEPT = "\n\t"


def visible(text: str) -> str:
    r"""`text` with every control character as an escape such as `\x1b`; newlines and tabs stay.

    A terminal obeys escape sequences: they set its title, clear it, or write to the clipboard.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(c) if unicodedata.category(c) in INVISIBLE and c not in KEPT else c for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
