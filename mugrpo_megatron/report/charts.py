"""The table of all charts on a run's page, and the functions that fill it with a run's values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

from mugrpo_megatron.algorithm.surrogates import LOG_RATIO_LIMIT
from mugrpo_megatron.observe.log import Row
from mugrpo_megatron.observe.results import measure_in, sets_in
from mugrpo_megatron.observe.rundata import RunData
from mugrpo_megatron.recipe.scoring import MATH
from mugrpo_megatron.report import probes
from mugrpo_megatron.report.curves import (
    BINS,
    Chart,
    Series,
    ages_of,
    by_age,
    column,
    each_set,
    has_values,
    held_out,
    length_series,
    over_updates,
    pass_series,
    ramp,
    reward_series,
    rounded,
    spread,
)
from mugrpo_megatron.report.details import Details
from mugrpo_megatron.report.triggers import Thresholds, ratio_text, scope_series, threshold_series

MAX_LINES_BY_AGE = 8
"""Most stages for which each has its own curve over age. More stages are drawn as their median and a band."""

LEARNING, SAMPLES, VETO, HEALTH = "Learning", "Samples", "The veto, token by token", "Off-policy health"
TRIGGERS, PAPER, OPTIMIZATION = "Triggers by threshold", "The paper's figures", "Optimization"
RESPONSES, EPISODES, COST = "Responses", "Episodes", "Time and memory"
SECTIONS = (LEARNING, SAMPLES, HEALTH, OPTIMIZATION, RESPONSES, EPISODES, VETO, TRIGGERS, PAPER, COST)
"""The page's sections with charts, in order."""


@dataclass(frozen=True, slots=True)
class ChartData:
    run: RunData
    buckets: Sequence[Sequence[Row]]
    """For each point of a curve over updates, the rows of the consecutive updates that it stands for."""
    stages: Sequence[Row]
    """The rows of the stages that have a point on the axis `stage`."""
    details: Details
    probed: Sequence[probes.ProbedResponse]
    thresholds: Thresholds

    @property
    def ages(self) -> list[list[Row]]:
        """For each point of the axis `age`, the rows of its updates. Empty for a single stage, whose ages are its
        updates."""
        updates = self.run.updates
        several = updates and updates[0]["stage"] < updates[-1]["stage"]
        return by_age(updates, ages_of(updates)) if several else []

    @property
    def words(self) -> dict[str, str]:
        """Placeholder -> the run's word for it, in titles and explanations of charts."""
        run, recipe, names = self.run, self.run.recipe, self.thresholds.names
        negative = [response for response in self.probed if response.negative]
        stages = len({response.stage for response in negative})
        evaluation = recipe.get("eval", {})
        temperatures = [
            evaluation,
            *(section for section in evaluation.get("sets", {}).values() if "temperature" in section),
        ]
        return {
            "measure": measure_in(run.evals),
            "sets": " of each set, and their unweighted mean" if len(sets_in(run.evals)) > 1 else "",
            "held_out_at": _at_temperature(temperatures),
            "trained_at": _at_temperature([recipe.get("rollout", {})]),
            "nearest": self.thresholds.label(self.thresholds.nearest) if names else "",
            "negative": f"{len(negative)} negative responses of {stages} stage{'s' if stages > 1 else ''}",
        }


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """A row of TABLE: the description of a chart, without a run's values."""

    section: str
    id: str
    title: str
    curves: Sequence[tuple[str, str, str]] | Callable[[ChartData], Iterable[Series]]
    """(metric, label, colour) of each curve, or a function that computes the series."""
    explains: str
    over: str = "update"
    """The kind of rows that have the metric: `update` or `stage`."""
    rule: float | str | None = None
    """The height of a dashed horizontal line, or the recipe key that sets it; None for no line."""
    rule_label: str = ""
    smooth: bool = False
    restarts: bool = False
    looks: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of `Chart`. Two further values are allowed: "measure" for `format` is per cent for accuracies,
    and "as spread" for `scale` is logarithmic if a few values are much larger than the others."""


PERCENT: dict[str, Any] = {"format": "percent", "zero": True}
LOG_PERCENT = PERCENT | {"scale": "log"}
LOG: dict[str, Any] = {"scale": "log", "unit": "π/β"}
ZEROS = "Lines are moving averages of the faint values. Below the smallest one, the log axis is linear down to 0."


def charts(data: ChartData) -> list[Chart]:
    """The charts of the table that have a value in this run, in the table's order."""
    words = data.words
    filled = (_filled(spec, data, words) for spec in TABLE)
    return [chart for chart in filled if chart.series]


