"""The study's primary contrasts, and what the kept results say of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from run_scripts.study.results import Mean, Results, differences, holm, mean_of, plain, points, sign_flip

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

    @property
    def measured(self) -> str:
        """The mean difference with its interval, in points where it is one of accuracies; `–` without a seed."""
        gap = self._gap
        return f"{points(gap, 1)} points" if gap and self.contrast.column == "after" else plain(gap)

    @property
    def opposite(self) -> bool:
        """Whether all of the interval lies below the bound, where the claim says above."""
        gap = self._gap
        return gap is not None and gap.half is not None and gap.value + gap.half < self.contrast.bound

    @property
    def verdict(self) -> str:
        """It is "open" before all seeds of the family have run; afterwards the corrected test decides."""
        if self.p is None:
            return "open"
        return "holds" if self.p < LEVEL else "not shown"

    @property
    def _gap(self) -> Mean | None:
        return mean_of(self.values) if self.values else None


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
    if any(len(each) < results.grid.seeds for each in values):
        return [Finding(one, each, None) for one, each in zip(contrasts, values, strict=True)]
    ps = holm([sign_flip(each, one.bound) for one, each in zip(contrasts, values, strict=True)])
    return [Finding(*each) for each in zip(contrasts, values, ps, strict=True)]


def _values(results: Results, contrast: Contrast) -> list[float]:
    if contrast.left is None:
        return []
    left, right = (results.column(contrast.block, name, contrast.column) for name in (contrast.left, contrast.right))
    return differences(left, right)
