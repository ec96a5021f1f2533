"""A tiny model with the bundled tokenizer, and a recipe that runs it from start to end in seconds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.observe.log import read_rows
from tests import models
from tests.forked import started
from tests.patience import PATIENCE_S

COIN = {"function": "tests.rewards.functions:parity"}
"""A reward section that moves the weights: the tiny model's answers are never right."""


def save_model(directory: Path, family: str = "qwen2") -> Path:
    """A checkpoint of 40k random parameters with the bundled tokenizer: it answers with noise.

    Tied embeddings in the dense model; a mixture of experts has more parameters and, like the public ones, none.
    """
    tokenizer = build_arithmetic_tokenizer()
    models.save_model(
        directory,
        family,
        scale=None,
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        tie_word_embeddings=family == "qwen2",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(directory)
    return directory


def write_recipe(path: Path, model_dir: Path, run_dir: Path, /, **sections: dict[str, Any]) -> Path:
    """A recipe of two stages of two updates on the bundled task; `sections` are merged over it."""
    import tomli_w

    table: dict[str, dict[str, Any]] = {
        "run": {"dir": str(run_dir)},
        "model": {"path": str(model_dir), "dtype": "float32"},
        "data": {"eval_problems": 16, "max_prompt_tokens": 32},
        "schedule": {"stages": 2, "updates_per_stage": 2},
        "rollout": {"prompts_per_update": 4, "responses_per_prompt": 4, "max_response_tokens": 6},
        "optimizer": {"lr": 1e-3},
        "learner": {"threads": 1},
        "engine": {"max_running_requests": 64},
        "track": {"tensorboard": False},
    }
    for name, values in sections.items():
        table[name] = {**table.get(name, {}), **values}
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    return path


FINISHED = {"stages": 2, "updates_per_stage": 12}
"""The schedule of `finish_run`: a stage is long enough for ten skipped updates in a row."""


def write_run(folder: Path, model: Path, /, **sections: dict[str, Any]) -> Path:
    """The recipe of `finish_run` for a run in `folder`, which is made; `sections` are merged over it."""
    folder.mkdir(exist_ok=True)
    shape: dict[str, dict[str, Any]] = {
        "schedule": FINISHED,
        "rollout": {"behaviour": "learner"},
        "checkpoint": {"every_updates": 3, "keep": 50},
        "reward": COIN,
    }
    merged = {name: {**shape.get(name, {}), **sections.get(name, {})} for name in {*shape, *sections}}
    return write_recipe(folder / "recipe.toml", model, folder / "run", **merged)


def finish_run(folder: Path) -> subprocess.CompletedProcess[str]:
    """`mugrpo train` to its end in an interpreter of its own, as a user runs it: `folder/model` -> `folder/run`."""
    recipe = write_run(folder, save_model(folder / "model"))
    command = [sys.executable, "-m", "mugrpo_megatron", "train", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def rows(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """What a run has logged of a kind; nothing where it has no log yet."""
    log = run_dir / "metrics.jsonl"
    return [row for row in read_rows(log) if row["kind"] == kind] if log.exists() else []


def weights(run_dir: Path) -> bytes:
    """The weights that a run, or a stage of it, has left for others."""
    return (run_dir / "hf" / "model.safetensors").read_bytes()


def take_stages(source: Path, run_dir: Path) -> None:
    """Give a new run the stages of the run in `source`, and its id, so that they are its own."""
    shutil.copytree(source / "stages", run_dir / "stages")
    shutil.copyfile(source / "run.json", run_dir / "run.json")


def mugrpo(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command to its end in a forked process; it has to come with exit code `code`."""
    with started(*arguments) as command:
        assert command.wait() == code, command.said
        return subprocess.CompletedProcess([], code, command.stdout, command.stderr)
