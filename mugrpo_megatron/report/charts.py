"""The report's charts: metrics of each panel, how they are drawn, and their explanations."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from mugrpo_megatron.observe.log import Row
from mugrpo_megatron.report.atlas import atlas_charts
from mugrpo_megatron.report.curves import Chart, Series, ages_of, by_age, column, has_values, over_updates, spread
from mugrpo_megatron.report.details import Details
from mugrpo_megatron.report.evaluations import measure_in, sets_in
from mugrpo_megatron.report.paper_charts import held_out, paper_charts
from mugrpo_megatron.report.probes import Followed
from mugrpo_megatron.report.response_charts import pass_chart, passed_chart, response_charts, unparsed_chart
from mugrpo_megatron.report.rundata import RunData
from mugrpo_megatron.report.trigger_charts import trigger_charts

MAX_LINES_BY_AGE = 8
"""With more stages than this, curves over age become a median and a band."""


def charts(
    run: RunData, buckets: Sequence[Sequence[Row]], stages: Sequence[Row], details: Details, probed: Sequence[Followed]
) -> list[Chart]:
    """Every chart that has a value; `probed` are the responses that the run followed.

    A point of a curve over updates stands for one of `buckets`, consecutive updates. `stages` are the stage rows. The
    axis of a series is one of the drawing's `axes`.
    """
    every = (
        *_learning(run, buckets, stages),
        *_support(run, buckets),
        *trigger_charts(run, buckets),
        *paper_charts(run, buckets),
        *_optimizer(run, buckets),
        *_responses(run, stages),
        *response_charts(details.stages),
        *atlas_charts(probed, run.recipe.get("objective", {}).get("trigger_ratio")),
    )
    drawn = [row["stage"] for row in stages]
    maybe = (
        pass_chart(details.stages, drawn),
        unparsed_chart(details.stages, drawn, run.evals, run.recipe.get("reward", {})),
        passed_chart(run.evals),
    )
    whole = [*every, *(chart for chart in maybe if chart)]
    filled = (replace(chart, series=[s for s in chart.series if has_values(s.y)]) for chart in whole)
    return [chart for chart in filled if chart.series]


def _learning(run: RunData, buckets: Sequence[Sequence[Row]], stages: Sequence[Row]) -> Iterable[Chart]:
    measure = measure_in(run.evals)
    of = " of each set, and their unweighted mean" if len(sets_in(run.evals)) > 1 else ""
    evaluation = run.recipe.get("eval", {})
    temperatures = {evaluation.get("temperature")}
    temperatures |= {one["temperature"] for one in evaluation.get("sets", {}).values() if "temperature" in one}
    yield Chart(
        "accuracy",
        f"Held-out {measure}",
        f"Held-out {measure}{of}, with its 95 % interval. Responses are sampled {_at_temperature(temperatures)}.",
        held_out(run.evals),
        format="percent" if measure == "accuracy" else "number",
    )
    reward = over_updates(buckets, "training reward", "orange", "reward_mean", smooth=True, restarts=True)
    by_stage = Series("stage mean", "orange", "stage", column(stages, "reward_mean"), draw="step")
    yield Chart(
        "reward",
        "Training reward",
        "Mean reward of each update's responses, sampled "
        f"{_at_temperature({run.recipe.get('rollout', {}).get('temperature')})} when their stage began: other problems "
        "and other sampling than the held-out figures, so the two levels differ.",
        [reward if has_values(reward.y) else by_stage],
    )


def _at_temperature(values: Set[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return "as the recipe says"
    return "greedily" if known == [0] else f"at temperature {' and '.join(f'{value:g}' for value in known)}"


def _support(run: RunData, buckets: Sequence[Sequence[Row]]) -> Iterable[Chart]:
    yield Chart(
        "dropped",
        "Tokens vetoed and clipped",
        "Shares of response tokens: dropped by the veto or another mask, and clipped.",
        [
            over_updates(buckets, "vetoed", "red", "vetoed_fraction", restarts=True),
            over_updates(buckets, "clipped", "blue", "clipped_fraction", restarts=True),
        ],
        format="percent",
        zero=True,
    )
    yield Chart(
        "ratio_neg",
        "Importance ratio, negative advantage",
        "π/β of tokens in responses with negative advantage; 1 on policy.",
        [
            over_updates(buckets, "max", "red", "ratio_neg_max", restarts=True, reduce=max),
            over_updates(buckets, "p99", "orange", "ratio_neg_p99", restarts=True, reduce=max),
            over_updates(buckets, "mean", "blue", "ratio_neg_mean", restarts=True),
        ],
        scale="log",
        rule=run.recipe.get("objective", {}).get("clip_high"),
        rule_label="clip",
        unit="π/β",
    )
    yield Chart(
        "ess",
        "Effective sample size",
        "(Σr)² / TΣr² of the token ratios; 1 on policy. It falls as the data become stale.",
        [over_updates(buckets, "ESS", "teal", "ess", restarts=True, reduce=min)],
        format="percent",
    )
    yield Chart(
        "kl",
        "KL from the sampling policy",
        "KL(β‖π) per token: k3 = r − 1 − log r, k1 = −log r.",
        [
            over_updates(buckets, "k3", "violet", "kl_k3", restarts=True),
            over_updates(buckets, "k1", "orange", "kl_k1", restarts=True),
        ],
        unit="nats",
    )
    if any(row["age"] for row in run.updates) and run.updates[0]["stage"] < run.updates[-1]["stage"]:
        yield _by_age(run, "ess", "ESS by age", "Effective sample size against the age of the data in updates.", "teal")
        yield _by_age(
            run, "vetoed_fraction", "Vetoed by age", "Tokens vetoed against the age of the data in updates.", "red"
        )


def _optimizer(run: RunData, buckets: Sequence[Sequence[Row]]) -> Iterable[Chart]:
    norm = over_updates(buckets, "gradient norm", "blue", "grad_norm", smooth=True)
    yield Chart(
        "grad_norm",
        "Gradient norm",
        "Global norm before clipping.",
        [norm],
        scale="log" if spread(norm.y) > 30 else "linear",
        zero=True,
        rule=run.recipe.get("optimizer", {}).get("clip_grad"),
        rule_label="clip_grad",
    )
    yield Chart(
        "entropy",
        "Entropy",
        "Mean entropy of the next-token distribution at response tokens, in nats.",
        [over_updates(buckets, "entropy", "teal", "entropy", smooth=True)],
        unit="nats",
    )
    yield Chart(
        "loss",
        "Loss",
        "The loss that an update minimises. Watch its jumps, not its level.",
        [over_updates(buckets, "loss", "violet", "loss", smooth=True)],
    )
    yield Chart(
        "lr",
        "Learning rate",
        "Learning rate of each update.",
        [over_updates(buckets, "lr", "yellow", "lr")],
        zero=True,
    )


def _responses(run: RunData, stages: Sequence[Row]) -> Iterable[Chart]:
    def steps(label: str, color: str, name: str) -> Series:
        return Series(label, color, "stage", column(stages, name), draw="step")

    yield Chart(
        "length",
        "Response length",
        "Tokens per response, by stage.",
        [steps("longest", "orange", "response_length_max"), steps("mean", "blue", "response_length_mean")],
        format="tokens",
        zero=True,
        unit="tokens",
    )
    yield Chart(
        "groups",
        "Groups without signal, truncated responses",
        "Zero-variance groups have equal rewards and no gradient; truncated responses reached the length limit.",
        [
            steps("zero-variance groups", "magenta", "zero_variance_fraction"),
            steps("truncated", "yellow", "truncated_fraction"),
        ],
        format="percent",
        zero=True,
    )
    yield Chart(
        "mismatch",
        "Engine against learner",
        "|log π_engine − log π_learner| per token with the same weights, in nats.",
        [
            steps("max", "red", "mismatch_max"),
            steps("p99", "orange", "mismatch_p99"),
            steps("mean", "blue", "mismatch_mean"),
        ],
        scale="log",
        unit="nats",
    )
    rates = _rates(run.phases)
    yield Chart(
        "throughput",
        "Throughput",
        "Response tokens per second in generation and in optimization, by stage.",
        [
            Series(label, color, "stage", [rates.get((phase, row["stage"])) for row in stages], draw="step")
            for label, color, phase in (("sampled", "blue", "generate"), ("trained", "teal", "optimize"))
        ],
        zero=True,
        unit="tokens/s",
    )


def _rates(phases: Sequence[Row]) -> dict[tuple[str, int], float]:
    """Tokens per second of each phase and stage, over all of its parts: evaluations and resumes divide a phase."""
    parts = [row for row in phases if row.get("tokens") is not None and row["end"] > row["start"]]
    tokens, seconds = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for row in parts:
        place = row["phase"], row["stage"]
        tokens[place] += row["tokens"]
        seconds[place] += row["end"] - row["start"]
    return {place: tokens[place] / seconds[place] for place in seconds}


def _by_age(run: RunData, metric: str, title: str, explains: str, color: str) -> Chart:
    """A metric against age: one curve for each stage, or median and 10-90 % band with many stages."""
    ages = ages_of(run.updates)
    curves = [
        over_updates(by_age(list(rows), ages), f"stage {number}", color, metric, axis="age").y
        for number, rows in groupby(run.updates, key=itemgetter("stage"))
    ]
    if len(curves) <= MAX_LINES_BY_AGE:
        series = [
            Series(
                f"stage {place}",
                f"ramp-{round(7 * place / max(len(curves) - 1, 1))}",
                "age",
                curve,
            )
            for place, curve in enumerate(curves)
        ]
    else:
        spread = [sorted(v for v in values if v is not None) for values in zip(*curves, strict=True)]
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
