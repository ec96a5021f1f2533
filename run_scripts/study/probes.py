"""Measurements next to the grid: accuracy inside a stage, the cost of stragglers, and an easier task.

    python -m run_scripts.study.probes inside          # evaluates checkpoints inside the only stage of a run
    python -m run_scripts.study.probes stragglers      # times the same responses in stages of several sizes
    python -m run_scripts.study.probes sums DIR        # writes three-digit sums to DIR/train.jsonl, eval.jsonl

`inside` runs the variants of one stage again at their tuned rates, with a checkpoint wherever GRPO is evaluated, and
evaluates each on the problems that every cell is evaluated on. Finished runs and evaluations are not repeated.

`stragglers` generates responses with the lengths of the right answers to the bundled task with a heavy tail
(`arithmetic_long`), whether they contain an end of sequence or not. So all stage sizes decode the same tokens with the
same engine, and differ in when the next responses may start. Rounds alternate between the sizes, so that other work on
the machine slows all of them. Then it generates the largest stage again with fewer places in the engine, as where the
learner stays in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.engine.host import load_engine
from mugrpo_megatron.engine.launch import engine_arguments, engine_environment, runs_on_cuda
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint import STATE
from mugrpo_megatron.files.durable import write_text
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.report.rundata import read_run
from run_scripts.study.grid import EVALUATIONS, Cell, State, load_grid
from run_scripts.study.results import DOCS, INSIDE, read_results
from run_scripts.study.run import BASE, SAME_SUMS, Study, run_alone
from run_scripts.study.timing import PROMPTS, long_lengths, places_table, straggler_table

VARIANTS = ("mu_128", "relaxed_128", "strict_128")
Points = list[list[float]]
"""[updates, accuracy], ascending."""
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
"""Eight tokens; the engine runs without a prefix cache."""
TRAIN, EVAL = 50_000, 12_000
"""Problems of the bundled task, by split, from which the sums are selected."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        options.probe(options)
    except UserError as error:
        print(f"probes: {error}", file=sys.stderr)
        return 2
    return 0


def inside(options: argparse.Namespace) -> None:
    """Accuracies inside the only stage of each variant, into docs/study/inside.json."""
    results = read_results(load_grid(), options.docs)
    study = Study(results.grid, BASE, options.out, options.out / "warm-start" / "hf")
    found: dict[str, Points] = {}
    for seed in range(options.seeds):
        for variant in VARIANTS:
            rate = results.rate(variant)
            if rate is None:
                raise UserError(f"{variant} has not run: python -m run_scripts.study.run --part one_stage")
            cell = Cell(variant, rate, seed)
            found[cell.name] = points(study, cell, results.grid.variants()[variant].updates // EVALUATIONS)
            write_text(options.docs / INSIDE, json.dumps(found) + "\n")


def points(study: Study, cell: Cell, every: int) -> Points:
    """Accuracies of one cell before its first update, every `every` updates, and after its last.

    Raises UserError if the run or an evaluation fails.
    """
    directory = study.out / "inside" / cell.name
    if study.state(cell, directory) is not State.DONE:
        extra = [f"checkpoint.every_updates={every}", f"checkpoint.keep={EVALUATIONS + 1}"]
        if not run_alone(study, cell, directory, extra, keep=True):
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


def stragglers(options: argparse.Namespace) -> None:
    """Seconds of the same responses in stages of µ updates, into docs/study/stragglers.json."""
    if wrong := [mu for mu in options.mu if mu < 1 or options.updates % mu]:
        raise UserError(f"--mu {wrong[0]} does not divide --updates {options.updates}")
    lengths = long_lengths(options.updates * PROMPTS)
    largest = max(options.mu)
    with _engine(options.model, options.running[0]) as engine:
        seconds = _measure(engine, lengths, options.mu, options)
    places = {options.running[0]: seconds[largest]}
    for running in options.running[1:]:
        with _engine(options.model, running) as engine:
            places[running] = _measure(engine, lengths, [largest], options)[largest]
    found = {
        "updates": options.updates,
        "responses": len(lengths),
        "tokens": sum(lengths),
        "running": options.running[0],
        "rounds": options.rounds,
        "seconds": seconds,
        "places": places,
    }
    write_text(options.docs / "stragglers.json", json.dumps(found) + "\n")
    print(straggler_table(found), places_table(found), sep="\n\n")


@contextmanager
def _engine(model: Path, running: int) -> Iterator[Any]:
    """An engine with the arguments of a run, on this machine's device."""
    recipe = Recipe.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "data": {"max_prompt_tokens": len(PROMPT)},
            "rollout": {"max_response_tokens": 256},
            "engine": {"max_running_requests": running},
        }
    )
    cuda = runs_on_cuda(recipe)
    os.environ.update(engine_environment(recipe, model, cuda))
    engine = load_engine(engine_arguments(recipe, model, cuda))  # imports SGLang, which reads the environment then
    engine.freeze_gc()
    try:
        yield engine
    finally:
        engine.shutdown()


