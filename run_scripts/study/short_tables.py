"""The tables of part three: scopes and thresholds on short answers, from docs/study/short.csv."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from run_scripts.study.results import Row, differences, markdown, mean_of, percent, scientific
from run_scripts.study.tables import over_seeds

SCOPES = {"trigger": "T", "suffix": "S_κ", "suffix_non_trigger": "H_κ", "response": "S_seq"}
THRESHOLDS = ("1e-1", "1e-2", "1e-3", "1e-4")
"""Of which every run records how many tokens with negative advantage have a smaller ratio."""
BELOW = tuple(f"below_{one}" for one in THRESHOLDS)
"""Columns of short.csv with these shares."""


def veto_table(rows: Sequence[Row]) -> str:
    """Final accuracy by scope and threshold; empty without cells."""
    vetoed = [row for row in rows if row["veto"] in SCOPES and row["objective"] == "mu_grpo"]
    thresholds = sorted({row["threshold"] for row in vetoed})
    lines = []
    for scope, title in SCOPES.items():
        cells = [[row for row in vetoed if (row["veto"], row["threshold"]) == (scope, one)] for one in thresholds]
        lines.append([title, *(percent(mean_of([row["after"] for row in own])) if own else "–" for own in cells)])
    return markdown(("Veto of", *map(_threshold, thresholds)), lines) if vetoed else ""


def threshold_gap(rows: Sequence[Row], scope: str, left: float, right: float) -> str:
    """Final accuracy of a scope with one threshold minus that with another, seed by seed."""
    after = [
        {row["seed"]: row["after"] for row in rows if (row["veto"], row["threshold"]) == (scope, one)}
        for one in (left, right)
    ]
    return over_seeds(differences(*after))


def plain_table(rows: Sequence[Row]) -> str:
    """The runs without a veto: accuracy, the smallest ratio, and tokens with A < 0 below each threshold."""
    plain, lines = [row for row in rows if row["threshold"] is None], []
    for rate in sorted({row["rate"] for row in plain}):
        for title, objective in (("GRPO's clip", "grpo"), ("no veto", "mu_grpo")):
            own = [row for row in plain if (row["rate"], row["objective"]) == (rate, objective)]
            if own:
                lines.append([title, scientific(rate), str(len(own)), *_figures(own)])
    head = ("Run", "Rate", "Seeds", "Before %", "After %", "Least ρ, A < 0", "% below 0.1", "10⁻²", "10⁻³", "10⁻⁴")
    return markdown(head, lines) if lines else ""


def ends_without_veto(rows: Sequence[Row], rate: float) -> str:
    """Final accuracy of each seed's run without a veto: `57.1, 1.1 and 42.2 %`."""
    ends = [f"{100 * row['after']:.1f}" for row in rows if (row["veto"], row["rate"]) == ("none", rate)]
    return f"{' and '.join(filter(None, [', '.join(ends[:-1]), *ends[-1:]]))} %"


def _figures(own: Sequence[Row]) -> list[str]:
    shares = [statistics.fmean(row[name] for row in own) for name in BELOW]
    return [
        *(percent(mean_of([row[name] for row in own])) for name in ("before", "after")),
        f"{min(row['ratio_neg_min'] for row in own):.1e}",
        *(f"{100 * share:.2g}" for share in shares),
    ]


def _threshold(value: float) -> str:
    return scientific(value) if value < 0.1 else f"{value:g}"
