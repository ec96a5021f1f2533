"""A run with a sealed stage and no update yet, and runs that take its updates, each in a directory of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from mugrpo_megatron.observe.log import read_rows
from tests.tiny import COIN, mugrpo, save_model, write_recipe


def generate_stage(folder: Path, updates: int, **sections: dict[str, Any]) -> Path:
    """The recipe of a run in `folder` whose only stage is sealed; `sections` are merged over it."""
    recipe = write_recipe(
        folder / "recipe.toml",
        save_model(folder / "model"),
        folder / "run",
        schedule={"stages": 1, "updates_per_stage": updates},
        reward=COIN,
        **sections,
    )
    mugrpo("generate", recipe)
    return recipe


def optimize(recipe: Path, run_dir: Path, *changes: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """`mugrpo optimize` in `run_dir` with some keys changed: a branch of the recipe's run, or that branch resumed."""
    source = [] if run_dir.exists() else ["--stage", "0", "--from", recipe.parent / "run"]
    words = [word for change in (f"run.dir={run_dir}", *changes) for word in ("--set", change)]
    return mugrpo("optimize", recipe, *source, *words, code=code)


def updates_of(run_dir: Path) -> list[dict[str, Any]]:
    """What the run logged of its updates."""
    return [row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "update"]


def weights(run_dir: Path) -> bytes:
    return (run_dir / "hf" / "model.safetensors").read_bytes()
