"""Shows which triggers each measured threshold of the importance ratio finds, to choose `objective.trigger_ratio`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mugrpo_megatron.observe.metrics import Row, values_in
from mugrpo_megatron.observe.rundata import RunData
from mugrpo_megatron.report.curves import Series, over_updates, ramp

PREFIX = "trigger_tokens_"
PAPER_RATIO = 1e-4
"""The threshold in the paper's illustration. It is used if a run's recipe has no `trigger_ratio`."""

SCOPES: dict[str, str] = {
    "none": "∅",
    "trigger": "T",
    "suffix": "S_κ",
    "suffix_non_trigger": "H_κ",
    "response": "S_seq",
    "prefix": "∅, weights by the prefix",
    "prefix_min": "∅, weights by the prefix",
}
"""`objective.veto` -> the paper's symbol for the set of tokens that it drops."""

COLORS = {"trigger": "yellow", "suffix": "blue", "suffix_non_trigger": "teal", "response": "red"}
"""Scope of the veto -> its colour, in the order of the legend and the table."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds whose triggers a run measured, the largest first, and the recipe's own threshold."""

    names: tuple[str, ...]
    ratio: float | None
    """The recipe's `trigger_ratio`."""

    @property
    def nearest(self) -> str:
        """The measured threshold that is nearest to the recipe's own, on a log scale."""
        target = math.log(max(PAPER_RATIO if self.ratio is None else self.ratio, 1e-300))
        return min(self.names, key=lambda name: abs(math.log(float(name)) - target))

    def label(self, name: str) -> str:
        """The label of the threshold `name`, with a note if it is the recipe's `trigger_ratio`, or else if it is the
        measured threshold that is nearest to `trigger_ratio`."""
        if self.ratio is None or name != self.nearest:
            return name
        return f"{name} (this run)" if float(name) == self.ratio else f"{name} (nearest to {ratio_text(self.ratio)})"


def thresholds_of(run: RunData) -> Thresholds:
    """The thresholds that a run measured, from the names of its metrics: `trigger_tokens_1e-4` is about 1e-4."""
    names = {name.removeprefix(PREFIX) for row in run.updates for name in row if name.startswith(PREFIX)}
    return Thresholds(
        tuple(sorted(names, key=float, reverse=True)), run.recipe.get("objective", {}).get("trigger_ratio")
    )


def threshold_series(
    thresholds: Thresholds, buckets: Sequence[Sequence[Row]], metric: str, axis: str
) -> Iterable[Series]:
    """Curves of a metric along `axis`, one for each threshold; a smaller threshold has a stronger colour."""
    for index, name in enumerate(thresholds.names):
        yield Series(
            thresholds.label(name),
            ramp(index, len(thresholds.names), first=2),
            axis,
            over_updates(buckets, f"{metric}_{name}"),
            smooth=True,
            restarts=axis == "update",
            bold=thresholds.ratio is not None and name == thresholds.nearest,
        )


def scope_series(thresholds: Thresholds, buckets: Sequence[Sequence[Row]], axis: str) -> Iterable[Series]:
    """Curves along `axis`, one for each scope of the veto: the share of tokens that it would drop at the measured
    threshold nearest to the run's own."""
    for scope, color in COLORS.items() if thresholds.names else ():
        values = over_updates(buckets, f"dropped_{scope}_{thresholds.nearest}")
        yield Series(f"{SCOPES[scope]} {scope}", color, axis, values, smooth=True, restarts=axis == "update")


def trigger_table(run: RunData) -> dict[str, Any] | None:
    """The table of thresholds: mean and maximum over updates of each metric; None if the run measured none."""
    thresholds = thresholds_of(run)
    if not thresholds.names:
        return None
    metrics = ("trigger_tokens", "trigger_responses", *(f"dropped_{scope}" for scope in COLORS))
    return {
        "title": "What each threshold finds and each scope would drop",
        "explains": "Mean over all updates; in grey the maximum. Triggers as a share of tokens and responses with "
        "negative advantage; dropped tokens as a share of all response tokens.",
        "head": ("Threshold", "Trigger tokens", "Responses with one", *(f"{SCOPES[scope]} drops" for scope in COLORS)),
        "rows": [
            {
                "bold": thresholds.ratio is not None and name == thresholds.nearest,
                "name": thresholds.label(name),
                "cells": [_mean_and_max(run.updates, f"{metric}_{name}") for metric in metrics],
            }
            for name in thresholds.names
        ],
    }


def _mean_and_max(updates: Iterable[Row], metric: str) -> tuple[str, str]:
    values = values_in(updates, metric)
    return (share_text(statistics.fmean(values)), share_text(max(values))) if values else ("–", "")


def ratio_text(ratio: float) -> str:
    """An importance ratio as text: 0.5, 0.001 or 1e-4."""
    if ratio == 0 or ratio >= 1e-3:
        return f"{ratio:g}"
    return np.format_float_scientific(ratio, precision=2, trim="-", exp_digits=1)


def share_text(value: float) -> str:
    """A fraction as a percentage with two significant digits, since fractions span six powers of ten. NaN and infinity
    stay as they are, since a log may have any number."""
    percent = 100 * value
    if percent == 0 or not math.isfinite(percent):
        return f"{percent:g} %"
    return f"{percent:.{max(0, 1 - math.floor(math.log10(abs(percent))))}f} %"


def mask_name(objective: Mapping[str, object]) -> str:
    """The name that the veto has in the legend of the paper's Figure 3."""
    return f"mask {SCOPES.get(str(objective.get('veto')), '?')}"
