"""Functions that read a judge's answer."""

from __future__ import annotations

import re


def score(answer: str) -> float | None:
    """The number after `score`."""
    match = re.search(r"score (-?[0-9.]+|nan)", answer)
    return float(match.group(1)) if match else None


def characters(answer: str) -> int:
    """A score for any answer."""
    return len(answer)
