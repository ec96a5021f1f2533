"""Both sides of a comparison with TRL: `mugrpo train` and TRL's GRPOTrainer on one run, each in its own process.

TRL generates every µ updates (`steps_per_generation`) with `transformers`, takes the token-mean loss with clip
[0.8, 1.2], no KL term, AdamW with the same betas and the same learning-rate schedule; ours runs a recipe. Both train on
the same problems in the same order, with the same verifier. Start-up and evaluations do not count as training time.

TRL is not a dependency; it is found on PYTHONPATH:

    pip install --target DIR --no-deps trl==1.16.0 accelerate datasets pandas multiprocess xxhash dill
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from mugrpo_megatron.data.prepare import prepare, problem_at
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.observe.rundata import read_run, seconds_by_phase
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.samples import Problem
from run_scripts.bench.clock import CPU_FILE, CpuMeter, points, read_cpu_clock

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Job:
    """What both sides train."""

    base: str
    """The recipe's file."""
    model: str
    updates: int
    mu: int
    """Updates between two generations."""
    rate: float
    overrides: tuple[str, ...] = ()
    """`SECTION.KEY=VALUE` settings of the recipe, for both sides."""
    evaluations: int = 4
    """Between the first update and the end; with 0, TRL's side evaluates nothing."""
    dtype: str = "float32"
    attention: str = "sdpa"
    """TRL's implementation of attention, by transformers' name."""
    threads: int = 0
    """torch threads of TRL's process; 0 takes as many as there are cores."""

    def recipe(self) -> Recipe:
        return load_recipe(Path(self.base), self.settings())

    def settings(self) -> list[str]:
        return [f"model.path={self.model}", f"model.dtype={self.dtype}", *self.overrides]


@dataclass(frozen=True, slots=True)
class Result:
    """One side at one learning rate; points are [update, training wall s, training CPU s, accuracy]."""

    side: str
    rate: float
    points: list[list[float]]
    parts: dict[str, float]
    """Part -> wall-clock seconds."""


def run_ours(job: Job, objective: str, checkout: Path = ROOT) -> Result:
    """Run `mugrpo train` as a user would, with the code of a checkout of this project."""
    stages = job.updates // job.mu
    with TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        settings = [
            *job.settings(),
            f"run.dir={directory}",
            f"optimizer.lr={job.rate:g}",
            f"objective.name={objective}",
            f"schedule.stages={stages}",
            f"schedule.updates_per_stage={job.mu}",
            f"eval.every_stages={max(1, stages // job.evaluations) if job.evaluations else 0}",
        ]
        command = ["-m", "mugrpo_megatron", "train", job.base, *[word for one in settings for word in ("--set", one)]]
        directory.mkdir()
        places = filter(None, [str(checkout), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.DEVNULL,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        )
        meter = CpuMeter(psutil.Process(process.pid), directory / CPU_FILE)
        while process.poll() is None:
            time.sleep(0.5)
            meter.sample()
        if process.returncode:
            raise SystemExit(f"mugrpo train ended with {process.returncode}")
        run = read_run(directory)
        found = points(run, read_cpu_clock(directory))
        return Result(f"ours, {objective}, µ={job.mu}", job.rate, found, seconds_by_phase(run.phases))


def run_trl(job: Job) -> Result:
    """Run TRL's trainer in a new process, with its own threads and patches."""
    command = [sys.executable, "-m", "run_scripts.bench.trl_trainer", json.dumps(asdict(job))]
    done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return Result(f"TRL, {job.dtype}, µ={job.mu}", job.rate, found["points"], found["parts"])


def problems(job: Job, recipe: Recipe) -> tuple[list[Problem], list[Problem]]:
    """The run's training problems in its order, and its held-out problems."""
    found = prepare(recipe.data, recipe.reward, load_tokenizer(Path(job.model)))
    pool, places = found.train.problems, range(job.updates * recipe.rollout.prompts_per_update)
    return [pool[problem_at(recipe.run.seed, len(pool), place)] for place in places], found.held_out.problems
