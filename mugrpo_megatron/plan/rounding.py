"""Figures to the two digits that a plan knows."""

from __future__ import annotations

import math

UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


def two_digits(value: float) -> str:
    """150, 9.3, 0.0041; nothing where there is nothing."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    return f"{rounded:,.{max(0, 1 - math.floor(math.log10(abs(rounded))))}f}"


def about(seconds: float) -> str:
    """Seconds in the largest unit of which there is one: 37 h, 9.3 min, 28 s."""
    size, unit = next(((size, unit) for size, unit in UNITS if seconds >= size), UNITS[-1])
    return f"{two_digits(seconds / size)} {unit}"
