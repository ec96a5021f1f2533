"""Accuracy inside a stage, where a run does not look: what is saved inside it, evaluated afterwards.

    python -m run_scripts.study.inside --out runs/study --seeds 3

Runs the variants of one stage for everything once more at their tuned rates, with a checkpoint wherever GRPO is
evaluated, and evaluates each on the problems that every cell is evaluated on. A run that is done is not run again, a
checkpoint that is evaluated not evaluated again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint import STATE
from mugrpo_megatron.files.durable import write_text
from mugrpo_megatron.report.rundata import read_run
from run_scripts.study.collect import DOCS
from run_scripts.study.grid import EVALUATIONS, Cell, load_grid
from run_scripts.study.results import INSIDE, read_results
from run_scripts.study.run import BASE, SAME_SUMS, Study, run_alone
from run_scripts.study.states import State

VARIANTS = ("mu_128", "relaxed_128", "strict_128")
Points = list[list[float]]
"""[updates, accuracy], ascending."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    results = read_results(load_grid(), options.docs)
    study = Study(results.grid, BASE, options.out, options.out / "warm-start" / "hf")
    found: dict[str, Points] = {}
    try:
        for seed in range(options.seeds):
            for variant in VARIANTS:
                rate = results.rate(variant)
                if rate is None:
                    raise UserError(f"{variant} has not run: python -m run_scripts.study.run --part one_stage")
                cell = Cell(variant, rate, seed)
                found[cell.name] = points(study, cell, results.grid.variants()[variant].updates // EVALUATIONS)
                write_text(options.docs / INSIDE, json.dumps(found) + "\n")
    except UserError as error:
        print(f"inside: {error}", file=sys.stderr)
        return 2
    return 0


def points(study: Study, cell: Cell, every: int) -> Points:
    """Accuracies of one cell, before its first update, every few updates and after its last.

    Raises UserError where the run or an evaluation fails; its own output says why.
    """
    directory = study.out / "inside" / cell.name
    if study.state(cell, directory) is not State.DONE:
        besides = [f"checkpoint.every_updates={every}", f"checkpoint.keep={EVALUATIONS + 1}"]
        if not run_alone(study, cell, directory, besides, keep=True):
            raise UserError(f"{cell.name} failed: see {directory / 'console.log'}")
    run = read_run(directory)
    ends = [[row["update"], row["accuracy/mean"]] for row in run.evals]
    return sorted([*ends, *_between(directory, study.model, run.recipe["data"]["eval"])])


def _between(run: Path, model: Path, source: str) -> Iterator[list[float]]:
    """[updates, accuracy] on the data set `source` of every checkpoint inside the run's only stage."""
    for checkpoint in sorted(path.parent for path in run.glob(f"checkpoints/*/{STATE}")):
        stage, age = map(int, re.findall(r"\d+", checkpoint.name))
        if stage == 0:
            accuracy = _accuracy(checkpoint, run, model, source)
            print(f"{run.parent.name}/{run.name} after {age} updates: {100 * accuracy:.1f} %", flush=True)
            yield [age, accuracy]


def _accuracy(checkpoint: Path, run: Path, model: Path, source: str) -> float:
    evaluation = run / "evaluations" / checkpoint.name
    summary = evaluation / "summary.json"
    if not summary.exists():
        with tempfile.TemporaryDirectory() as folder:
            hf = str(Path(folder) / "hf")
            _call(
                "checkpoints_convert.megatron_to_hf", "--megatron", str(checkpoint), "--out", hf, "--like", str(model)
            )
            recipe = str(run / "recipe.toml")
            _call("mugrpo_megatron", "eval", hf, "--data", source, "--recipe", recipe, "--out", str(evaluation))
    return float(json.loads(summary.read_text(encoding="utf-8"))["average"]["value"])


def _call(module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, env=os.environ | SAME_SUMS
    )
    if done.returncode:
        raise UserError(f"python -m {module} {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="where the study's runs lie")
    parser.add_argument("--docs", type=Path, default=DOCS, help=f"where cells.csv is and {INSIDE} goes")
    parser.add_argument("--seeds", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
