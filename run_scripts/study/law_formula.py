"""The law as a formula with a 90 % interval, from all kept cells beside GRPO, and claim 8 of docs/study/part-six.md.

    python -m run_scripts.study.law_formula

A stage that moves `n` nats a response, from a policy with a share `e` of wrong responses, costs `e * h * (1 - exp(-n /
s))`: nothing without displacement, and a constant share of the errors in a stage that moves far. `h` and `s` are fitted
by least squares to gap / e. The interval needs no distribution: nine of ten cells lie within it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from run_scripts.study.law import CSV
from run_scripts.study.law_figures import law_rows
from run_scripts.study.results import DOCS, Results, markdown, read_named

SCALES = np.geomspace(0.05, 5.0, 400)
"""Nats that are tried as the formula's scale."""
NO_NATS = np.array([1e-9])
"""The scale of a formula in which nats do not count: every stage costs the same share of the errors."""
COVERAGE = 0.9
"""Share of the cells that the interval holds."""
NEEDED = 3
"""Claim 8 holds if so many of its gaps lie inside their intervals."""
FloatArray = NDArray[np.float64]
FITTED = ("six_small", "six_large")
PREDICTED = ("six_euclid_small", "six_euclid_large")
"""Grids whose gaps are fitted, and those whose gaps claim 8 predicts."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A cell of mu-GRPO, and by how much it ended below GRPO from the same warm start."""

    method: str
    nats: float
    """That its stages moved a response, their mean."""
    errors: float
    """Share of the warm start's sampled responses that were wrong."""
    gap: float | None
    """Difference of sampled accuracies; None until GRPO has run."""


@dataclass(frozen=True, slots=True)
class Law:
    """gap = errors * height * (1 - exp(-nats / scale))."""

    height: float
    scale: float
    half: float
    """Half of the interval, as a share of the warm start's errors."""
    cells: int

    def interval(self, cell: Gap) -> tuple[float, float, float]:
        """Lower end, value and upper end of the cell's predicted gap."""
        value = self.height * -math.expm1(-cell.nats / self.scale)
        low, middle, high = (cell.errors * (value + side * self.half) for side in (-1, 0, 1))
        return low, middle, high

    def holds(self, cell: Gap) -> bool | None:
        """Whether the cell's gap lies inside its interval; None while it is unknown."""
        low, _, high = self.interval(cell)
        return None if cell.gap is None else low <= cell.gap <= high


def fit(gaps: Sequence[Gap], scales: FloatArray = SCALES) -> Law:
    """The law of cells whose gaps are known, with the best of these scales; ValueError with fewer than nine cells.

    `half` is the residual of rank ceil(0.9 (n + 1)), counted from the smallest (split conformal prediction, Lei et al.
    2018, section 2.2, without the split: the formula has only two constants).
    """
    known = [(one.nats, one.gap / one.errors) for one in gaps if one.gap is not None]
    rank = math.ceil(COVERAGE * (len(known) + 1))
    if rank > len(known):
        raise ValueError(f"{len(known)} gaps are too few for an interval of {COVERAGE:.0%}")
    nats, shares = np.array(known).T
    shapes = -np.expm1(-nats / scales[:, None])
    heights = shapes @ shares / (shapes**2).sum(axis=1)
    residuals = np.abs(shares - heights[:, None] * shapes)
    best = int((residuals**2).sum(axis=1).argmin())
    return Law(float(heights[best]), float(scales[best]), float(np.sort(residuals[best])[rank - 1]), len(known))


def miss(law: Law, gaps: Sequence[Gap]) -> float:
    """Root mean square of gap - predicted gap over the cells with a known gap, in shares of the start's errors.

    Raises ValueError without one.
    """
    squares = [((one.gap - law.interval(one)[1]) / one.errors) ** 2 for one in gaps if one.gap is not None]
    if not squares:
        raise ValueError("no gap is known")
    return math.sqrt(statistics.fmean(squares))


