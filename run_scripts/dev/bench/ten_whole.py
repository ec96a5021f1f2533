"""Compares a whole quickstart of mu-GRPO with the same run at µ = 4: a step of run_scripts/dev/bench/ten.py.

Both take as many updates on the same problems. Only `schedule` differs, so the difference in time is the cost of
stages: a sync, a switch and a save in each, and generation in smaller batches.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from run_scripts.dev.bench.ten_learner import attention

RECIPE = "run_scripts/recipes/quickstart.toml"
TINY = (
    "data.eval_problems=20", "rollout.prompts_per_update=8", "rollout.responses_per_prompt=4",
    "engine.max_running_requests=64", "sft.layers=2", "sft.hidden=64", "sft.target_accuracy=1e-9", "sft.batch=16",
)  # fmt: skip
KEPT = ("stages", "updates", "tokens", "accuracy_before", "accuracy_after", "accuracy_interval", "seconds")


def whole(small: bool) -> Iterator[dict[str, Any]]:
    """Seconds per phase and accuracies of both runs, then the ratio of their times without the start."""
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(folder, small)
        mugrpo("sft", settings)
        taken = []
        for stages, updates in ((1, 8), (2, 4)) if small else ((4, 16), (16, 4)):
            run = f"{folder}/{stages}"
            schedule = (f"schedule.stages={stages}", f"schedule.updates_per_stage={updates}", f"run.dir={run}")
            mugrpo("train", [*settings, *schedule])
            summary = json.loads(Path(run, "summary.json").read_text(encoding="utf-8"))
            yield {name: summary[name] for name in KEPT}
            taken.append(summary["seconds"]["total"] - summary["seconds"].get("start", 0.0))
    yield {"ratio_after_start": taken[1] / taken[0]}


def settings_of(folder: str, small: bool) -> list[str]:
    """The recipe's changes; bfloat16 on CUDA, whose attention needs it."""
    settings = [f"model.path={folder}/warm-start/hf", f"sft.output={folder}/warm-start", *(TINY if small else ())]
    settings += [f"engine.extra.{name}={value}" for name, value in attention().items()]
    if torch.cuda.is_available():
        settings += ["model.dtype=bfloat16", "engine.memory_fraction=0.6"]
    return [*settings, "eval.every_stages=0", "track.tensorboard=false"]


def mugrpo(command: str, settings: list[str]) -> None:
    """Run one `mugrpo` command; CalledProcessError when it fails, after what it printed."""
    changes = [word for setting in settings for word in ("--set", setting)]
    subprocess.run([sys.executable, "-m", "mugrpo_megatron", command, RECIPE, *changes], check=True)
