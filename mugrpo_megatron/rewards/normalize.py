"""Gives equal answers one spelling: wrappers, spacing, thousands, mixed numbers, units."""

from __future__ import annotations

import re

_NUMBER = r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_PLAIN = str.maketrans(
    {"−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "∞": "\\infty ", "°": "^\\circ ",
     "√": "\\sqrt ", "≤": "\\le ", "≥": "\\ge ", "≈": "\\approx ", "≠": "\\ne ", "∨": "\\lor ", "∪": "\\cup ",
     "\x00": "", "\u200b": "", "\u00a0": " ", "~": " "}
)  # fmt: skip
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\?\$|(?<!\\)\\[()\[\]]", " "),
        (r"\\\\(?=(?:[lg]eq?|left|right|[dt]?frac|sqrt|text|pi|boxed|cdot|times|pm|infty)(?![A-Za-z]))", r"\\"),
        (r"(?<=[0-9]),\\!\s*(?=[0-9])|(?<=[0-9])\{,\}\s*(?=[0-9])", ""),
        (r"\\!|\\(?:left|right|displaystyle|limits)(?![A-Za-z])|\\(?:big|Big|bigg|Bigg)[lr]?(?![A-Za-z])", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad", " "),
        (r";", ","),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:lor|vee)(?![A-Za-z])|\\+text\s*\{\s*(?:or|and)\s*\}|(?<![A-Za-z])(?:or|and)(?![a-z])", ","),
        (r"^\s*\\(?:text|textbf|textit|mathrm|mathbf|mathit|mathcal|mathbb|mathsf)\s*\{\s*([^{}\\]+?)\s*\}\s*$", r"\1"),
        (r"\\(?:text|textbf|textrm|textit|mathrm|mbox)\s*\{[^{}0-9]*\}(?:\^\{?[23]\}?)?(?=\s*(?:$|,|=))", " "),
        (r"\\+boxed\s*\{(?=[^{}]*$)", ""),
        (r"(?<=[0-9)}])i(?![A-Za-z])", " i"),
        (r"\s+", " "),
    )
)  # fmt: skip
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_SPACED_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?: [0-9]{3})+")
_MIXED = re.compile(r"([+-]?[0-9]+) ([0-9]+) ?/ ?([0-9]+)")
_SCIENTIFIC = re.compile(rf"([+-]?(?:{_NUMBER}))[eE]([+-]?[0-9]+)")
_UNIT = re.compile(
    r"(?P<value>.*[0-9})])\s*(?:[A-Za-z]{3,}|\b(?:cm|mm|km|kg|ft|in|mi|lb|oz|hr|ml|mg|m|s)\b)(?:[ /.-]+[A-Za-z]+)*"
    r"\s*(?:\^\s*\{?[23]\}?)?"
)
_SHORT_UNIT = re.compile(rf"(?P<value>[+-]?(?:{_NUMBER})) ?(?:cm|mm|km|kg|ft|in|mi|lb|oz|hr|ml|mg)(?:\^\{{?[23]\}}?)?")


_LEADING = ' ,;:\n\t"`'
_TRAILING = _LEADING + ".\\"


def normalize(text: str) -> str:
    """The same answer in one spelling; LaTeX stays LaTeX. Alternatives ("or", `\\lor`) become commas."""
    text = text.translate(_PLAIN).rstrip(_TRAILING)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.rstrip(_TRAILING).lstrip(_LEADING)
    if not any(bracket in text for bracket in "([{"):
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    while text[:1] == "{" and text[-1:] == "}" and encloses(text):
        text = text[1:-1].strip()
    if _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    if mixed := _MIXED.fullmatch(text):
        return f"{mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    if scientific := _SCIENTIFIC.fullmatch(text):
        return f"{scientific[1]} \\times 10^{{{scientific[2]}}}"
    return text


def without_unit(text: str) -> str:
    """A number without the words after it: for answers whose gold is a bare number."""
    for pattern in (_SHORT_UNIT, _UNIT):
        if match := pattern.fullmatch(text):
            return match["value"].strip()
    return text


def encloses(text: str) -> bool:
    """Whether one pair of brackets encloses all of text."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return place > 0 and place == len(text) - 1
    return False


def split_top(text: str, separators: str) -> list[str]:
    """Split where one of `separators` (a regular expression) is outside of all brackets and braces."""
    parts, depth, begin, place = [], 0, 0, 0
    pattern = re.compile(separators)
    while place < len(text):
        if text[place] in "([{":
            depth += 1
        elif text[place] in ")]}":
            depth -= 1
        elif depth <= 0 and (match := pattern.match(text, place)):
            parts.append(text[begin:place].strip())
            begin = place = match.end()
            continue
        place += 1
    return [*parts, text[begin:].strip()]
