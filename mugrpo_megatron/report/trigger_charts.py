"""Triggers at every measured threshold: what another `objective.trigger_ratio` would have found in this run.

The metrics compare each token's ratio with every threshold, independently of the run's own threshold and veto.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mugrpo_megatron.algorithm.surrogates import LOG_RATIO_LIMIT
from mugrpo_megatron.observe.log import Row
from mugrpo_megatron.observe.paper import SCOPES, mask_name
from mugrpo_megatron.report.curves import Chart, Series, ages_of, by_age, over_updates
from mugrpo_megatron.report.rundata import RunData

PREFIX = "trigger_tokens_"
PAPER_RATIO = 1e-4
"""The threshold of the paper's illustration, for recipes without one."""

COLORS = {"trigger": "yellow", "suffix": "blue", "suffix_non_trigger": "teal", "response": "red"}
"""Colours of the veto's scopes, in the order of the legend and the table."""

ZEROS = "Lines are moving averages of the faint values. Below the smallest one, the log axis is linear down to 0."


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds that a run measured, largest first, and its own."""

    names: tuple[str, ...]
    ratio: float | None
    """The recipe's `trigger_ratio`."""

    @property
    def nearest(self) -> str:
        """The measured threshold nearest to the recipe's own, in log space."""
        own = math.log(max(PAPER_RATIO if self.ratio is None else self.ratio, 1e-300))
        return min(self.names, key=lambda name: abs(math.log(float(name)) - own))

    def label(self, name: str) -> str:
        """`name`, marked if it is the recipe's own or the nearest to it."""
        if self.ratio is None or name != self.nearest:
            return name
        return f"{name} (this run)" if float(name) == self.ratio else f"{name} (nearest to {_text(self.ratio)})"


def thresholds_of(run: RunData) -> Thresholds:
    """The thresholds in the rows' metric names: `trigger_tokens_1e-4` measures 1e-4."""
    found = {name.removeprefix(PREFIX) for row in run.updates for name in row if name.startswith(PREFIX)}
    return Thresholds(
        tuple(sorted(found, key=float, reverse=True)), run.recipe.get("objective", {}).get("trigger_ratio")
    )


def trigger_charts(run: RunData, buckets: Sequence[Sequence[Row]]) -> Iterable[Chart]:
    """Shares of triggers and of tokens that each scope would drop, against age and over the run."""
    thresholds = thresholds_of(run)
    if not thresholds.names:
        return
    ages = by_age(run.updates, ages_of(run.updates))
    if run.updates[0]["stage"] < run.updates[-1]["stage"]:  # with a single stage, age is the update
        yield from _shares(thresholds, ages, "age")
    yield from _shares(thresholds, buckets, "update")
    yield Chart(
        "ratio_neg_min",
        "Smallest importance ratio, negative advantage",
        "The lowest π/β of a token with negative advantage in each update: a threshold below it finds no trigger. "
        f"Log-ratios are clamped at −{LOG_RATIO_LIMIT:g}, ratios at {_text(math.exp(-LOG_RATIO_LIMIT))}.",
        [over_updates(buckets, "smallest", "blue", "ratio_neg_min", restarts=True, reduce=min)],
        scale="log",
        rule=thresholds.ratio or None,  # a log axis cannot show 0
        rule_label="trigger_ratio",
        rule_in_view=True,
    )


def trigger_remark(run: RunData) -> str:
    """The run's threshold and veto, for the section's title."""
    objective = run.recipe.get("objective", {})
    if "trigger_ratio" not in objective:
        return ""
    ratio, veto = _text(objective["trigger_ratio"]), objective["veto"]
    return f"this run: trigger_ratio = {ratio}, veto = {veto} ({mask_name(objective)})"


def trigger_table(run: RunData) -> dict[str, Any] | None:
    """Mean and maximum over updates of every threshold's shares; None without the metrics."""
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


def _shares(thresholds: Thresholds, buckets: Sequence[Sequence[Row]], axis: str) -> Iterable[Chart]:
    """The three charts of shares along `axis`."""
    along: dict[str, Any] = {"format": "percent", "scale": "log", "zero": True}
    if axis == "age":
        along["along"] = "age"
    suffix, by = ("_by_age", " by age") if axis == "age" else ("", "")
    mean = " Mean over stages." if axis == "age" else ""
    yield Chart(
        f"trigger_tokens{suffix}",
        f"Trigger tokens{by}",
        f"Negative tokens with a ratio below each threshold, as a share of all of them.{mean} {ZEROS}",
        _ramp(thresholds, buckets, "trigger_tokens", axis),
        **along,
    )
    yield Chart(
        f"trigger_responses{suffix}",
        f"Responses with a trigger{by}",
        f"Negative responses with at least one trigger, as a share of all of them.{mean} {ZEROS}",
        _ramp(thresholds, buckets, "trigger_responses", axis),
        **along,
    )
    at = thresholds.nearest
    yield Chart(
        f"dropped_by_scope{suffix}",
        f"Dropped by each scope{by}, at {thresholds.label(at)}",
        f"Share of all response tokens that each scope of the veto would drop.{mean} {ZEROS}",
        [
            over_updates(
                buckets,
                f"{SCOPES[scope]} {scope}",
                color,
                f"dropped_{scope}_{at}",
                axis=axis,
                smooth=True,
                restarts=axis == "update",
            )
            for scope, color in COLORS.items()
        ],
        **along,
    )


def _ramp(thresholds: Thresholds, buckets: Sequence[Sequence[Row]], metric: str, axis: str) -> list[Series]:
    """One curve for each threshold; smaller thresholds have a stronger colour."""
    steps = max(len(thresholds.names) - 1, 1)
    return [
        over_updates(
            buckets,
            thresholds.label(name),
            f"ramp-{2 + round(5 * place / steps)}",
            f"{metric}_{name}",
            axis=axis,
            smooth=True,
            restarts=axis == "update",
            bold=thresholds.ratio is not None and name == thresholds.nearest,
        )
        for place, name in enumerate(thresholds.names)
    ]


def _mean_and_max(updates: Iterable[Row], metric: str) -> tuple[str, str]:
    values = [row[metric] for row in updates if row.get(metric) is not None]
    return (_share(statistics.fmean(values)), _share(max(values))) if values else ("–", "")


def _text(ratio: float) -> str:
    """The ratio as 0.5, 0.001 or 1e-4."""
    if ratio == 0 or ratio >= 1e-3:
        return f"{ratio:g}"
    return np.format_float_scientific(ratio, precision=2, trim="-", exp_digits=1)


def _share(value: float) -> str:
    """A percentage with two significant digits: the shares span six powers of ten."""
    if value == 0:
        return "0 %"
    return f"{100 * value:.{max(0, 1 - math.floor(math.log10(100 * value)))}f} %"