def section_of(id: str) -> str:
    return next(spec.section for spec in TABLE if spec.id == id)


def _filled(spec: ChartSpec, data: ChartData, words: dict[str, str]) -> Chart:
    if callable(spec.curves):
        series = list(spec.curves(data))
    else:
        series = [_series(spec, data, *curve) for curve in spec.curves]
    # `or None`: a line at 0 is left out, since a log axis has no 0.
    rule = data.run.setting(spec.rule) or None if isinstance(spec.rule, str) else spec.rule
    looks = dict(spec.looks)
    if looks.get("format") == "measure":
        looks["format"] = "percent" if words["measure"] == "accuracy" else "number"
    if looks.get("scale") == "as spread":
        looks["scale"] = "log" if spread(series[0].y) > 30 else "linear"
    return Chart(
        spec.id,
        spec.title.format_map(words),
        spec.explains.format_map(words),
        [curve for curve in series if has_values(curve.y)],
        rule=rule,
        rule_label=spec.rule_label,
        **looks,
    )


def _series(spec: ChartSpec, data: ChartData, metric: str, label: str, color: str) -> Series:
    if spec.over == "stage":
        return Series(label, color, "stage", column(data.stages, metric), draw="step")
    values = over_updates(data.buckets, metric)
    return Series(label, color, "update", values, smooth=spec.smooth, restarts=spec.restarts)


def _at_temperature(sections: Iterable[dict[str, Any]]) -> str:
    values = sorted({section["temperature"] for section in sections if section.get("temperature") is not None})
    if not values:
        return "as the recipe says"
    return "greedily" if values == [0] else f"at temperature {' and '.join(f'{value:g}' for value in values)}"


# ---------------------------------------------------------------- series that take more than a list of metrics


def _reward(data: ChartData) -> Iterable[Series]:
    values = over_updates(data.buckets, "reward_mean")
    if has_values(values):
        yield Series("training reward", "orange", "update", values, smooth=True, restarts=True)
    else:
        yield Series("stage mean", "orange", "stage", column(data.stages, "reward_mean"), draw="step")


def _unparsed(data: ChartData) -> Iterable[Series]:
    """Curves of the fraction of responses without an answer, in training and in each held-out set; none unless `math`
    is the only reward function."""
    reward, stages = data.run.recipe.get("reward", {}), data.details.stages
    if reward.get("function", MATH) != MATH or reward.get("functions"):
        return
    shares = [stages[row["stage"]].unparsed if row["stage"] in stages else None for row in data.stages]
    values = [None if share is None else rounded(share) for share in shares]
    yield Series("training, by stage", "orange", "stage", values, draw="step")
    yield from each_set(data.run.evals, "unparsed", "{set}, held out")


def _called(data: ChartData) -> Iterable[Series]:
    values = over_updates(data.buckets, "reward/episode.called")
    yield Series("training", "orange", "update", values, smooth=True)
    yield from each_set(data.run.evals, "called", "{set}, held out")


def _by_phase(
    data: ChartData, value: Callable[[Sequence[Row]], float | None], generate: str, optimize: str
) -> Iterable[Series]:
    """A curve over stages for generation and one for optimization; `value` computes a point from the rows of one phase.

    A phase has several rows if an evaluation or a resume interrupted it.
    """
    parts: dict[tuple[str, int], list[Row]] = {}
    for row in data.run.phases:
        parts.setdefault((row["phase"], row["stage"]), []).append(row)
    for phase, label, color in (("generate", generate, "blue"), ("optimize", optimize, "teal")):
        values = [value(parts.get((phase, row["stage"]), ())) for row in data.stages]
        yield Series(label, color, "stage", values, draw="step")


def _rate(parts: Sequence[Row]) -> float | None:
    """Tokens per second of a phase in one stage, from the phase's rows; None if no row has tokens."""
    timed = [row for row in parts if row.get("tokens") is not None and row["end"] > row["start"]]
    seconds = sum(row["end"] - row["start"] for row in timed)
    return rounded(sum(row["tokens"] for row in timed) / seconds) if timed else None


def _largest(parts: Sequence[Row]) -> float | None:
    """The most memory in GiB that a phase took in one stage, from the phase's rows; None if no row has any."""
    keys = ("learner_memory_peak", "engine_memory")
    return max((rounded(row[key] / 2**30) for row in parts for key in keys if row.get(key)), default=None)


