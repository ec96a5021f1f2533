"""Make docs/study.md and its pictures from the kept results in docs/study.

python -m run_scripts.study.page
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from run_scripts.study import tables, timing
from run_scripts.study.grid import GRID, load_grid
from run_scripts.study.plots import write_plots
from run_scripts.study.results import (
    CLOCK,
    DOCS,
    WALL,
    Results,
    difference,
    fisher_exact,
    mean_of,
    pooled_deviation,
    read_results,
)

TEMPLATE = Path(__file__).with_name("study.md.j2")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, default=GRID)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the kept results are and pictures go")
    options = parser.parse_args(arguments)
    results = read_results(load_grid(options.grid), options.docs)
    write_plots(results, options.docs)
    page = options.docs.parent / "study.md"
    page.write_text(text(results, options.docs), encoding="utf-8")
    print(page)
    return 0


def text(results: Results, docs: Path) -> str:
    """The page: prose from study.md.j2, numbers from the results and the files in `docs`."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    before = max(row["accuracy_before"] for row in results.rows)
    return environment.get_template(TEMPLATE.name).render(
        results=results,
        grid=results.grid,
        tables=tables,
        timing=timing,
        done=len(results.of_kind("study")),
        problems=max(row["problems"] for row in results.rows),
        **_comparisons(results, before),
        **_times(results, docs),
    )


def _comparisons(results: Results, before: float) -> dict[str, Any]:
    """The template's values and functions for accuracies; `before` is the warm start's."""

    def lost(variant: str, rate: float) -> list[float]:
        return [accuracy for accuracy in results.at(variant, rate).values() if accuracy < before]

    def fisher(left: str, right: str, rate: float) -> float:
        return fisher_exact(*((len(lost(name, rate)), len(results.at(name, rate))) for name in (left, right)))

    repeats = results.repeats()
    return {
        "before": before,
        "claims": tables.claims_table(results),
        "edges_table": tables.edge_table(results, before),
        "summary": tables.summary_table(results),
        "edge_variants": tables.edge_variants(results),
        "repeats": repeats,
        "repeat_deviation": pooled_deviation(repeats) or 0.0,
        "repeat_widest": max((max(same) - min(same) for same in repeats), default=0.0),
        "seed_deviation": pooled_deviation([list(results.by_seed(name).values()) for name in results.grid.variants()])
        or 0.0,
        "response_tokens": _response_tokens(results, "one_stage"),
        "ends": lambda variant, rate: tables.percent(tables.seeds_mean(results, variant, rate)),
        "gain": lambda left, right, rate: tables.points(difference(results.at(left, rate), results.at(right, rate))),
        "tuned_gain": lambda left, right, digits=1: tables.points(
            difference(results.by_seed(left), results.by_seed(right)), digits
        ),
        "each": lambda variant, rate: ", ".join(
            f"{100 * accuracy:.1f}" for _, accuracy in sorted(results.at(variant, rate).items())
        ),
        "inside": lambda variant: [
            accuracy for points in results.inside_of(variant) for updates, accuracy in points if updates
        ],
        "lost": lambda variant, rate: len(lost(variant, rate)),
        "nearest_lost": lambda variant, rate: max(lost(variant, rate)),
        "fisher": fisher,
        "vetoed": lambda variant, rate: tables.vetoed(results, variant, rate),
    }


def _response_tokens(results: Results, part: str, responses: int = 32 * 8) -> float:
    """Mean tokens of a response in the part's runs; `responses` in an update."""
    runs = [row for row in results.of_kind("study") if row["part"] == part]
    return mean_of([row["tokens"] / (row["updates"] * responses) for row in runs]).value


def _times(results: Results, docs: Path) -> dict[str, Any]:
    """The template's values and functions for seconds, and the runs of TRL."""
    files = {"mixed": "trl.json", "sums": "trl-sums.json", "clock": "trl-clock.json"}
    trl = {what: _read(docs / name) for what, name in files.items()}
    switches, generation = timing.kept_switches(results)
    level, stragglers = timing.same_accuracy(results), _read(docs / "stragglers.json")

    def of(variant: str, column: str, kind: str = CLOCK) -> list[float]:
        return [row[column] for row in results.tuned(variant, kind)]

    return {
        "trl": trl,
        "trl_gap": timing.trl_gap(trl["mixed"], results),
        "level": level,
        "switches": switches,
        "generation_fit": generation,
        "stragglers": stragglers,
        "straggler_cost": timing.straggler_cost(stragglers),
        "cpu_spread": timing.cpu_spread(trl["mixed"], results),
        "seconds": lambda variant, kind=CLOCK: mean_of(of(variant, "wall_s", kind)).value,
        "others": lambda variant, kind: max(of(variant, "others_share", kind)),
        "arrival": lambda variant: mean_of(results.seconds_to(variant, level, WALL)).value,
    }


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
