"""Make docs/study.md and its pictures from docs/study/cells.csv and curves.json.

python -m run_scripts.study.write
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from run_scripts.study import cost, tables
from run_scripts.study.collect import DOCS
from run_scripts.study.grid import GRID, load_grid
from run_scripts.study.plots import PICTURES, write_plots
from run_scripts.study.results import CPU, WALL, Results, read_results
from run_scripts.study.stats import difference, mean_of

TEMPLATE = Path(__file__).with_name("study.md.j2")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, default=GRID)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where cells.csv and curves.json are, pictures go")
    options = parser.parse_args(arguments)
    results = read_results(load_grid(options.grid), options.docs)
    write_plots(results, options.docs)
    page = options.docs.parent / "study.md"
    page.write_text(text(results, beside(options.docs)), encoding="utf-8")
    print(page)
    return 0


def beside(docs: Path) -> dict[str, list[dict[str, Any]]]:
    """What `run_scripts.bench.trl` left there by task, `mixed` and `sums`; empty lists where it has not run."""
    paths = {"mixed": docs / "trl.json", "sums": docs / "trl-sums.json"}
    return {task: json.loads(path.read_text(encoding="utf-8")) if path.exists() else [] for task, path in paths.items()}


def text(results: Results, trl: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The page; its prose is study.md.j2, every number in it comes from the results."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"points": tables.points, "percent": tables.percent}
    switches, generation = cost.kept_switches(results)
    level = tables.same_accuracy(results)
    return environment.get_template(TEMPLATE.name).render(
        results=results,
        grid=results.grid,
        pictures=[name for name, (_, has_data) in PICTURES.items() if has_data(results)],
        tables=tables,
        gap=difference(results.by_seed("mu_grpo"), results.by_seed("grpo")),
        veto_gain=difference(results.by_seed("mu_grpo"), results.by_seed("relaxed")),
        strict_gap=difference(results.by_seed("strict"), results.by_seed("mu_grpo")),
        collapses=tables.collapses(results),
        level=level,
        speedup={name: _speedup(results, level, axis) for name, axis in (("wall", WALL), ("cpu", CPU))},
        done=len(results.of_kind("study")),
        clocked=len(results.of_kind("clock")),
        problems=max((row["problems"] for row in results.rows), default=0),
        prediction=cost.prediction_table(),
        saving=cost.savings(),
        memory=cost.memory_table(),
        stragglers=cost.straggler_table(),
        switches=switches,
        generation_fit=generation,
        trl=trl,
        trl_gap=tables.trl_gap(trl["mixed"], results),
        cpu_spread=tables.cpu_spread(trl["mixed"], results),
        settled=all(results.is_tuned(variant.name) for variant in results.grid.parts[0].variants),
        headline={v.name: results.timed(v.name)[0] for v in results.grid.parts[0].variants if results.timed(v.name)},
        before=max((row["accuracy_before"] for row in results.rows), default=0.0),
    )


def _speedup(results: Results, level: float | None, axis: int) -> float | None:
    """How many times sooner mu-GRPO is at the accuracy that both reach."""
    if level is None:
        return None
    ours, theirs = (results.seconds_to(name, level, axis) for name in ("mu_grpo", "grpo"))
    return mean_of(theirs).value / mean_of(ours).value if ours and theirs else None


if __name__ == "__main__":
    sys.exit(main())
