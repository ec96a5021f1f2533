"""The study's primary contrasts, and what the kept results say of each."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from run_scripts.study.results import (
    Mean,
    Results,
    differences,
    holm,
    mean_of,
    plain,
    points,
    sign_flip,
    student_tail,
)

LEVEL = 0.05
"""Of all contrasts of a family together."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """The claim that `left` minus `right` is above `bound`, in one block."""

    claim: str
    block: str
    left: str | None
    """None while the tuning seed has not chosen the method."""
    right: str
    bound: float = 0.0
    column: str = "after"
    family: str = "one"
    """The part of the plan that it belongs to; p values are corrected inside a family."""


PART_ONE = (
    Contrast("on one stage of 512 updates, mu-GRPO ends above GRPO's clip", "tuned", "veto", "strict"),
    Contrast("on one stage of 512, mu-GRPO ends less than 1 point below GRPO with µ=4", "tuned", "veto", "grpo", -0.01),
    Contrast("at the hot rate, mu-GRPO ends above the relaxed clip without a veto", "hot_pair", "veto", "none"),
    Contrast(
        "at the hot rate, E[ρ given A < 0] over the last 64 updates is higher with the veto than without it",
        "hot_pair",
        "veto",
        "none",
        0.0,
        "ratio_neg_late",
    ),
)
"""Those of docs/study/plan.md, in its order."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the kept cells say of a contrast."""

    contrast: Contrast
    values: list[float]
    """left - right, seed by seed."""
    p: float | None
    """Corrected for the family's contrasts; None until every one of them has all its seeds."""
    starts: list[float]
    """The mean of `values` over the seeds of each warm start: seeds that share one are not independent."""
    p_starts: float | None
    """Student's t over `starts`, corrected as `p` is; None where it cannot be computed."""

    @property
    def measured(self) -> str:
        """The mean difference over seeds with its interval, in points where it is one of accuracies."""
        return self._written(self.values)

    @property
    def measured_by_start(self) -> str:
        """The same over warm starts."""
        return self._written(self.starts)

    @property
    def opposite(self) -> bool:
        """Whether all of the interval over warm starts lies below the bound, where the claim says above."""
        gap = mean_of(self.starts) if self.starts else None
        return gap is not None and gap.half is not None and gap.value + gap.half < self.contrast.bound

    @property
    def depends_on_seeds(self) -> bool:
        """Whether the claim holds over seeds, but not over warm starts."""
        return self.verdict == "holds" and not (self.p_starts is not None and self.p_starts < LEVEL)

    @property
    def verdict(self) -> str:
        """It is "open" before all seeds of the family have run; afterwards the corrected test decides."""
        if self.p is None:
            return "open"
        return "holds" if self.p < LEVEL else "not shown"

    def _written(self, values: Sequence[float]) -> str:
        gap: Mean | None = mean_of(values) if values else None
        return f"{points(gap, 1)} points" if gap and self.contrast.column == "after" else plain(gap)


def part_two(results: Results) -> Contrast:
    """The contrast of the schedule that the tuning seed has chosen."""
    chosen = results.chosen("schedule")
    title = results.grid.methods[chosen].title if chosen else "the best schedule"
    claim = f"with {title}, mu-GRPO ends less than 1 point below GRPO with µ=4"
    return Contrast(claim, "schedule", chosen, "grpo", -0.01, family="two")


def findings(results: Results) -> list[Finding]:
    """All primary contrasts on the seeds that both sides have."""
    return [*_of_family(results, PART_ONE), *_of_family(results, [part_two(results)])]


def _of_family(results: Results, contrasts: Sequence[Contrast]) -> list[Finding]:
    """The family's findings; p values only when all of them are complete."""
    values = [_values(results, one) for one in contrasts]
    starts = [_by_start(results, one) for one in contrasts]
    ps: list[float | None] = [None] * len(contrasts)
    tails = ps
    if all(len(each) == results.grid.seeds for each in values):
        ps = [*holm([sign_flip(each, one.bound) for one, each in zip(contrasts, values, strict=True)])]
        own = [student_tail(each, one.bound) for one, each in zip(contrasts, starts, strict=True)]
        tails = [*holm([1.0 if one is None else one for one in own])]
        tails = [None if one is None else tail for one, tail in zip(own, tails, strict=True)]
    return [Finding(*each) for each in zip(contrasts, values, ps, starts, tails, strict=True)]


def _values(results: Results, contrast: Contrast) -> list[float]:
    if contrast.left is None:
        return []
    left, right = (results.column(contrast.block, name, contrast.column) for name in (contrast.left, contrast.right))
    return differences(left, right)


def _by_start(results: Results, contrast: Contrast) -> list[float]:
    """The mean difference over the seeds of each warm start."""
    if contrast.left is None:
        return []
    left, right = (results.column(contrast.block, name, contrast.column) for name in (contrast.left, contrast.right))
    starts = results.starts(contrast.block, contrast.left)
    groups: dict[tuple[int, float], list[float]] = defaultdict(list)
    for seed in sorted(left.keys() & right.keys()):
        groups[starts[seed]].append(left[seed] - right[seed])
    return [statistics.fmean(group) for group in groups.values()]
