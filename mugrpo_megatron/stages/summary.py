"""Statistics of a stage's responses, summed up while the stage is sealed."""

from __future__ import annotations

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
        }
