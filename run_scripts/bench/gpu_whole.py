"""Compares a whole small run of mu-GRPO with the same run at µ = 4: the last part of run_scripts/bench/gpu.py.

Both start from the same warm start of the bundled task and take the same number of updates on the same problems and as
many responses. Only `schedule.stages` and `schedule.updates_per_stage` differ, so the difference in time is the cost of
stages: a sync, a switch and a save in each, and generation in smaller batches.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from run_scripts.bench.gpu_parts import How, attention

Result = dict[str, Any]
SCHEDULES = {"mu_grpo": (4, 16), "mu_4": (16, 4)}
"""Run -> stages, updates per stage."""
SMALL_SCHEDULES = {"mu_grpo": (1, 8), "mu_4": (2, 4)}


def whole(how: How) -> Result:
    """Seconds per phase and accuracies of both runs, and the ratio of their times.

    `wall_clock_ratio` compares total times; `ratio_after_start` is without the start of learner and engine.
    Raises RuntimeError with the last line of a command's errors.
    """
    schedules = SMALL_SCHEDULES if how.small else SCHEDULES
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.toml"
        recipe.write_text(recipe_text(Path(folder), how), encoding="utf-8")
        mugrpo("sft", recipe, Path(folder) / "sft.log")
        found = {name: one_run(recipe, Path(folder) / name, *schedule) for name, schedule in schedules.items()}
    taken, taken_by_4 = found["mu_grpo"]["seconds"], found["mu_4"]["seconds"]
    return {
        **found,
        "wall_clock_ratio": taken_by_4["total"] / taken["total"],
        "ratio_after_start": _after_start(taken_by_4) / _after_start(taken),
    }


def recipe_text(folder: Path, how: How) -> str:
    """The quickstart's task as TOML without the schedule; in bfloat16 on CUDA, whose attention needs it."""
    from mugrpo_megatron.recipe import Recipe, dump_recipe

    small = how.small
    warm_start = {"layers": 2, "hidden": 64, "target_accuracy": 1e-9, "batch": 16} if small else {}
    table = {
        "model": {
            "path": str(folder / "warm-start" / "hf"),
            "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        },
        "data": {"eval_problems": 20 if small else 500, "max_prompt_tokens": 32},
        "rollout": {
            "prompts_per_update": 8 if small else 64,
            "responses_per_prompt": 4 if small else 8,
            "max_response_tokens": 8,
        },
        "objective": {"name": "mu_grpo"},
        "optimizer": {"lr": 2e-4, "decay": "linear"},
        "engine": {
            "memory_fraction": 0.6,
            "max_running_requests": 64 if small else 2048,
            "extra": attention(),
        },
        "eval": {"every_stages": 0},
        "track": {"tensorboard": False},
        "sft": {"output": str(folder / "warm-start"), "target_accuracy": 0.4, **warm_start},
    }
    return dump_recipe(Recipe.model_validate(table))


def one_run(recipe: Path, directory: Path, stages: int, updates_per_stage: int) -> Result:
    """Run `mugrpo train` with this schedule; returns figures of its summary.json."""
    schedule = {"stages": stages, "updates_per_stage": updates_per_stage}
    settings = [f"run.dir={directory}", *(f"schedule.{key}={value}" for key, value in schedule.items())]
    mugrpo("train", recipe, directory.with_suffix(".log"), *settings)
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    kept = ("stages", "updates", "tokens", "accuracy_before", "accuracy_after", "accuracy_interval", "seconds")
    return {name: summary[name] for name in kept}


def mugrpo(command: str, recipe: Path, log: Path, *overrides: str) -> None:
    """Run one `mugrpo` command, with all that it prints in `log`."""
    settings = [word for override in overrides for word in ("--set", override)]
    call = [sys.executable, "-m", "mugrpo_megatron", command, str(recipe), *settings]
    with log.open("w") as file:
        done = subprocess.run(call, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        said = log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"mugrpo {command} ended with code {done.returncode}: {said[-1] if said else 'no output'}")


def _after_start(seconds: dict[str, float]) -> float:
    return seconds["total"] - seconds.get("start", 0.0)
