"""The report's charts as data: which metrics share a panel, how they are drawn, what the reader is told."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Literal

from mugrpo_megatron.data.sets import MEAN
from mugrpo_megatron.observe.evaluations import interval_in, measure_in, sets_in
from mugrpo_megatron.observe.log import Row
from mugrpo_megatron.observe.rundata import RunData

Values = list[float | None]
Draw = Literal["line", "dots", "step"]
Format = Literal["percent", "number", "tokens"]

MAX_LINES_BY_AGE = 8
"""With more stages than this, curves over age become a median and a band."""

SET_COLORS = ("teal", "violet", "magenta", "yellow", "red", "grey", "ramp-2", "ramp-5")
"""Of held-out sets beside the blue of their mean and the orange of the training reward."""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve; `y` runs along the axis of that name, None where there is no finite value."""

    label: str
    color: str
    axis: str
    y: Values
    draw: Draw = "line"
    low: Values | None = None
    high: Values | None = None
    """A band around the curve."""
    smooth: bool = False
    """Too noisy to read raw: drawn faintly under its moving average."""
    anew: bool = False
    """Starts anew with the responses of every stage: no line leads from one stage to the next."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One panel of the page."""

    id: str
    title: str
    explains: str
    series: list[Series]
    format: Format = "number"
    scale: Literal["linear", "log"] = "linear"
    zero: bool = False
    """The vertical axis starts at 0."""
    along: Literal["run", "age"] = "run"
    rule: float | None = None
    """A dashed reference line at this height."""
    rule_label: str = ""
    wide: bool = False
    """Takes the page's whole width."""


def charts(run: RunData, buckets: Sequence[Sequence[Row]], stages: Sequence[Row]) -> list[Chart]:
    """Every chart that has a value.

    `buckets` are consecutive updates that one point stands for, `stages` the stage rows; series name their axis
    `update`, `eval`, `stage` or `age`.
    """
    every = (
        *_learning(run, buckets, stages),
        *_support(run, buckets),
        *_optimizer(run, buckets),
        *_responses(run, stages),
    )
    filled = (replace(chart, series=[s for s in chart.series if _has_values(s.y)]) for chart in every)
    return [chart for chart in filled if chart.series]


def _learning(run: RunData, buckets: Sequence[Sequence[Row]], stages: Sequence[Row]) -> Iterable[Chart]:
    reward = _over_updates(buckets, "training reward", "orange", "reward_mean", smooth=True, anew=True)
    measure = measure_in(run.evals)
    of = ", set by set and their unweighted mean," if len(sets_in(run.evals)) > 1 else ""
    by_stage = Series("stage mean", "orange", "stage", _column(stages, "reward_mean"), draw="step")
    yield Chart(
        "accuracy",
        f"{measure.capitalize()} and training reward",
        f"Held-out {measure}{of} with its 95 % interval; mean reward of the responses each update was trained on.",
        [*_held_out(run.evals), reward if _has_values(reward.y) else by_stage],
        format="percent" if measure == "accuracy" and _within_unit(reward.y) and _within_unit(by_stage.y) else "number",
        wide=True,
    )


def _held_out(evals: Sequence[Row]) -> list[Series]:
    """The held-out figures: of the only set, or of every set under their mean, which alone has its interval drawn."""
    measure, names = measure_in(evals), sets_in(evals)
    label, name = (f"mean {measure}", MEAN) if len(names) > 1 else (f"held-out {measure}", *names, MEAN)[:2]
    low, high = (
        [None if (i := interval_in(row, name)) is None else _rounded(i[end]) for row in evals] for end in (0, 1)
    )
    mean = Series(label, "blue", "eval", _column(evals, f"{measure}/{name}"), draw="dots", low=low, high=high)
    sets = [
        Series(name, SET_COLORS[place % len(SET_COLORS)], "eval", _column(evals, f"{measure}/{name}"), draw="dots")
        for place, name in enumerate(names)
    ]
    return [*(sets if len(sets) > 1 else []), mean]


def _support(run: RunData, buckets: Sequence[Sequence[Row]]) -> Iterable[Chart]:
    yield Chart(
        "dropped",
        "Tokens vetoed and clipped",
        "Share of response tokens that the negative-advantage veto drops, and whose gradient the clip holds back.",
        [
            _over_updates(buckets, "vetoed", "red", "vetoed_fraction", anew=True),
            _over_updates(buckets, "clipped", "blue", "clipped_fraction", anew=True),
        ],
        format="percent",
        zero=True,
    )
    yield Chart(
        "ratio_neg",
        "Importance ratio, negative advantage",
        "π/β of tokens in responses with negative advantage. At 1 the policy is the one that sampled.",
        [
            _over_updates(buckets, "max", "red", "ratio_neg_max", anew=True, reduce=max),
            _over_updates(buckets, "p99", "orange", "ratio_neg_p99", anew=True, reduce=max),
            _over_updates(buckets, "mean", "blue", "ratio_neg_mean", anew=True),
        ],
        scale="log",
        rule=run.recipe.get("objective", {}).get("clip_high"),
        rule_label="clip",
    )
    yield Chart(
        "ess",
        "Effective sample size",
        "(Σr)² / TΣr² of the token ratios: the share of the data that still counts. It decays as the data grow stale.",
        [_over_updates(buckets, "ESS", "teal", "ess", anew=True, reduce=min)],
        format="percent",
    )
    yield Chart(
        "kl",
        "KL from the sampling policy",
        "KL(β‖π) per token: k3 = r − 1 − log r, k1 = −log r.",
        [
            _over_updates(buckets, "k3", "violet", "kl_k3", anew=True),
            _over_updates(buckets, "k1", "orange", "kl_k1", anew=True),
        ],
    )
    if any(row["age"] for row in run.updates) and run.updates[0]["stage"] < run.updates[-1]["stage"]:
        yield _by_age(
            run, "ess", "ESS by age", "Effective sample size against how many updates old the data are.", "teal"
        )
        yield _by_age(
            run, "vetoed_fraction", "Vetoed by age", "Tokens vetoed against how many updates old the data are.", "red"
        )


