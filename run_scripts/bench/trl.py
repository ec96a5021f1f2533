"""Compares our GRPO and mu-GRPO with TRL's GRPOTrainer: same checkpoint, problems, rewards, number of updates.

    pip install --target DIR --no-deps trl accelerate datasets pandas multiprocess xxhash dill
    PYTHONPATH=DIR python -m run_scripts.bench.trl --model runs/trl/warm-start/hf --updates 128 --rates 2e-4 8e-4

TRL generates every µ updates (`steps_per_generation`) with `transformers`, takes the token-mean loss with clip
[0.8, 1.2], no KL term, AdamW with the same betas and the same linear decay; ours runs run_scripts/bench/trl.toml.
Both train on the same problems in the same order, in the same precision, with the same verifier. Accuracy is greedy, on
the same held-out problems. Start-up and evaluations do not count as training time. Each side runs in its own process,
on all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from mugrpo_megatron.data.order import problem_at
from mugrpo_megatron.data.prepare import prepare
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.report.rundata import read_run, seconds_by_phase
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.samples import Problem
from run_scripts.bench.clock import CPU, CPU_FILE, WALL, CpuMeter, arrival, points, read_cpu_clock

ROOT = Path(__file__).parents[2]
BASE = Path(__file__).with_name("trl.toml")
EVALUATIONS = 4


@dataclass(frozen=True, slots=True)
class Result:
    """One side at one learning rate; points are [update, training wall s, training CPU s, accuracy]."""

    side: str
    rate: float
    points: list[list[float]]
    parts: dict[str, float]
    """Part -> wall-clock seconds."""


def main() -> None:
    options = _options()
    if options.side == "trl":
        result = _run_trl(options)
        print(json.dumps({"points": result.points, "parts": result.parts}))
        return
    results = []
    for rate in options.rates:
        for side in options.sides:
            results.append(_trl_process(options, rate) if side == "trl" else _run_ours(options, side, rate))
            _print(results, options)
            if options.out:
                options.out.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n", encoding="utf-8")


def _run_ours(options: argparse.Namespace, side: str, rate: float) -> Result:
    """Run `mugrpo train` as a user would."""
    mu = options.mu if side == "grpo" else options.updates // 4
    stages = options.updates // mu
    with TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        settings = [
            *_shared(options),
            f"run.dir={directory}",
            f"optimizer.lr={rate:g}",
            f"objective.name={side}",
            f"schedule.stages={stages}",
            f"schedule.updates_per_stage={mu}",
            f"eval.every_stages={max(1, stages // EVALUATIONS)}",
        ]
        command = ["-m", "mugrpo_megatron", "train", str(BASE), *[w for s in settings for w in ("--set", s)]]
        directory.mkdir()
        process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, cwd=ROOT)
        meter = CpuMeter(psutil.Process(process.pid), directory / CPU_FILE)
        while process.poll() is None:
            time.sleep(0.5)
            meter.sample()
        if process.returncode:
            raise SystemExit(f"mugrpo train ended with {process.returncode}")
        run = read_run(directory)
        found = points(run, read_cpu_clock(directory))
        return Result(f"ours, {side}, µ={mu}", rate, found, seconds_by_phase(run.phases))


def _trl_process(options: argparse.Namespace, rate: float) -> Result:
    """Run the TRL side in a new process, with its own threads and patches."""
    command = [
        sys.executable,
        "-m",
        "run_scripts.bench.trl",
        "--side",
        "trl",
        "--rates",
        f"{rate:g}",
        "--model",
        str(options.model),
    ]
    for name in ("updates", "mu", "seed", "eval_problems", "dtype", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += [word for one in options.overrides for word in ("--set", one)]
    done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return Result(f"TRL, µ={options.mu}", rate, found["points"], found["parts"])


def _run_trl(options: argparse.Namespace) -> Result:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    if options.threads:
        torch.set_num_threads(options.threads)
    recipe = load_recipe(BASE, _shared(options))
    rollout, rate = recipe.rollout, options.rates[0]
    tokenizer = load_tokenizer(options.model)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), trust_remote_code=False
    )
    train, held_out = _problems(recipe, tokenizer, options.updates)
    assert tokenizer(train[0].question).input_ids == tokenizer.encode(train[0].question, add_special_tokens=False)

    with Verifier(recipe.reward) as verifier, TemporaryDirectory() as folder:

        def rewards(completions: list[str], answer: list[str], **_: Any) -> list[float]:
            return [score.reward for score in verifier.score(completions, answer)]

        def accuracy() -> float:
            model.eval()
            right = 0.0
            for start in range(0, len(held_out), 500):
                batch = held_out[start : start + 500]
                asked = tokenizer([p.question for p in batch], return_tensors="pt", padding=True)
                with torch.no_grad():
                    ids = model.generate(  # type: ignore[misc]  # a mixin that mypy cannot see
                        **asked, max_new_tokens=rollout.max_response_tokens, do_sample=False
                    )
                texts = tokenizer.batch_decode(ids[:, asked.input_ids.shape[1] :], skip_special_tokens=True)
                right += sum(score.reward for score in verifier.score(texts, [p.answer for p in batch]))
            model.train()
            return right / len(held_out)

        clock = _Stopwatch()
        taken: list[list[float]] = []

        class Evaluate(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                self._take(0)
                clock.start()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step % (options.updates // EVALUATIONS) == 0:
                    self._take(state.global_step)

            def _take(self, update: int) -> None:
                with clock.paused():
                    taken.append([update, round(clock.wall(), 2), round(clock.cpu(), 2), accuracy()])

        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=rewards,
            train_dataset=Dataset.from_list([{"prompt": p.question, "answer": p.answer} for p in train]),
            callbacks=[Evaluate()],
            args=GRPOConfig(
                output_dir=folder,
                seed=options.seed,
                max_steps=options.updates,
                per_device_train_batch_size=rollout.prompts_per_update * rollout.responses_per_prompt,
                gradient_accumulation_steps=1,
                steps_per_generation=options.mu,
                num_generations=rollout.responses_per_prompt,
                max_completion_length=rollout.max_response_tokens,
                temperature=rollout.temperature,
                shuffle_dataset=False,
                learning_rate=rate,
                lr_scheduler_type="linear",
                warmup_steps=recipe.optimizer.warmup_updates,
                adam_beta1=recipe.optimizer.beta1,
                adam_beta2=recipe.optimizer.beta2,
                weight_decay=recipe.optimizer.weight_decay,
                max_grad_norm=recipe.optimizer.clip_grad,
                beta=0.0,
                epsilon=0.2,
                loss_type="dapo",
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                logging_steps=options.updates,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
        )
        parts: dict[str, float] = {}
        trainer._generate_and_score_completions = _timed(  # the only call between generating and optimizing
            trainer._generate_and_score_completions, "generate and score", parts
        )
        with _stdout_to_stderr():
            trainer.train()
    parts["optimize and the rest"] = taken[-1][1] - sum(parts.values())
    return Result("TRL", rate, taken, parts)


class _Stopwatch:
    """Wall and CPU time of this process since `start`, without the intervals in `paused`."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def wall(self) -> float:
        return time.perf_counter() - self._wall

    def cpu(self) -> float:
        return time.process_time() - self._cpu

    @contextmanager
    def paused(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._wall += time.perf_counter() - wall
        self._cpu += time.process_time() - cpu


def _timed(function: Callable[..., Any], name: str, parts: dict[str, float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            parts[name] = parts.get(name, 0.0) + time.perf_counter() - start

    return timed


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect what the trainer prints: stdout is for the result."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _problems(recipe: Recipe, tokenizer: Any, updates: int) -> tuple[list[Problem], list[Problem]]:
    """The run's training problems in its order, and its held-out problems."""
    found = prepare(recipe.data, recipe.reward, tokenizer)
    pool, places = found.train.problems, range(updates * recipe.rollout.prompts_per_update)
    return [pool[problem_at(recipe.run.seed, len(pool), place)] for place in places], found.held_out.problems


def _shared(options: argparse.Namespace) -> list[str]:
    return [
        f"model.path={options.model}",
        f"model.dtype={options.dtype}",
        f"run.seed={options.seed}",
        f"data.eval_problems={options.eval_problems}",
        *options.overrides,
    ]


def _print(results: Sequence[Result], options: argparse.Namespace) -> None:
    table = Table(title=f"{options.updates} updates; seconds of training, wall / CPU", title_justify="left")
    goal = options.goal
    for column in ("side", "rate", "before", "after", "wall s", "CPU s", f"to {100 * goal:.0f} %", "spent on"):
        table.add_column(column, justify="left" if column in ("side", "spent on") else "right")
    for result in results:
        first, last = result.points[0], result.points[-1]
        there = [arrival(result.points, goal, axis) for axis in (WALL, CPU)]
        table.add_row(
            result.side,
            f"{result.rate:g}",
            f"{100 * first[3]:.1f} %",
            f"{100 * last[3]:.1f} %",
            f"{last[1]:.1f}",
            f"{last[2]:.1f}",
            " / ".join("never" if t is None else f"{t:.1f}" for t in there),
            ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.parts.items()),
        )
    Console(width=170).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/trl/warm-start/hf"), help="checkpoint to start from")
    parser.add_argument("--updates", type=int, default=128)
    parser.add_argument("--mu", type=int, default=4, help="updates between two generations, of TRL and of our GRPO")
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-4, 4e-4, 8e-4], help="learning rates")
    parser.add_argument("--sides", nargs="+", default=["trl", "grpo", "mu_grpo"], choices=["trl", "grpo", "mu_grpo"])
    parser.add_argument("--goal", type=float, default=0.6, help="accuracy to reach")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-problems", type=int, default=2000)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--threads", type=int, default=0, help="torch threads of TRL, as many as cores without it; 1 on a busy machine"
    )
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for both sides"
    )
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model = options.model.resolve()
    return options


if __name__ == "__main__":
    main()
