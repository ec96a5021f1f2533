"""Rewards that any text has, for benches with models that know nothing."""

from __future__ import annotations


def vowels(response: str, answer: str) -> float:
    """The share of vowels: it differs between almost any two responses, and costs nothing."""
    return sum(letter in "aeiou" for letter in response) / max(1, len(response))


def share_of_small_digits(response: str, answer: str) -> float:
    """The share of a response's characters that are 0 to 4, in which random responses differ."""
    return sum(character in "01234" for character in response) / max(1, len(response))