def _measure(
    engine: Any, lengths: Sequence[int], sizes: Sequence[int], options: argparse.Namespace
) -> dict[int, list[float]]:
    """Seconds of generating all `lengths` in stages of µ updates, for each µ of `sizes` and each round."""
    per_update = len(lengths) // options.updates
    _generate(engine, lengths[:per_update])  # warms up
    seconds: dict[int, list[float]] = {mu: [] for mu in sizes}
    for _ in range(options.rounds):
        for mu, times in seconds.items():
            stages = [lengths[i : i + mu * per_update] for i in range(0, len(lengths), mu * per_update)]
            start = time.perf_counter()
            for stage in stages:
                _generate(engine, stage)
            times.append(round(time.perf_counter() - start, 2))
            print(f"µ={mu}: {len(stages)} stages in {times[-1]:.1f} s", flush=True)
    return seconds


def _generate(engine: Any, lengths: Sequence[int]) -> None:
    asked = [{"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True} for length in lengths]
    outputs = engine.generate(input_ids=[PROMPT] * len(lengths), sampling_params=asked)
    made = [output["meta_info"]["completion_tokens"] for output in outputs]
    if made != list(lengths):
        raise RuntimeError("the engine did not generate the requested lengths")


def sums(options: argparse.Namespace) -> None:
    """Three-digit sums of the bundled task as JSONL files: an easier task, on which other projects report figures."""
    directory: Path = options.directory
    directory.mkdir(parents=True, exist_ok=True)
    splits: tuple[tuple[arithmetic.Split, int], ...] = (("train", TRAIN), ("eval", EVAL))
    for split, count in splits:
        rows = [
            json.dumps({"problem": problem.question, "answer": problem.answer})
            for problem in arithmetic.problems(0, split, count)
            if is_sum(problem.question)
        ]
        (directory / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        print(f"{directory / f'{split}.jsonl'}: {len(rows)} problems")


def is_sum(question: str) -> bool:
    """Whether the question is a sum of two three-digit numbers."""
    left, plus, right = question.rstrip("=").partition("+")
    return bool(plus) and len(left) == len(right) == 3


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    probes = parser.add_subparsers(required=True)
    one = probes.add_parser("inside", help="accuracy inside a stage")
    one.set_defaults(probe=inside)
    one.add_argument("--out", type=Path, default=Path("runs/study"), help="where the study's runs are")
    one.add_argument("--docs", type=Path, default=DOCS, help=f"where cells.csv is and {INSIDE} goes")
    one.add_argument("--seeds", type=int, default=1)
    one = probes.add_parser("stragglers", help="seconds of the same responses in stages of several sizes")
    one.set_defaults(probe=stragglers)
    one.add_argument("--model", type=Path, default=Path("runs/study/warm-start/hf"), help="checkpoint directory")
    one.add_argument("--mu", type=int, nargs="+", default=[1, 4, 16, 32], help="updates per stage")
    one.add_argument("--updates", type=int, default=32)
    one.add_argument(
        "--running",
        type=int,
        nargs="+",
        default=[1024, 512, 256, 128],
        help="engine.max_running_requests: the first for every µ, the others for the largest",
    )
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument("--docs", type=Path, default=DOCS, help="where stragglers.json goes")
    one = probes.add_parser("sums", help="three-digit sums of the bundled task")
    one.set_defaults(probe=sums)
    one.add_argument("directory", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
