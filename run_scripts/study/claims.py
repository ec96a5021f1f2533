"""The paper's claims against the results: one row a claim and setting, and no verdict beyond what intervals say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from run_scripts.study.results import CLOCK, COMPARED, CPU, RESTART, WALL, Results
from run_scripts.study.stats import Mean, difference, mean_of
from run_scripts.study.tables import markdown, points, same_accuracy

PAPERS_SPEEDUP = 2.2
TOLERANCE = -0.01
"""mu-GRPO may end a point below GRPO."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Variants that share a budget: three clips on stale responses, and GRPO on fresh ones."""

    title: str
    mu_grpo: str
    relaxed: str
    strict: str
    grpo: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A claim that `left` ends above `right`, or short of it by no more than `bound` < 0."""

    claim: str
    setting: str
    left: str
    right: str
    bound: float = 0.0


SETTINGS = (
    Setting("4 stages of 32", "mu_grpo", "relaxed", "strict", "grpo"),
    Setting("1 stage of 128", "mu_128", "relaxed_128", "strict_128", "grpo"),
    Setting("4 stages of 128", "long_mu_grpo", "long_relaxed", "long_strict", "long_grpo"),
)

COLLAPSES = (*SETTINGS, Setting("1 stage of 128, veto `suffix`", "scope_suffix", "relaxed_128", "strict_128", "grpo"))

PAPERS = (
    *(
        Comparison("mu-GRPO ends within 1 point of GRPO or above", one.title, one.mu_grpo, one.grpo, TOLERANCE)
        for one in SETTINGS
    ),
    *(Comparison("mu-GRPO ends above the strict clip", one.title, one.mu_grpo, one.strict) for one in SETTINGS),
)

BEYOND = (
    Comparison("stages that end at ESS < 0.4 end above fixed ones", "2 stages of 64", "adaptive", "mu_064"),
    Comparison("leaving out groups of equal rewards ends above", "1 stage of 128", "leave_out", "mu_128"),
    Comparison("leaving out groups of equal rewards ends above", "1 stage of 96", "fewer_leave_out", "fewer_mu_grpo"),
    Comparison(
        "96 updates without such groups end within 1 point of 128 with them",
        "1 stage",
        "fewer_leave_out",
        "mu_128",
        TOLERANCE,
    ),
)


def claims_table(results: Results, before: float) -> str:
    """What is claimed, what each setting shows, and what that decides; `before`: the warm start's accuracy."""
    known = results.grid.variants()
    rows = [_compared(results, one) for one in PAPERS if one.left in known]
    rows += [
        (
            "relaxed clip without veto collapses where the veto does not",
            one.title,
            *collapse(results, one, before),
        )
        for one in COLLAPSES
        if one.mu_grpo in known
    ]
    for kind, title in ((CLOCK, SETTINGS[0].title), (RESTART, f"{SETTINGS[0].title}, engine ended between stages")):
        if kind == CLOCK or results.of_kind(kind):
            factors = speedups(results, kind)
            runs = min(len(results.timed(name, kind)) for name in COMPARED)
            measured = (
                f"{_times(factors['wall'])} in wall-clock, {_times(factors['cpu'])} in processor time, runs: {runs}"
            )
            decided = speed_verdict(factors, clocked=bool(results.of_kind(kind)))
            rows.append(("2.2 times less wall-clock to the same accuracy", title, measured, decided))
    rows += [_compared(results, one) for one in BEYOND if one.left in known]
    return markdown(("Claim", "Setting", "Measured", "Verdict"), rows)


def _compared(results: Results, one: Comparison) -> tuple[str, ...]:
    gap = difference(results.by_seed(one.left), results.by_seed(one.right))
    return one.claim, one.setting, _seeds(gap), verdict(gap, one.bound)


def collapse(results: Results, setting: Setting, before: float) -> tuple[str, str]:
    """What was measured and the verdict: a variant whose mean ends below the warm start has collapsed.

    Means over the seeds that both have, at the lowest rate where they part, else at the highest that both ran at. That
    they part holds when the veto's gain there is above 0 as far as its interval says.
    """
    means = {rate: both for rate in results.grid.all_rates() if (both := _means(results, setting, rate))}
    if not means:
        return "nothing yet", "not measured"
    parted = [rate for rate, (relaxed, vetoed) in means.items() if relaxed < before <= vetoed]
    rate = (parted or [max(means)])[0]
    gain = difference(results.at(setting.mu_grpo, rate), results.at(setting.relaxed, rate))
    relaxed, vetoed = (f"{100 * mean:.1f} %" for mean in means[rate])
    measured = f"at {rate:g}: {relaxed} without, {vetoed} with the veto; {_seeds(gain)}"
    return measured, verdict(gain, 0.0) if parted else "does not show"


def _means(results: Results, setting: Setting, rate: float) -> tuple[float, ...]:
    """Mean accuracies of (relaxed, mu-GRPO) over the seeds that both ran with; empty without any."""
    both = [results.at(name, rate) for name in (setting.relaxed, setting.mu_grpo)]
    shared = both[0].keys() & both[1].keys()
    return tuple(mean_of([one[seed] for seed in sorted(shared)]).value for one in both) if shared else ()


def speedups(results: Results, kind: str = CLOCK) -> dict[str, float | None]:
    """How many times sooner mu-GRPO is at the accuracy that both reach, by `wall` and by `cpu` seconds of `kind`."""
    level = same_accuracy(results)
    return {name: _speedup(results, level, axis, kind) for name, axis in (("wall", WALL), ("cpu", CPU))}


def verdict(apart: Mean | None, bound: float) -> str:
    """Whether a difference is above `bound`, as far as its interval says."""
    if apart is None:
        return "not measured"
    if apart.low is None or apart.high is None:
        return "open (one seed)"
    return "holds" if apart.low >= bound else "does not hold" if apart.high < bound else "open"


def speed_verdict(speedup: Mapping[str, float | None], *, clocked: bool) -> str:
    """Whether wall-clock shows the paper's factor; only runs taken for it can say."""
    wall = speedup["wall"]
    if wall is None:
        return "not measured"
    if not clocked:
        return "open: the machine was shared"
    return "holds" if wall >= PAPERS_SPEEDUP else "does not show at this scale"


def _speedup(results: Results, level: float | None, axis: int, kind: str) -> float | None:
    if level is None:
        return None
    theirs, ours = (results.seconds_to(name, level, axis, kind) for name in COMPARED)
    return mean_of(theirs).value / mean_of(ours).value if ours and theirs else None


def _seeds(gap: Mean | None) -> str:
    return "–" if gap is None else f"{points(gap)} points over {gap.n} seed{'s' if gap.n > 1 else ''}"


def _times(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} times"
