"""Claim 6's ends by the warm start's pass rate, over its seeds (docs/study/part-six.md); E1 of the law had one.

    python -m run_scripts.study.six_passes --out DIR                # what is missing; Ctrl-C saves
    python -m run_scripts.study.six_passes --out DIR --seeds 20 21  # a second process can run others
    python -m run_scripts.study.six_passes --out DIR --collect      # docs/study/six_small/problems.csv
    python -m run_scripts.study.six_passes                          # the table

Run it in the repository's root. It runs the cells of six_small.toml at their tuned rates again, in a study's directory
of its own: those of the claim kept no model. Warm starts and stages that DIR holds are used.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mugrpo_megatron.errors import UserError
from run_scripts.study.cells import Cell
from run_scripts.study.collect import write_rows
from run_scripts.study.law import MANY, NOT_ENDS, read_end, read_sampled, run_sampled, sample
from run_scripts.study.law_figures import BINS, Bin, binned, law_rows
from run_scripts.study.results import DOCS, Results, Row, markdown, mean_of, percent, points, read_named
from run_scripts.study.run import Interrupted, Study, interrupt
from run_scripts.study.six import CLAIMS

NAME = CLAIMS[0].grid
METHODS = {"fresh": "grpo", "stale": "stage"}
"""Column -> the method whose end it is about."""
PROBLEMS = "problems.csv"
COLUMNS = ("seed", "problem", "before", *METHODS)
"""Shares of right samples: `MANY` of the warm start, `law.FEW` of each end."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the runs go; without it the table is printed")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these seeds")
    parser.add_argument("--collect", action="store_true", help="only write the csv file")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the grids' directories are")
    options = parser.parse_args(arguments)
    if options.out is None:
        print(table(read(options.docs)))
        return 0
    try:
        results = read_named(NAME, options.docs)
        study = Study(results.grid, options.out.resolve(), bulk=NOT_ENDS)
        cells = [cells_of(results, seed) for seed in options.seeds or results.grid.blocks["grpo"].seeds]
        if options.collect:
            rows = [row for own in cells for row in problem_rows(study, own)]
            write_rows(options.docs / NAME / PROBLEMS, COLUMNS, rows)
            return 0
        signal.signal(signal.SIGTERM, interrupt)
        signal.signal(signal.SIGINT, interrupt)
        finished = [run_seed(study, own) for own in cells]
        return 0 if all(finished) else 1
    except UserError as error:
        print(f"six_passes: {error}", file=sys.stderr)
        return 2
    except Interrupted:
        print("six_passes: interrupted; the same command continues")
        return 130


def cells_of(results: Results, seed: int) -> list[Cell]:
    """The seed's cell of each method, in the order of the columns. Raises UserError before a rate is tuned."""
    rates = {method: results.rate(method, method) for method in METHODS.values()}
    if None in rates.values():
        raise UserError(
            f"{NAME} has no tuned rate yet: run its cells with run_scripts.study.run and collect them first"
        )
    return [Cell(seed, method, rate) for method, rate in rates.items() if rate is not None]


def run_seed(study: Study, cells: Sequence[Cell]) -> bool:
    """Run a seed's unfinished cells, then sample its warm start, which a cell makes; whether all of it finished."""
    finished = [run_sampled(study, cell) for cell in cells]
    seed = cells[0].seed
    return all(finished) and sample(study.warm_start(seed) / "hf", _start(study, seed), MANY)


def problem_rows(study: Study, cells: Sequence[Cell]) -> list[Row]:
    """The rows of problems.csv of one seed; none before its evaluations have finished."""
    seed = cells[0].seed
    evaluations = [read_sampled(_start(study, seed)), *(read_end(study, cell) for cell in cells)]
    finished = [one for one in evaluations if one]
    if len(finished) < len(evaluations):
        return []
    named = dict(zip(COLUMNS[2:], finished, strict=True))
    return [
        {"seed": seed, "problem": question} | {name: one.right[question] / one.samples for name, one in named.items()}
        for question in sorted(finished[0].right)
    ]


def read(docs: Path = DOCS) -> dict[int, list[Bin]]:
    """Seed -> its bins; none without the csv file."""
    rows = law_rows(docs / NAME / PROBLEMS)
    seeds = sorted({int(row["seed"]) for row in rows})
    return {seed: binned(*_shares([row for row in rows if row["seed"] == seed])) for seed in seeds}


def of_bin(seeds: Mapping[int, Sequence[Bin]], low: float) -> list[Bin]:
    """One bin of every seed that has a problem in it."""
    return [one for bins in seeds.values() for one in bins if one.low == low]


def table(seeds: Mapping[int, Sequence[Bin]]) -> str:
    """Means over the seeds of each bin, seeds weighing the same."""
    head = ("p of the warm start", "Seeds", "Problems a seed", "Start %", "GRPO %", "One stage %", "Gap, points")
    rows = []
    for low, high in BINS:
        if own := of_bin(seeds, low):
            shares = [[one.start for one in own], [one.fresh for one in own], [one.stale for one in own]]
            rows.append(
                [
                    *(f"{low:g} to {high:g}", str(len(own)), f"{sum(one.problems for one in own) / len(own):.0f}"),
                    *(percent(mean_of(share)) for share in shares),
                    points(mean_of([one.fresh - one.stale for one in own]), 1),
                ]
            )
    return markdown(head, rows)


def _shares(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    before, fresh, stale = ({row["problem"]: row[name] for row in rows} for name in COLUMNS[2:])
    return before, fresh, stale


def _start(study: Study, seed: int) -> Path:
    return study.out / f"start-{MANY}-seed{seed}"


if __name__ == "__main__":
    sys.exit(main())
