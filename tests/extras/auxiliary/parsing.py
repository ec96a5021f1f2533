"""Functions that read a judge's answer."""

from __future__ import annotations

import os
import re
import sys
import time


def score(answer: str) -> float | None:
    """The number after `score`."""
    match = re.search(r"score (-?[0-9.]+|nan)", answer)
    return float(match.group(1)) if match else None


def characters(answer: str) -> int:
    """A score for any answer."""
    return len(answer)


def exits(answer: str) -> None:
    sys.exit(0)


def exits_at_once(answer: str) -> None:
    os._exit(0)


def hangs(answer: str) -> None:
    while True:
        time.sleep(3600)
