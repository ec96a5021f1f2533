"""The paper's claims against the results: one row for each claim and setting, no verdict beyond what intervals say.

Comparisons at tuned rates have a verdict. What was looked at after other results were seen (`edge_table`) has none, and
neither has a time that one run a side gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass

from run_scripts.study.results import CLOCK, COMPARED, RESTART, WALL, Results, Row, arrival
from run_scripts.study.stats import Mean, difference, fisher_exact, mean_of
from run_scripts.study.tables import markdown, percent, points, same_accuracy

TOLERANCE = -0.01
"""mu-GRPO may end a point below GRPO. Our margin, chosen after the first cells."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Variants that share a budget: three objectives on stale responses, and GRPO on fresh ones."""

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

PAPERS = (
    *(
        Comparison("mu-GRPO ends within 1 point of GRPO or above", one.title, one.mu_grpo, one.grpo, TOLERANCE)
        for one in SETTINGS
    ),
    *(Comparison("mu-GRPO ends above the strict clip", one.title, one.mu_grpo, one.strict) for one in SETTINGS),
    *(
        Comparison("mu-GRPO ends above the relaxed clip without veto", one.title, one.mu_grpo, one.relaxed)
        for one in SETTINGS
    ),
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


def summary_table(results: Results) -> str:
    """Final accuracy at tuned rates by setting and objective."""
    known = results.grid.variants()
    rows = [
        (one.title, *(percent(results.mean(name)) for name in (one.grpo, one.mu_grpo, one.relaxed, one.strict)))
        for one in SETTINGS
        if one.mu_grpo in known
    ]
    return markdown(("Stages and µ", "GRPO, µ=4", "mu-GRPO", "relaxed clip, no veto", "strict clip"), rows)


def claims_table(results: Results) -> str:
    """Final accuracy at tuned rates: what is claimed, what each setting shows, and what that decides."""
    known = results.grid.variants()
    rows = [_compared(results, one) for one in (*PAPERS, *BEYOND) if one.left in known]
    return markdown(("Claim", "Setting", "Measured", "Verdict"), rows)


def _compared(results: Results, one: Comparison) -> tuple[str, ...]:
    gap = difference(results.by_seed(one.left), results.by_seed(one.right))
    return one.claim, one.setting, _seeds(gap), verdict(gap, one.bound)


def verdict(apart: Mean | None, bound: float) -> str:
    """Whether a difference is above `bound`, as far as its interval says."""
    if apart is None:
        return "not measured"
    if apart.low is None or apart.high is None:
        return "open (one seed)"
    return "holds" if apart.low >= bound else "does not hold" if apart.high < bound else "open"


def edge_table(results: Results, before: float) -> str:
    """Every rate above the tuned ones at which a setting ran with and without the veto; no rate is picked.

    `before`: the warm start's accuracy; a run that ends below it is lost. p is Fisher's exact test, two-sided, of lost
    runs without and with the veto.
    """
    known, rows = results.grid.variants(), []
    for one in SETTINGS:
        for rate in (rate for rate in results.grid.all_rates() if rate > max(results.grid.rates)):
            ends = [results.at(name, rate) for name in (one.relaxed, one.mu_grpo, one.strict) if name in known]
            if len(ends) < 3 or not (ends[0] and ends[1]):
                continue
            lost = [(sum(end < before for end in each.values()), len(each)) for each in ends[:2]]
            shown = [percent(mean_of(list(each.values()))) if each else "–" for each in ends]
            counts = [f"{k} of {n}" for k, n in lost]
            p = f"{fisher_exact(*lost):.2f}" if min(n for _, n in lost) > 1 else "–"
            rows.append((one.title, f"{rate:g}", *shown, *counts, p, points(difference(ends[1], ends[0]))))
    head = ("Setting", "Rate", "No veto %", "With veto %", "Strict clip %")
    return markdown((*head, "Lost, no veto", "Lost, veto", "p", "Veto's gain, points"), rows)


def clock_table(results: Results) -> str:
    """The wall-clock of mu-GRPO against GRPO: for the same updates, and to the accuracy that both reach."""
    rows = []
    level = same_accuracy(results)
    for kind, title in ((CLOCK, "engine sleeps between stages"), (RESTART, "engine ends between stages")):
        runs = [results.timed(name, kind) for name in COMPARED]
        if not all(runs):
            continue
        clocked = bool(results.of_kind(kind))
        whole = [{row["seed"]: row["wall_s"] for row in side} for side in runs]
        rows.append(_timed("the same updates", title, whole, whole, clocked))
        if level is not None:
            rows.append(
                _timed("the same accuracy", title, [_arrivals(results, s, level) for s in runs], whole, clocked)
            )
    return markdown(("Wall-clock of", "Setting", "GRPO / mu-GRPO", "Runs of GRPO, of mu-GRPO", "Verdict"), rows)


def _timed(
    what: str, title: str, seconds: Sequence[Mapping[int, float]], runs: Sequence[Sized], clocked: bool
) -> tuple[str, ...]:
    """A row of `clock_table`: `seconds` by seed of the runs of each side that have any, of all its `runs`."""
    counts = ", ".join(f"{len(found)} of {len(every)}" for found, every in zip(seconds, runs, strict=True))
    if not all(seconds):
        return what, title, "–", counts, "open: a side never gets there"
    theirs, ours = (mean_of(list(found.values())).value for found in seconds)
    complete = all(len(found) == len(every) for found, every in zip(seconds, runs, strict=True))
    decided = speed_verdict(difference(*seconds), clocked=clocked) if complete else "open: not every run gets there"
    return what, title, f"{theirs / ours:.2f}", counts, decided


def _arrivals(results: Results, runs: Sequence[Row], level: float) -> dict[int, float]:
    """Seed -> training seconds until the run first comes up to `level`, for those that do."""
    found = {row["seed"]: arrival(results.curve(row)["evals"], level, WALL) for row in runs}
    return {seed: seconds for seed, seconds in found.items() if seconds is not None}


def speed_verdict(saved: Mean | None, *, clocked: bool) -> str:
    """Whether mu-GRPO takes less time, by the seconds it saves seed by seed; only runs taken for it can say."""
    if saved is None:
        return "not measured"
    if not clocked:
        return "open: the machine was shared"
    if saved.low is None or saved.high is None:
        return "open (one run a side)"
    return "holds" if saved.low > 0 else "does not hold" if saved.high < 0 else "open"


def _seeds(gap: Mean | None) -> str:
    return "–" if gap is None else f"{points(gap, 2)} points over {gap.n} seed{'s' if gap.n > 1 else ''}"