def _each_stage(data: ChartData, metric: str, color: str) -> Iterable[Series]:
    """Curves of a metric over age: one for each stage, or for more than MAX_LINES_BY_AGE stages the median with a band
    from 10 to 90 %. None for a single stage, and if every stage has a single update."""
    if not data.ages or not any(row["age"] for row in data.run.updates):
        return
    ages = ages_of(data.run.updates)
    curves = [
        (number, over_updates(by_age(list(rows), ages), metric))
        for number, rows in groupby(data.run.updates, key=itemgetter("stage"))
    ]
    if len(curves) <= MAX_LINES_BY_AGE:
        for index, (number, values) in enumerate(curves):
            yield Series(f"stage {number}", ramp(index, len(curves)), "age", values)
        return
    columns = [sorted(v for v in values if v is not None) for values in zip(*(y for _, y in curves), strict=True)]
    yield Series(
        f"median of {len(curves):,} stages",
        color,
        "age",
        [statistics.median(values) if values else None for values in columns],
        low=[values[len(values) // 10] if values else None for values in columns],
        high=[values[9 * len(values) // 10] if values else None for values in columns],
    )


def _thresholds(data: ChartData, metric: str, axis: str) -> Iterable[Series]:
    buckets = data.ages if axis == "age" else data.buckets
    if not buckets:
        return ()
    if metric == "dropped":
        return scope_series(data.thresholds, buckets, axis)
    return threshold_series(data.thresholds, buckets, metric, axis)


def _triggers(axis: str) -> tuple[ChartSpec, ...]:
    """The rows of TABLE for three charts along `axis`: the tokens and the responses in which each threshold finds a
    trigger, and the tokens that each scope of the veto would drop."""
    looks = LOG_PERCENT | ({"along": "age"} if axis == "age" else {})
    suffix, by = ("_by_age", " by age") if axis == "age" else ("", "")
    ends = f"{' Mean over stages.' if axis == 'age' else ''} {ZEROS}"
    return tuple(
        ChartSpec(TRIGGERS, f"{id}{suffix}", title, partial(_thresholds, metric=metric, axis=axis), says + ends,
                  looks=looks)
        for id, metric, title, says in (
            ("trigger_tokens", "trigger_tokens", f"Trigger tokens{by}",
             "Negative tokens with a ratio below each threshold, as a share of all of them."),
            ("trigger_responses", "trigger_responses", f"Responses with a trigger{by}",
             "Negative responses with at least one trigger, as a share of all of them."),
            ("dropped_by_scope", "dropped", f"Dropped by each scope{by}, at {{nearest}}",
             "Share of all response tokens that each scope of the veto would drop."),
        )
    )  # fmt: skip


# ---------------------------------------------------------------- the table

TABLE: tuple[ChartSpec, ...] = (
    ChartSpec(LEARNING, "accuracy", "Held-out {measure}", lambda m: held_out(m.run.evals),
         "Held-out {measure}{sets}, with its 95 % interval. Responses are sampled {held_out_at}.",
         looks={"format": "measure"}),
    ChartSpec(LEARNING, "reward", "Training reward", _reward,
         "Mean reward of each update's responses, sampled {trained_at} when their stage began: other problems and "
         "other sampling than the held-out figures, so the two levels differ."),
    ChartSpec(LEARNING, "passed", "Held-out pass@k", lambda m: each_set(m.run.evals, "passed", "{set}, k = {samples}"),
         "Share of each set's problems with at least one right response among the k sampled.", looks=PERCENT),

    ChartSpec(HEALTH, "dropped", "Tokens vetoed and clipped",
         (("vetoed_fraction", "vetoed", "red"), ("clipped_fraction", "clipped", "blue")),
         "Shares of response tokens: dropped by the veto or another mask, and clipped.", restarts=True, looks=PERCENT),
    ChartSpec(HEALTH, "ratio_neg", "Importance ratio, negative advantage",
         (("ratio_neg_max", "max", "red"), ("ratio_neg_p99", "p99", "orange"), ("ratio_neg_mean", "mean", "blue")),
         "π/β of tokens in responses with negative advantage; 1 on policy.",
         rule="objective.clip_high", rule_label="clip", restarts=True, looks=LOG),
    ChartSpec(HEALTH, "ess", "Effective sample size", (("ess", "ESS", "teal"),),
         "(Σr)² / TΣr² of the token ratios; 1 on policy. It falls as the data become stale.",
         restarts=True, looks={"format": "percent"}),
    ChartSpec(HEALTH, "kl", "KL from the sampling policy", (("kl_k3", "k3", "violet"), ("kl_k1", "k1", "orange")),
         "KL(β‖π) per token: k3 = r − 1 − log r, k1 = −log r.", restarts=True, looks={"unit": "nats"}),
    ChartSpec(HEALTH, "ess_by_age", "ESS by age", partial(_each_stage, metric="ess", color="teal"),
         "Effective sample size against the age of the data in updates.", looks={"format": "percent", "along": "age"}),
    ChartSpec(HEALTH, "vetoed_fraction_by_age", "Vetoed by age",
         partial(_each_stage, metric="vetoed_fraction", color="red"),
         "Tokens vetoed against the age of the data in updates.", looks=PERCENT | {"along": "age"}),

    ChartSpec(OPTIMIZATION, "grad_norm", "Gradient norm", (("grad_norm", "gradient norm", "blue"),),
         "Global norm before clipping.", rule="optimizer.clip_grad", rule_label="clip_grad", smooth=True,
         looks={"zero": True, "scale": "as spread"}),
    ChartSpec(OPTIMIZATION, "entropy", "Entropy", (("entropy", "entropy", "teal"),),
         "Mean entropy of the next-token distribution at response tokens, in nats.", smooth=True,
         looks={"unit": "nats"}),
    ChartSpec(OPTIMIZATION, "loss", "Loss", (("loss", "loss", "violet"),),
         "The loss that an update minimises. Watch its jumps, not its level.", smooth=True),
    ChartSpec(OPTIMIZATION, "lr", "Learning rate", (("lr", "lr", "yellow"),), "Learning rate of each update.",
         looks={"zero": True}),

    ChartSpec(RESPONSES, "rewards", "Rewards", lambda m: reward_series(m.details.stages),
         "Share of each stage's responses by reward.", looks=PERCENT | {"along": "reward"}),
    ChartSpec(RESPONSES, "lengths", "Response lengths", lambda m: length_series(m.details.stages),
         f"Share of each stage's responses by length, in {BINS} equal parts; of a long stage 16 updates are "
         "counted.", looks=PERCENT | {"along": "length"}),
    ChartSpec(RESPONSES, "pass_at_k", "pass@k of the training groups",
         lambda m: pass_series(m.details.stages, [row["stage"] for row in m.stages]),
         "Chance that k responses to a problem of the stage have one with a reward of 1 or more.", looks=PERCENT),
    ChartSpec(RESPONSES, "unparsed", "No answer found", _unparsed,
         "Share of responses from which no answer could be extracted.", looks=PERCENT),
    ChartSpec(RESPONSES, "length", "Response length",
         (("response_length_max", "longest", "orange"), ("response_length_mean", "mean", "blue")),
         "Tokens per response, by stage.", over="stage", looks={"format": "tokens", "zero": True, "unit": "tokens"}),
    ChartSpec(RESPONSES, "groups", "Groups without signal, truncated responses",
         (("zero_variance_fraction", "zero-variance groups", "magenta"), ("truncated_fraction", "truncated", "yellow")),
         "Zero-variance groups have equal rewards and no gradient; truncated responses reached the length limit.",
         over="stage", looks=PERCENT),
    ChartSpec(RESPONSES, "mismatch", "Engine against learner",
         (("mismatch_max", "max", "red"), ("mismatch_p99", "p99", "orange"), ("mismatch_mean", "mean", "blue")),
         "|log π_engine − log π_learner| per token with the same weights, in nats.", over="stage",
         looks={"scale": "log", "unit": "nats"}),

    ChartSpec(EPISODES, "called", "Episodes with a call", _called,
         "Share of the responses in which the model called a tool: of each update's, and of the held-out ones.",
         looks=PERCENT),
    ChartSpec(EPISODES, "turns", "Turns and calls",
         (("reward/episode.turns", "turns", "blue"), ("reward/episode.calls", "calls", "teal")),
         "Turns of the model and calls of tools, mean of each update's episodes.", smooth=True, looks={"zero": True}),
    ChartSpec(EPISODES, "failures", "Failures",
         (("reward/episode.failed_calls", "failed calls", "yellow"), ("reward/episode.retries", "retries", "orange"),
          ("reward/episode.lost", "episodes dropped", "red")),
         "For each episode: calls that raised, restarts, and the share of its group that was dropped.", smooth=True,
         looks={"zero": True}),
    ChartSpec(EPISODES, "tool_seconds", "Waiting for tools", (("reward/episode.tool_seconds", "seconds", "violet"),),
         "Seconds that an episode waited for the user's function and its tools, while the engine worked on others.",
         smooth=True, looks={"zero": True, "unit": "s"}),

    ChartSpec(VETO, "atlas_ratio", "Ratio by age", lambda m: probes.ratio_series(m.probed),
         "Quantiles of π/β over the tokens of {negative}, the same ones at every age.",
         rule="objective.trigger_ratio", rule_label="trigger_ratio", looks=LOG | {"along": "age"}),
    ChartSpec(VETO, "atlas_trained", "Before and after training on it", lambda m: probes.trained_series(m.probed),
         "10 % quantile of π/β over tokens of responses on which the stage has trained, and of those whose "
         "update is still to come: what the objective pushed down, and what moved with it.",
         rule=1.0, rule_label="on policy", looks=LOG | {"along": "age"}),
    ChartSpec(VETO, "atlas_triggers", "Responses with a trigger by threshold",
         lambda m: probes.share_series(m.probed),
         "Share of {negative} with a token below each threshold.", looks=PERCENT | {"along": "age"}),
    ChartSpec(VETO, "atlas_first", "First trigger against length", lambda m: probes.first_series(m.probed),
         "Position of the first token below each threshold, at each stage's last probe, against the response's length.",
         looks={"format": "tokens", "zero": True, "along": "length", "unit": "token"}),

    *_triggers("age"),
    *_triggers("update"),
    ChartSpec(TRIGGERS, "ratio_neg_min", "Smallest importance ratio, negative advantage",
         (("ratio_neg_min", "smallest", "blue"),),
         "The lowest π/β of a token with negative advantage in each update: a threshold below it finds no trigger. "
         f"Log-ratios are clamped at −{LOG_RATIO_LIMIT:g}, ratios at {ratio_text(math.exp(-LOG_RATIO_LIMIT))}.",
         rule="objective.trigger_ratio", rule_label="trigger_ratio", restarts=True, looks={"scale": "log"}),

    ChartSpec(PAPER, "paper_accuracy", "Figures 1, 2 and 3: average {measure}", lambda m: held_out(m.run.evals),
         "Unweighted mean of the held-out sets with its 95 % interval: over wall-clock Figure 1, over updates Figures "
         "2 and 3.", looks={"wide": True, "format": "measure"}),
    ChartSpec(PAPER, "paper_clipping", "Figure 2: token clipping rate",
         (("clipped_fraction", "token clipping rate", "blue"),),
         "Share of response tokens whose gradient the clip removes; a fraction, as on the paper's axis.",
         restarts=True, looks={"zero": True}),
    ChartSpec(PAPER, "paper_ratio", "Figure 3: E[ρ_t | A_t < 0]", (("ratio_neg_mean", "E[ρ_t | A_t < 0]", "violet"),),
         "Mean importance ratio of tokens with negative advantage, vetoed ones included. In the paper it stays at 1 in "
         "stable runs and falls in runs that collapse.", rule=1.0, rule_label="on policy", restarts=True,
         looks={"zero": True}),
    ChartSpec(PAPER, "paper_reward", "Figure 5: average reward", (("reward_mean", "average reward", "orange"),),
         "Mean reward of the responses that each update trains on; they were sampled when their stage began.",
         smooth=True, restarts=True),
    ChartSpec(PAPER, "paper_vetoed", "Figure 6: vetoed fraction", (("vetoed_fraction", "vetoed fraction", "red"),),
         "Share of response tokens that the veto removes; a fraction, as on the paper's axis.", restarts=True,
         looks={"zero": True}),

    ChartSpec(COST, "throughput", "Throughput",
         partial(_by_phase, value=_rate, generate="sampled", optimize="trained"),
         "Response tokens per second in generation and in optimization, by stage.",
         looks={"zero": True, "unit": "tokens/s"}),
    ChartSpec(COST, "memory", "Memory",
         partial(_by_phase, value=_largest, generate="engine", optimize="learner"),
         "Most memory that a rank's learner and an engine took in each stage: device memory on CUDA, else the "
         "processes' own.", looks={"zero": True, "unit": "GiB"}),
)  # fmt: skip
"""Charts in the order of the page, grouped by section."""
