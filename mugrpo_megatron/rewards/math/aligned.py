r"""Rewrites equations in several rows (`aligned`, `cases`, `gathered`) as a chain of equations or a list in one row."""

from __future__ import annotations

import re

_NAMES = (
    r"(?:aligned|align|alignat|alignedat|flalign|gathered|gather|multline|split|cases|dcases|rcases|array|eqnarray"
    r"|equation)"
)
_ENVIRONMENT = re.compile(
    rf"(?:(?:\\left)?\s*(?:\\\{{|\\lbrace)\s*)?\\begin\s*\{{(?P<name>{_NAMES})\*?\}}(?:\s*\[[^\]]*\])?"
    rf"(?:\{{(?P<columns>[lcr|@0-9{{}}\s]*)\}})?(?P<body>(?:(?!\\begin).)*?)\\end\s*\{{(?P=name)\*?\}}(?:\s*\\right\s*\.)?",
    re.DOTALL,
)
_DISPLAY = re.compile(
    r"(?:\$\$|\\\[)?\s*\\begin\s*\{(?P<name>align|alignat|flalign|gather|multline|eqnarray)(?P<star>\*?)\}(?P<body>.*?)"
    r"\\end\s*\{(?P=name)(?P=star)\}\s*(?:\$\$|\\\])?",
    re.DOTALL,
)
_ROW = re.compile(r"\\\\(?:\s*\[[^\]]*\])?|\\cr(?![A-Za-z])|\\newline(?![A-Za-z])|\\tabularnewline(?![A-Za-z])")
_RELATION = re.compile(r"\s*(?:=|<|>|\\(?:[lg]eq?|approx|equiv|in|to|Rightarrow|implies|iff)(?![A-Za-z])|≤|≥|≈)")
_OPEN_END = re.compile(r"(?:[=<>+\-]|\\(?:[lg]eq?|approx))\s*\Z")
_CHAINED = re.compile(r"\s*(?:=|\\approx(?![A-Za-z])|≈)")
_BLANK = " \t\n,.;"
_NUMBERED = re.compile(r"\\(?:nonumber|notag|label\s*\{[^{}]*\}|tag\*?\s*\{[^{}]*\})")


def without_alignment(text: str) -> str:
    r"""Rewrite environments of several rows as one row.

    A row that begins with an equals sign continues the row before; other rows become elements of a list. An environment
    stays as it is if its columns do not meet at relations, as in a matrix or a piecewise function, or if it is an
    `array` or a `cases` without any relation.
    """
    if "\\begin" not in text:
        return text.replace("&=", "=").replace("=&", "=") if "&" in text and "matrix" not in text else text
    return _ENVIRONMENT.sub(_in_one_row, text)


def as_displays(text: str) -> str:
    r"""Rewrite environments that are displays by themselves (`align*`, `gather`) as `aligned` inside `$$`."""
    if "\\begin" not in text:
        return text
    return _DISPLAY.sub(r"$$\\begin{aligned}\g<body>\\end{aligned}$$", text)


def _in_one_row(environment: re.Match[str]) -> str:
    rows = [row.strip(_BLANK) for row in _ROW.split(_NUMBERED.sub("", environment["body"]))]
    rows = [row for row in rows if row.strip("& \t\n")]
    relational = any(_RELATION.search(row) for row in rows)
    if environment["name"] in ("array", "cases", "dcases", "rcases") and not relational:
        return environment[0]
    elements: list[str] = []
    for row in rows:
        cells = [cell.strip() for cell in row.split("&")]
        joined = _joined(cells)
        if joined is None:
            return environment[0]
        joined = joined.strip(_BLANK)
        if elements and _CHAINED.match(joined):
            elements[-1] += f" {joined}"
        else:
            elements.append(joined)
    return ", ".join(elements)


def _joined(cells: list[str]) -> str | None:
    """Join the cells of a row to one text; None if two of them do not meet at a relation such as `=`."""
    text = cells[0]
    for cell in cells[1:]:
        if text and cell and not _RELATION.match(cell) and not _OPEN_END.search(text):
            return None
        text = f"{text} {cell}"
    return text
