"""The tables of part three: scopes and thresholds on short answers, from docs/study/short.csv."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from run_scripts.study.results import Row, markdown, mean_of, percent, points, scientific

SCOPES = {"trigger": "T", "suffix": "S_κ", "suffix_non_trigger": "H_κ", "response": "S_seq"}
BELOW = ("below_1e-1", "below_1e-2", "below_1e-3", "below_1e-4")


def gap_table(rows: Sequence[Row]) -> str:
    """Final accuracy minus that without a veto, in points, by scope and threshold; empty without cells."""
    vetoed = [row for row in rows if row["veto"] in SCOPES and row["objective"] == "mu_grpo"]
    thresholds = sorted({row["threshold"] for row in vetoed})
    lines = []
    for scope, title in SCOPES.items():
        cells = [[row for row in vetoed if (row["veto"], row["threshold"]) == (scope, one)] for one in thresholds]
        lines.append([title, *(_gap(rows, own) for own in cells)])
    return markdown(("Veto of", *map(_threshold, thresholds)), lines) if vetoed else ""


def plain_table(rows: Sequence[Row]) -> str:
    """The runs without a veto: accuracy, the smallest ratio, and tokens with A < 0 below each threshold."""
    lines = []
    for rate in sorted({row["rate"] for row in rows}):
        for title, objective, veto in (("GRPO's clip", "grpo", None), ("no veto", "mu_grpo", "none")):
            own = [
                row
                for row in rows
                if (row["rate"], row["objective"]) == (rate, objective) and veto in (None, row["veto"])
            ]
            if own:
                lines.append([title, scientific(rate), str(len(own)), *_figures(own)])
    head = ("Run", "Rate", "Seeds", "Before %", "After %", "Least ρ, A < 0", "% below 0.1", "10⁻²", "10⁻³", "10⁻⁴")
    return markdown(head, lines) if lines else ""


def _gap(rows: Sequence[Row], own: Sequence[Row]) -> str:
    without = {(row["seed"], row["rate"]): row["after"] for row in rows if row["veto"] == "none"}
    apart = [row["after"] - without[row["seed"], row["rate"]] for row in own]
    return points(mean_of(apart), 1) if apart else "–"


def _figures(own: Sequence[Row]) -> list[str]:
    shares = [statistics.fmean(row[name] for row in own) for name in BELOW]
    return [
        *(percent(mean_of([row[name] for row in own])) for name in ("before", "after")),
        f"{min(row['ratio_neg_min'] for row in own):.1e}",
        *(f"{100 * share:.2g}" for share in shares),
    ]


def _threshold(value: float) -> str:
    return scientific(value) if value < 0.1 else f"{value:g}"
