"""Equal time on a model that answers, a step of run_scripts/dev/bench/ten.py: µ = 4, 16 and 64, each at its own rate.

    python -m run_scripts.dev.bench.ten_equal     # after run_scripts/real_model.sh: makes .gpu/real-model, 270 MB

Eight runs at once give accuracies, three alone give the clock; each gives its row when it ends, and one that fails
stops no other. The model and its problems are those in `.gpu/real-model`, SmolLM2-135M after its imitation, else the
quickstart's.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from run_scripts.dev.bench.ten_learner import Row, attention

REAL = Path(".gpu/real-model")
RECIPES = Path("run_scripts/recipes")
UPDATES, EVERY = 64, 8
"""Updates of a run, and updates between two evaluations."""
RATES = {4: 1.0, 16: 1.0, 64: 0.5}
"""µ -> its learning rate divided by the recipe's. In the study one long stage bears about half the rate of short
ones."""
AT_ONCE = ((4, 1), (16, 1), (64, 1), (4, 2), (16, 2), (64, 2), (4, 3), (16, 3))
"""(µ, seed) of the runs that share the GPU."""
TINY = (
    "data.eval_problems=20", "rollout.prompts_per_update=8", "rollout.responses_per_prompt=4",
    "engine.max_running_requests=64",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A recipe, and the changes to it in every run."""

    recipe: Path
    rate: float
    settings: tuple[str, ...] = ()
    updates: int = UPDATES


def task_of(small: bool) -> Task:
    """The real model's task if its files are here; with `small`, always the quickstart's task."""
    if REAL.exists() and not small:
        problems = [f"data.{name}={REAL.absolute()}/{name}.jsonl" for name in ("train", "eval")]
        return Task(RECIPES / "real_model.toml", 2e-5, (f"model.path={REAL.absolute()}/hf", *problems))
    return Task(RECIPES / "quickstart.toml", 2e-4, *((TINY, UPDATES // 4) if small else ()))


def equal(small: bool) -> Iterator[Row]:
    """Yield a row for each run: its evaluations every eight updates, and its seconds by phase, or why it failed.

    Raises RuntimeError at the end if any failed.
    """
    task, at_once = task_of(small), AT_ONCE[:2] if small else AT_ONCE
    folder = Path(tempfile.mkdtemp())  # not removed here: ten.py keeps the logs in it
    failed = 0
    for row in _rows(task, at_once, (16,) if small else tuple(RATES), folder):
        failed += "failed" in row
        yield row
    if failed:
        raise RuntimeError(f"{failed} runs failed: see their rows")


def _rows(task: Task, at_once: Sequence[tuple[int, int]], alone: Sequence[int], folder: Path) -> Iterator[Row]:
    with ThreadPoolExecutor(len(at_once)) as pool:
        runs = [pool.submit(run_one, task, mu, seed, folder, len(at_once)) for mu, seed in at_once]
        for run in as_completed(runs):
            yield run.result()
    for mu in alone:
        yield run_one(task, mu, 1, folder, 1)


def settings_of(task: Task, mu: int, seed: int, run: Path, beside: int) -> list[str]:
    """The changes to the task's recipe for one of `beside` runs that share the device."""
    settings = [*task.settings, f"run.dir={run}", f"run.seed={seed}"]
    settings += [f"schedule.stages={task.updates // mu}", f"schedule.updates_per_stage={mu}"]
    settings += [f"objective.name={'grpo' if mu == 4 else 'mu_grpo'}"]
    settings += [f"optimizer.lr={RATES[mu] * task.rate}", "optimizer.decay=constant"]
    # After every eight updates: between stages and inside them.
    settings += [f"eval.every_updates={EVERY}", f"eval.every_stages={max(1, EVERY // mu)}", "track.tensorboard=false"]
    settings += [f"engine.extra.{name}={value}" for name, value in attention().items()]
    if torch.cuda.is_available():
        settings += ["model.dtype=bfloat16", f"engine.memory_fraction={0.6 / beside:.3f}"]
    return settings


def run_one(task: Task, mu: int, seed: int, folder: Path, beside: int) -> Row:
    """Train once, in a folder of its own; what it prints is in a log beside that."""
    run = folder / f"{mu}-{seed}-beside-{beside}"
    row = {"mu": mu, "seed": seed, "beside": beside}
    if failure := mugrpo("train", task.recipe, settings_of(task, mu, seed, run, beside), run.with_suffix(".log")):
        return {**row, "failed": failure}
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = [[row["update"], row["accuracy/mean"]] for row in rows if row["kind"] == "eval"]
    return {**row, "curve": curve, "seconds": summary["seconds"]}


def mugrpo(command: str, recipe: Path, settings: list[str], log: Path) -> str:
    """Run one `mugrpo` command, and write what it prints into `log`; returns "", or the last line if it failed."""
    changes = [word for setting in settings for word in ("--set", setting)]
    with log.open("w", encoding="utf-8") as file:
        arguments = [sys.executable, "-m", "mugrpo_megatron", command, str(recipe), *changes]
        done = subprocess.run(arguments, stdout=file, stderr=subprocess.STDOUT)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "" if done.returncode == 0 else (lines or [f"ended with code {done.returncode}"])[-1]


def write_problems(questions: Iterable[tuple[str, str]], path: Path) -> int:
    """Write (question, answer) pairs as JSON lines, each question once; returns how many."""
    rows = dict(questions)
    lines = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows.items()]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def main() -> None:
    from mugrpo_megatron.data.prepare import read_problems
    from mugrpo_megatron.recipe import load_recipe

    recipe = load_recipe(RECIPES / "real_model.toml")
    problems = read_problems(recipe.data, recipe.reward)
    REAL.mkdir(parents=True, exist_ok=True)
    shutil.copytree(recipe.model.directory, REAL / "hf", dirs_exist_ok=True)
    for name, found in (("train", problems.train), ("eval", problems.held_out)):
        count = write_problems(((problem.question, str(problem.gold)) for problem in found), REAL / f"{name}.jsonl")
        print(f"{REAL}/{name}.jsonl: {count} problems")


if __name__ == "__main__":
    main()
