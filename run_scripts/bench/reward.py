"""A reward that any text has, for benches with models that know nothing."""

from __future__ import annotations


def vowels(response: str, answer: str) -> float:
    """The share of vowels: it differs between almost any two responses, and costs nothing."""
    return sum(letter in "aeiou" for letter in response) / max(1, len(response))
