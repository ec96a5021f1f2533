"""Make docs/study.md and its pictures from docs/study/cells.csv and curves.json.

python -m run_scripts.study.write
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from run_scripts.study import claims, cost, heavy_tail, tables
from run_scripts.study.collect import DOCS
from run_scripts.study.grid import GRID, load_grid
from run_scripts.study.plots import PICTURES, write_plots
from run_scripts.study.results import CLOCK, WALL, Results, read_results
from run_scripts.study.stats import difference, fisher_exact, mean_of, pooled_deviation

TEMPLATE = Path(__file__).with_name("study.md.j2")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, default=GRID)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where cells.csv and curves.json are, pictures go")
    options = parser.parse_args(arguments)
    results = read_results(load_grid(options.grid), options.docs)
    write_plots(results, options.docs)
    page = options.docs.parent / "study.md"
    page.write_text(text(results, options.docs), encoding="utf-8")
    print(page)
    return 0


def text(results: Results, docs: Path) -> str:
    """The page; its prose is study.md.j2, every number in it comes from the results and the files next to them."""
    files = {"mixed": "trl.json", "sums": "trl-sums.json", "clock": "trl-clock.json"}
    trl = {what: _read(docs / name) or [] for what, name in files.items()}
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"points": tables.points, "percent": tables.percent}
    before = max((row["accuracy_before"] for row in results.rows), default=0.0)
    return environment.get_template(TEMPLATE.name).render(
        results=results,
        grid=results.grid,
        pictures=[name for name, (_, has_data) in PICTURES.items() if has_data(results)],
        tables=tables,
        done=len(results.of_kind("study")),
        problems=max((row["problems"] for row in results.rows), default=0),
        trl=trl,
        trl_gap=tables.trl_gap(trl["mixed"], results),
        **_comparisons(results, before),
        **_times(results, _read(docs / "stragglers.json"), trl["mixed"]),
    )


def _comparisons(results: Results, before: float) -> dict[str, Any]:
    """What the template says of accuracies; `before` is the warm start's."""

    def lost(variant: str, rate: float) -> list[float]:
        return [accuracy for accuracy in results.at(variant, rate).values() if accuracy < before]

    def fisher(left: str, right: str, rate: float) -> float:
        return fisher_exact(*((len(lost(name, rate)), len(results.at(name, rate))) for name in (left, right)))

    repeats = results.repeats()
    return {
        "before": before,
        "claims": claims.claims_table(results),
        "edges_table": claims.edge_table(results, before),
        "summary": claims.summary_table(results),
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
    """Mean tokens of a response in the part's runs, `responses` an update; 0 without any."""
    runs = [row for row in results.of_kind("study") if row["part"] == part]
    return mean_of([row["tokens"] / (row["updates"] * responses) for row in runs]).value if runs else 0.0


def _times(results: Results, measured: Any, trl: list[Any]) -> dict[str, Any]:
    """What the template says of seconds; `measured` is what `stragglers` wrote, None before it ran."""
    switches, generation = cost.kept_switches(results)
    level = tables.same_accuracy(results)
    return {
        "level": level,
        "clock": claims.clock_table(results),
        "switches": switches,
        "generation_fit": generation,
        "restarts": cost.restart_table(results),
        "stragglers": heavy_tail.straggler_table(measured),
        "stragglers_measured": measured,
        "straggler_cost": heavy_tail.straggler_cost(measured) if measured else {},
        "places": heavy_tail.places_table(measured) if measured else "",
        "cpu_spread": tables.cpu_spread(trl, results),
        "seconds": lambda variant, kind=CLOCK: mean_of([row["wall_s"] for row in results.timed(variant, kind)]).value,
        "arrival": lambda variant: mean_of(results.seconds_to(variant, level or 0.0, WALL) or [math.nan]).value,
        "others": lambda variant, kind: max(row["others_share"] for row in results.timed(variant, kind)),
    }


def _read(path: Path) -> Any:
    """What another script left there, None where it has not run."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
