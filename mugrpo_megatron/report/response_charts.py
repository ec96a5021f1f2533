"""Charts of the stages' responses themselves: histograms of rewards and lengths, and pass@k."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mugrpo_megatron.evaluation.estimators import pass_at_k
from mugrpo_megatron.observe.log import Row
from mugrpo_megatron.recipe.scoring import MATH
from mugrpo_megatron.report.curves import Chart, Series, Values, column, rounded
from mugrpo_megatron.report.details import StageResponses
from mugrpo_megatron.report.evaluations import sets_in
from mugrpo_megatron.report.paper_charts import SET_COLORS

BINS = 24
FEW_VALUES = 8
"""With at most so many different rewards each has a bar of its own."""


def response_axes(stages: Mapping[int, StageResponses]) -> dict[str, list[float]]:
    """Positions of the histograms' points."""
    if not stages:
        return {}
    return {"reward": reward_places(stages), "length": _edges(0.0, _longest(stages))[:-1]}


def reward_places(stages: Mapping[int, StageResponses]) -> list[float]:
    """The rewards that occur, if they are few, else the left edges of equal bins."""
    values = np.unique(np.concatenate([stage.rewards for stage in stages.values()]))
    return values.tolist() if len(values) <= FEW_VALUES else _edges(float(values[0]), float(values[-1]))[:-1]


def reward_span(stages: Mapping[int, StageResponses]) -> tuple[float, float]:
    """From where to where the rewards' axis goes: half a bar beyond the first and the last."""
    places = reward_places(stages)
    if len(places) > FEW_VALUES:
        ends = [(float(stage.rewards.min()), float(stage.rewards.max())) for stage in stages.values()]
        return min(low for low, _ in ends), max(high for _, high in ends)
    step = min(np.diff(places), default=1.0)
    return places[0] - 0.6 * step, places[-1] + 0.6 * step


def length_end(stages: Mapping[int, StageResponses]) -> float:
    return _longest(stages)


def response_charts(stages: Mapping[int, StageResponses]) -> Iterable[Chart]:
    """One curve for each stage that was read."""
    if not stages:
        return
    places = reward_places(stages)
    few = len(places) <= FEW_VALUES
    yield Chart(
        "rewards",
        "Rewards",
        "Share of each stage's responses by reward.",
        [
            Series(label, color, "reward", _shares(stage.rewards, places, few), draw="bars" if few else "step")
            for label, color, stage in _curves(stages)
        ],
        format="percent",
        zero=True,
        along="reward",
    )
    edges = _edges(0.0, _longest(stages))
    yield Chart(
        "lengths",
        "Response lengths",
        f"Share of each stage's responses by length, in {BINS} equal parts; of a long stage 16 updates are counted.",
        [
            Series(label, color, "length", _shares(stage.lengths, edges[:-1], few=False), draw="step")
            for label, color, stage in _curves(stages)
        ],
        format="percent",
        zero=True,
        along="length",
    )


def pass_chart(stages: Mapping[int, StageResponses], drawn: Sequence[int]) -> Chart | None:
    """pass@k of the training groups, for the stages that have a point on the page's axis `stage`."""
    sizes = [int(np.bincount(stage.groups).max()) for stage in stages.values()]
    if not sizes:
        return None
    powers = [2**power for power in range(max(sizes).bit_length()) if 2**power <= max(sizes)]
    return Chart(
        "pass_at_k",
        "pass@k of the training groups",
        "Mean over a stage's problems of the chance that k of its responses hold one with a reward of 1 or more.",
        [
            Series(
                f"k = {k}",
                f"ramp-{min(1 + 2 * place, 7)}",
                "stage",
                [_pass(stages[number], k) if number in stages else None for number in drawn],
                draw="step",
            )
            for place, k in enumerate(powers)
        ],
        format="percent",
        zero=True,
    )


def unparsed_chart(
    stages: Mapping[int, StageResponses], drawn: Sequence[int], evals: Sequence[Row], reward: Mapping[str, Any]
) -> Chart | None:
    """Share of responses without an answer, where `math` looks for one: of training, and of each held-out set.

    `reward` is the recipe's section.
    """
    if reward.get("function", MATH) != MATH or reward.get("functions"):
        return None
    shares = [stages[number].unparsed if number in stages else None for number in drawn]
    return Chart(
        "unparsed",
        "No answer found",
        "Share of responses from which no answer could be extracted.",
        [
            Series(
                "training, by stage",
                "orange",
                "stage",
                [None if s is None else rounded(s) for s in shares],
                draw="step",
            ),
            *(
                Series(
                    f"{name}, held out",
                    SET_COLORS[place % len(SET_COLORS)],
                    "eval",
                    column(evals, f"unparsed/{name}"),
                    draw="dots",
                )
                for place, name in enumerate(sets_in(evals))
            ),
        ],
        format="percent",
        zero=True,
    )


def passed_chart(evals: Sequence[Row]) -> Chart | None:
    """pass@k of the held-out sets of which each problem has several responses."""
    names = [name for name in sets_in(evals) if any((row.get(f"samples/{name}") or 0) > 1 for row in evals)]
    if not names:
        return None
    samples = {
        name: next(row[f"samples/{name}"] for row in reversed(evals) if f"samples/{name}" in row) for name in names
    }
    return Chart(
        "passed",
        "Held-out pass@k",
        "Share of each set's problems with at least one right response among the k sampled.",
        [
            Series(
                f"{name}, k = {samples[name]}",
                SET_COLORS[place % len(SET_COLORS)],
                "eval",
                column(evals, f"passed/{name}"),
                draw="dots",
            )
            for place, name in enumerate(names)
        ],
        format="percent",
        zero=True,
    )


def _curves(stages: Mapping[int, StageResponses]) -> Iterable[tuple[str, str, StageResponses]]:
    last = max(len(stages) - 1, 1)
    for place, (number, stage) in enumerate(sorted(stages.items())):
        yield f"stage {number}", f"ramp-{round(7 * place / last)}", stage


def _pass(stage: StageResponses, k: int) -> float | None:
    groups, inverse = np.unique(stage.groups, return_inverse=True)
    sizes, right = np.bincount(inverse), np.bincount(inverse, stage.verdicts >= 1.0)
    if not len(groups) or sizes.min() < k:
        return None
    known = {(int(n), int(c)) for n, c in zip(sizes, right, strict=True)}
    chance = {pair: pass_at_k(*pair, k) for pair in known}
    return rounded(sum(chance[int(n), int(c)] for n, c in zip(sizes, right, strict=True)) / len(groups))


def _shares(values: np.ndarray, places: Sequence[float], few: bool) -> Values:
    """Share of the values at each place, or from each place to the next."""
    at = np.searchsorted(places, values, side="left" if few else "right") - (0 if few else 1)
    counts = np.bincount(np.clip(at, 0, len(places) - 1), minlength=len(places))
    return [rounded(float(count) / max(len(values), 1)) for count in counts]


def _edges(low: float, high: float) -> list[float]:
    return [rounded(low + part * (high - low) / BINS) for part in range(BINS + 1)]


def _longest(stages: Mapping[int, StageResponses]) -> float:
    return max((float(stage.lengths.max(initial=1)) for stage in stages.values()), default=0.0) + 1.0