def gaps_of(results: Results) -> list[Gap]:
    """Every cell of a part-six grid that is not GRPO's, seed by seed, at its method's rate."""
    fresh = results.column("grpo", "grpo", "after")
    rows = [(name, row) for name in results.grid.methods if name != "grpo" for row in results.of(name, name).values()]
    return [
        Gap(name, row["nats"], 1 - row["before"], fresh[row["seed"]] - row["after"] if row["seed"] in fresh else None)
        for name, row in rows
    ]


def law_gaps(docs: Path) -> list[Gap]:
    """The cells of docs/study/law.md."""
    rows = [row for row in law_rows(docs / CSV) if row["gap"] is not None]
    return [Gap(row["method"], row["nats"], 1 - row["start_sampled"], row["gap"]) for row in rows]


def read_gaps(docs: Path, name: str) -> list[Gap]:
    """The cells of the grid with this name, from its directory in `docs`."""
    return gaps_of(read_named(name, docs))


def read(docs: Path) -> tuple[list[Gap], dict[str, list[Gap]]]:
    """The exploration's cells, and those of every grid of part six."""
    return law_gaps(docs), {name: read_gaps(docs, name) for name in (*FITTED, *PREDICTED)}


def fitted(explored: Sequence[Gap], grids: Mapping[str, Sequence[Gap]]) -> list[Gap]:
    """The cells that the law is fitted to: all but the predicted ones."""
    return [*explored, *(gap for name in FITTED for gap in grids[name])]


def prediction_table(law: Law, cells: Sequence[tuple[str, Gap]]) -> str:
    """Each predicted cell: what it moved, the predicted gap with its interval, and the measured one. Points."""
    rows = []
    for grid, cell in cells:
        low, middle, high = (100 * end for end in law.interval(cell))
        measured = "–" if cell.gap is None else f"{100 * cell.gap:.1f}"
        inside = {None: "–", True: "yes", False: "no"}[law.holds(cell)]
        name, start = f"{grid}, {cell.method}", f"{100 - 100 * cell.errors:.1f}"
        rows.append([name, start, f"{cell.nats:.2g}", f"{middle:.1f} ({low:.1f} to {high:.1f})", measured, inside])
    return markdown(("Cell", "Start %", "Nats a stage", "Predicted gap", "Gap", "Inside"), rows)


def reading(law: Law, cells: Sequence[Gap]) -> str:
    """Of claim 8: `holds`, `does not hold`, or `open` until all four gaps are known."""
    inside = [held for one in cells if (held := law.holds(one)) is not None]
    if len(inside) < 2 * len(PREDICTED):
        return "open"
    return "holds" if sum(inside) >= NEEDED else "does not hold"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where law.csv and the grids' directories are")
    docs = parser.parse_args(arguments).docs
    explored, grids = read(docs)
    known = fitted(explored, grids)
    law, constant = fit(known), fit(known, NO_NATS)
    print(f"gap = errors * {law.height:.3f} * (1 - exp(-nats / {law.scale:.2g})), ± {law.half:.3f} of the errors")
    print(f"over {law.cells} cells; an interval holds {COVERAGE:.0%} of them\n")
    cells = [(name, gap) for name in PREDICTED for gap in grids[name]]
    print(prediction_table(law, cells))
    predicted = [gap for _, gap in cells]
    print(f"\nClaim 8: {reading(law, predicted)}")
    if any(one.gap is not None for one in predicted):
        print(f"\nWithout nats, gap = errors * ({constant.height:.3f} ± {constant.half:.3f}):")
        print(f"{sum(constant.holds(one) is True for one in predicted)} of {len(predicted)} gaps lie inside;")
        misses = [f"{miss(one, predicted):.3f}" for one in (constant, law)]
        print(f"it misses by {misses[0]} of the errors (root mean square), the formula by {misses[1]}")


if __name__ == "__main__":
    main()
