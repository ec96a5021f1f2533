"""A run that is killed in a stage and continued ends with the weights of the unbroken run, bit for bit.

On a GPU with `run.deterministic`. The stage is imported and `mugrpo optimize` takes its updates, so no engine starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mugrpo_megatron.extras.exchange.import_rollouts import import_rollouts
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.run.checkpoints import complete_checkpoints
from tests.gpu.tiny import CUDA, save_model, sections
from tests.patience import PATIENCE_S
from tests.tiny import rows, weights, write_recipe

UPDATES, EVERY = 48, 4
"""Of the stage, and between two checkpoints."""
PROMPTS, RESPONSES = 4, 4
"""Of an update."""


def save_stage(folder: Path, model: Path) -> Path:
    """A stage of UPDATES updates, whose rewards differ in every group."""
    file = folder / "rollouts.jsonl"
    logged = [
        {"step": step, "prompt": f"{step}+{place}=", "completion": str(step * said + place), "parity": float(said % 2)}
        for step in range(UPDATES)
        for place in range(PROMPTS)
        for said in range(RESPONSES)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in logged), encoding="utf-8")
    recipe = write_recipe(folder / "import.toml", model, folder / "imported", **shape())
    import_rollouts(file, load_recipe(recipe), folder / "stage", "parity", say=lambda line: None)
    return folder / "stage"


def shape() -> dict[str, dict[str, object]]:
    return sections(
        run={"deterministic": CUDA},  # a CPU's learner is deterministic as it is
        rollout={"behaviour": "learner", "prompts_per_update": PROMPTS, "responses_per_prompt": RESPONSES},
        schedule={"stages": 1, "updates_per_stage": UPDATES},
        checkpoint={"every_updates": EVERY, "keep": 50},
    )


def command_of(recipe: Path, *options: object) -> list[str]:
    return [sys.executable, "-m", "mugrpo_megatron", "optimize", str(recipe), *map(str, options)]


def finish(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


def taken(run: Path) -> list[str]:
    """Names of the complete checkpoints inside the stage."""
    names = [path.name for path in complete_checkpoints(run / "checkpoints")]
    return [name for name in names if not name.endswith("-age00000")]


def kill_at_a_checkpoint(command: Sequence[str], run: Path) -> int:
    """Kill the run once it has a checkpoint inside the stage; returns how many updates it had logged by then."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE_S
        # A checkpoint is written beside the updates that follow it: what is logged says nothing of what is on disk.
        while not taken(run) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    return len(rows(run, "update"))


@pytest.mark.process
@pytest.mark.night
def test_a_killed_run_ends_with_the_bits_of_the_unbroken_one(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    model = save_model(tmp_path / "model")
    stage = save_stage(tmp_path, model)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(command_of(write_recipe(tmp_path / "whole.toml", model, whole, **shape()), "--from", stage))
    recipe = write_recipe(tmp_path / "broken.toml", model, broken, **shape())
    killed = kill_at_a_checkpoint(command_of(recipe, "--from", stage), broken)
    assert EVERY <= killed < UPDATES, "killed between a checkpoint and the stage's end"
    finish(command_of(recipe))
    record_property("updates before the kill", killed)
    found = [row["update"] for row in rows(broken, "update")]
    resumed = UPDATES - (len(found) - killed)
    assert found == [*range(killed), *range(resumed, UPDATES)]
    assert 0 < resumed <= killed
    assert resumed % EVERY == 0, "it goes on at a checkpoint"
    assert all(row["grad_norm"] > 0 for row in rows(whole, "update"))
    assert weights(broken) == weights(whole) != (model / "model.safetensors").read_bytes()
