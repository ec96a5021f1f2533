"""Reads the labelled answers of labelled.txt."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Case(NamedTuple):
    """A response, and whether it answers the gold."""

    response: str
    gold: str
    right: bool


def labelled_cases() -> list[Case]:
    """All of them, in order."""
    lines = Path(__file__).with_name("labelled.txt").read_text(encoding="utf-8").splitlines()
    cases = []
    for line in lines:
        if line[:2] in ("+ ", "- "):
            gold, response = line[2:].split(" :: ", 1)
            cases.append(Case(response.replace("⏎", "\n"), gold, line[0] == "+"))
    return cases
