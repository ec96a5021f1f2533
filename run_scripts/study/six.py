"""What the kept cells of part six say of claims 6 and 7 and of weights by the prefix (docs/study/part-six.md).

    grid=run_scripts/study/six_small.toml
    python -m run_scripts.study.collect --out DIR/small --grid $grid --docs docs/study/six_small
    python -m run_scripts.study.six

six_large.toml has its csv files in docs/study/six_large, six_prefix.toml in docs/study/six_prefix.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from run_scripts.study.cells import Cell
from run_scripts.study.findings import LEVEL
from run_scripts.study.results import (
    DOCS,
    Mean,
    Results,
    differences,
    holm,
    markdown,
    mean_of,
    percent,
    points,
    read_named,
    scientific,
    sign_flip,
)
from run_scripts.study.tables import level

BOUND = -0.01
"""Both claims: the method ends less than a point below GRPO."""
PREFIX = "six_prefix"
"""The grid of weights by the prefix, on the stages of claim 6."""
PHASES = 8
"""Claim 7 allows so many generation phases in the mean over seeds."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The method of one grid that the claim compares with GRPO."""

    number: int
    grid: str
    method: str


CLAIMS = (Claim(6, "six_small", "stage"), Claim(7, "six_large", "rule"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the cells say of a claim."""

    gaps: Sequence[float]
    """Accuracy of the method minus GRPO's, seed by seed."""
    seeds: int
    """That the plan asks for."""
    phases: Mean | None
    """Generation phases of the method's cells; None without one."""
    p: float | None
    """Corrected for both claims; None until all seeds of both have run."""

    @property
    def reading(self) -> str:
        """`holds`, `not shown`, or `open` while seeds are missing."""
        if self.p is None:
            return "open"
        allowed = self.phases is not None and self.phases.value <= PHASES
        return "holds" if self.p < LEVEL and allowed else "not shown"


def verdicts(results: Mapping[str, Results]) -> list[Verdict]:
    """Of `CLAIMS`, in their order. `results`: name of the grid -> its kept cells."""
    gaps = [_gaps(results[one.grid], one.method) for one in CLAIMS]
    seeds = [len(results[one.grid].grid.blocks[one.method].seeds) for one in CLAIMS]
    complete = all(len(own) == count for own, count in zip(gaps, seeds, strict=True))
    ps: Sequence[float | None] = [None] * len(CLAIMS)
    if complete:
        ps = holm([sign_flip(own, BOUND) for own in gaps])
    phases = [_mean(results[one.grid], one.method, "stages") for one in CLAIMS]
    return [Verdict(*each) for each in zip(gaps, seeds, phases, ps, strict=True)]


def claims_table(found: Sequence[Verdict]) -> str:
    rows = [
        [
            f"{claim.number}: `{claim.method}` minus GRPO",
            points(mean_of(one.gaps) if one.gaps else None, 1),
            f"{len(one.gaps)} of {one.seeds}",
            "–" if one.phases is None else f"{one.phases.value:.1f}",
            "–" if one.p is None else f"{one.p:.3f}",
            one.reading,
        ]
        for claim, one in zip(CLAIMS, found, strict=True)
    ]
    return markdown(("Claim", "Points", "Seeds", "Phases", "p (Holm)", "Verdict"), rows)


def cells_table(results: Results) -> str:
    """Each method of the grid at its tuned rate: accuracy, nats a stage, phases and their seconds, over the seeds."""
    rows = []
    for name, method in results.grid.methods.items():
        columns = ("before", "after", "nats", "stages", "rollout_seconds")
        before, after, nats, stages, seconds = (_mean(results, name, column) for column in columns)
        if before and after:
            figures = ["–" if one is None else f"{one.value:.3g}" for one in (nats, stages, seconds)]
            rate = scientific(results.rate(name, name))
            rows.append([method.title, rate, str(after.n), percent(before), percent(after), *figures])
    head = ("Method", "Rate", "Seeds", "Before %", "After %", "Nats a stage", "Phases", "Their seconds")
    return markdown(head, rows)


def tuning_table(results: Results) -> str:
    """Accuracy after training on the validation problems, rate by rate, the mean over the tuning seeds."""
    grid, outcomes = results.grid, results.outcomes()
    rows = []
    for name in grid.methods:
        for rate in grid.ladder:
            cells = [outcomes.get(Cell(seed, name, rate)) for seed in grid.tuning_seeds]
            ends = [one.after for one in cells if one]
            if ends:
                rows.append([grid.methods[name].title, scientific(rate), str(len(ends)), level(ends)])
    return markdown(("Method", "Rate", "Seeds", "After %"), rows)


def prefix_table(results: Results, base: Results) -> str:
    """Each weight by the prefix minus `base`'s one stage with the veto, on the same stages and at the same rate."""
    stage, rows = base.column("stage", "stage", "after"), []
    for name, method in results.grid.methods.items():
        apart = differences(results.column(name, name, "after"), stage)
        if apart:
            rows.append([method.title, str(len(apart)), points(mean_of(apart), 1)])
    return markdown(("Method", "Seeds", "Minus one stage, points"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the grids' directories are")
    docs = parser.parse_args(arguments).docs
    results = {one.grid: read_named(one.grid, docs) for one in CLAIMS}
    print(claims_table(verdicts(results)))
    for name, own in results.items():
        print(f"\n## {name}\n\n{cells_table(own)}\n\n{tuning_table(own)}")
    print(f"\n## {PREFIX}\n\n{prefix_table(read_named(PREFIX, docs), results[CLAIMS[0].grid])}")


def _gaps(results: Results, method: str) -> list[float]:
    return differences(results.column(method, method, "after"), results.column("grpo", "grpo", "after"))


def _mean(results: Results, method: str, column: str) -> Mean | None:
    """Over the seeds; None without a cell."""
    values = list(results.column(method, method, column).values())
    return mean_of(values) if values else None


if __name__ == "__main__":
    main()
