"""Statistics of a stage's responses, summed up while the stage is sealed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class StageStatistics:
    """Running sums over the updates of a stage; memory does not grow with the stage."""

    def __init__(self) -> None:
        self._responses = 0
        self._groups = 0
        self._reward = 0.0
        self._tokens = 0
        self._longest = 0
        self._truncated = 0
        self._without_variance = 0
        self._components: dict[str, list[float]] = {}
        """Name -> sum and count."""

    def add(self, table: pa.Table) -> None:
        """Add the rows of one update; the rows of a group are consecutive."""
        groups = table["group"].to_numpy()
        rewards = table["reward"].to_numpy()
        lengths = pc.list_value_length(table["response_ids"]).to_numpy()
        starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        spread = np.maximum.reduceat(rewards, starts) - np.minimum.reduceat(rewards, starts)
        self._responses += len(rewards)
        self._groups += len(starts)
        self._reward += float(rewards.sum())
        self._tokens += int(lengths.sum())
        self._longest = max(self._longest, int(lengths.max()))
        self._truncated += table["finish_reason"].to_pylist().count("length")
        self._without_variance += int((spread == 0).sum())
        components = ({one["name"]: one["value"] for one in row} for row in table["components"].to_pylist())
        for name, values in by_name(components).items():
            total = self._components.setdefault(name, [0.0, 0.0])
            total[0] += sum(values)
            total[1] += len(values)

    def result(self) -> dict[str, float]:
        """Means over responses, fractions of responses and of groups, token counts."""
        return {
            "responses": self._responses,
            "reward_mean": self._reward / self._responses,
            "response_length_mean": self._tokens / self._responses,
            "response_length_max": self._longest,
            "generated_tokens": self._tokens,
            "truncated_fraction": self._truncated / self._responses,
            "zero_variance_fraction": self._without_variance / self._groups,
            **{f"reward/{name}": total / count for name, (total, count) in self._components.items()},
        }


def component_means(components: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Metrics `reward/NAME`: the mean of each part of the rewards over the responses that have it."""
    return {f"reward/{name}": sum(values) / len(values) for name, values in by_name(components).items()}


def by_name(components: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values of each part of the rewards, over the responses that have it."""
    found: dict[str, list[float]] = {}
    for one in components:
        for name, value in one.items():
            found.setdefault(name, []).append(value)
    return found