def _optimizer(run: RunData, buckets: Sequence[Sequence[Row]]) -> Iterable[Chart]:
    norm = _over_updates(buckets, "gradient norm", "blue", "grad_norm", smooth=True)
    yield Chart(
        "grad_norm",
        "Gradient norm",
        "Global norm before clipping.",
        [norm],
        scale="log" if _spread(norm.y) > 30 else "linear",
        zero=True,
        rule=run.recipe.get("optimizer", {}).get("clip_grad"),
        rule_label="clip_grad",
    )
    yield Chart(
        "entropy",
        "Entropy",
        "Mean entropy of the next-token distribution at response tokens, in nats.",
        [_over_updates(buckets, "entropy", "teal", "entropy", smooth=True)],
    )
    yield Chart(
        "loss",
        "Loss",
        "The surrogate that an update minimises; its level says little, its jumps do.",
        [_over_updates(buckets, "loss", "violet", "loss", smooth=True)],
    )
    yield Chart(
        "lr",
        "Learning rate",
        "As the schedule set it.",
        [_over_updates(buckets, "lr", "yellow", "lr")],
        zero=True,
    )


def _responses(run: RunData, stages: Sequence[Row]) -> Iterable[Chart]:
    def steps(label: str, color: str, name: str) -> Series:
        return Series(label, color, "stage", _column(stages, name), draw="step")

    yield Chart(
        "length",
        "Response length",
        "Tokens per response, by stage.",
        [steps("longest", "orange", "response_length_max"), steps("mean", "blue", "response_length_mean")],
        format="tokens",
        zero=True,
    )
    yield Chart(
        "groups",
        "Groups without signal, responses cut short",
        "Groups whose responses all got one reward carry no gradient; cut responses hit the length limit.",
        [
            steps("zero-variance groups", "magenta", "zero_variance_fraction"),
            steps("cut short", "yellow", "truncated_fraction"),
        ],
        format="percent",
        zero=True,
    )
    yield Chart(
        "mismatch",
        "Engine against learner",
        "|log π_engine − log π_learner| per token under the same weights, in nats.",
        [
            steps("max", "red", "mismatch_max"),
            steps("p99", "orange", "mismatch_p99"),
            steps("mean", "blue", "mismatch_mean"),
        ],
        scale="log",
    )
    rates = {
        (row["phase"], row["stage"]): row["tokens"] / (row["end"] - row["start"])
        for row in run.phases
        if "tokens" in row
    }
    yield Chart(
        "throughput",
        "Throughput",
        "Response tokens per second of generation and of optimization, by stage.",
        [
            Series(label, color, "stage", [rates.get((phase, row["stage"])) for row in stages], draw="step")
            for label, color, phase in (("sampled", "blue", "generate"), ("trained", "teal", "optimize"))
        ],
        zero=True,
    )


def _by_age(run: RunData, metric: str, title: str, explains: str, color: str) -> Chart:
    """A metric against age: a curve for each of a few stages, median and 10-90 % band of many."""
    curves = [
        {row["age"]: row.get(metric) for row in rows} for _, rows in groupby(run.updates, key=itemgetter("stage"))
    ]
    ages = range(1 + max(row["age"] for row in run.updates))
    if len(curves) <= MAX_LINES_BY_AGE:
        series = [
            Series(
                f"stage {place + 1}",
                f"ramp-{round(7 * place / max(len(curves) - 1, 1))}",
                "age",
                [c.get(a) for a in ages],
            )
            for place, c in enumerate(curves)
        ]
    else:
        spread = [sorted(v for c in curves if (v := c.get(age)) is not None) for age in ages]
        series = [
            Series(
                f"median of {len(curves):,} stages",
                color,
                "age",
                [statistics.median(values) if values else None for values in spread],
                low=[values[len(values) // 10] if values else None for values in spread],
                high=[values[9 * len(values) // 10] if values else None for values in spread],
            )
        ]
    return Chart(f"{metric}_by_age", title, explains, series, format="percent", along="age", zero=metric != "ess")


def _over_updates(
    buckets: Sequence[Sequence[Row]],
    label: str,
    color: str,
    metric: str,
    *,
    smooth: bool = False,
    anew: bool = False,
    reduce: Callable[[Sequence[float]], float] = statistics.fmean,
) -> Series:
    found = [[value for row in rows if (value := row.get(metric)) is not None] for rows in buckets]
    return Series(label, color, "update", [_rounded(reduce(v)) if v else None for v in found], smooth=smooth, anew=anew)


def _column(rows: Iterable[Row], metric: str) -> Values:
    return [None if (value := row.get(metric)) is None else _rounded(value) for row in rows]


def _rounded(value: float) -> float:
    """Six significant digits: what a screen can show, in a third of the bytes."""
    return float(f"{value:.6g}")


def _has_values(values: Values) -> bool:
    return any(value is not None for value in values)


def _within_unit(values: Values) -> bool:
    return all(value is None or 0 <= value <= 1 for value in values)


def _spread(values: Values) -> float:
    """Largest over median of the positive values; 1 where there are none."""
    positive = [value for value in values if value is not None and value > 0]
    return max(positive) / statistics.median(positive) if positive else 1.0
