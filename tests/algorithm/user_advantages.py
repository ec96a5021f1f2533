"""Advantages of a user's own that read the parts of a reward, as docs/own-functions.md describes them."""

from __future__ import annotations

import numpy as np

FUNCTIONS = ("right", "short")
"""Names in the recipe's [reward.functions]."""


def gdpo(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray, rows: list, components: list) -> np.ndarray:  # type: ignore[type-arg]
    """GDPO (arXiv 2601.05242): each function's rewards are normalised in their group, and their sum in the update."""
    _, group, size = np.unique(groups, return_inverse=True, return_counts=True)
    total = np.zeros(len(rewards))
    for name in FUNCTIONS:
        values = np.array([parts[name] for parts in components])
        centred = values - (np.bincount(group, values) / size)[group]
        total += centred / (np.sqrt(np.bincount(group, centred**2) / np.maximum(size - 1, 1))[group] + 1e-6)
    return (total - total.mean()) / (total.std() + 1e-6)
