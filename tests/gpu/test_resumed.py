"""A run that is killed in a stage and continued ends with the weights of the unbroken run, bit for bit.

On a GPU with `run.deterministic`. Both optimize the same stage, so what the engine samples does not matter.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.tiny import CUDA, save_model, sections
from tests.patience import PATIENCE_S
from tests.tiny import COIN, rows, take_stages, weights, write_recipe

UPDATES, EVERY = 24, 4
"""Of the stage, and between two checkpoints."""


def command_of(recipe: Path) -> list[str]:
    return [sys.executable, "-m", "mugrpo_megatron", "train", str(recipe)]


def finish(recipe: Path) -> None:
    done = subprocess.run(command_of(recipe), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


def kill_after(recipe: Path, run: Path, updates: int) -> int:
    """Kill the run once it has logged so many updates; returns how many it had when it was dead."""
    process = subprocess.Popen(command_of(recipe), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(rows(run, "update")) < updates and process.poll() is None and time.monotonic() < deadline:
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
    shape = sections(
        reward=COIN,
        run={"deterministic": CUDA},  # a CPU's learner is deterministic as it is
        schedule={"stages": 1, "updates_per_stage": UPDATES},
        checkpoint={"every_updates": EVERY, "keep": 50},
        eval={"every_stages": 0},
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(write_recipe(tmp_path / "whole.toml", model, whole, **shape))
    take_stages(whole, broken)
    recipe = write_recipe(tmp_path / "broken.toml", model, broken, **shape)
    killed = kill_after(recipe, broken, EVERY + 2)
    assert EVERY < killed < UPDATES, "killed between a checkpoint and the stage's end"
    finish(recipe)
    record_property("updates before the kill", killed)
    found = [row["update"] for row in rows(broken, "update")]
    resumed = UPDATES - (len(found) - killed)
    assert found == [*range(killed), *range(resumed, UPDATES)]
    assert 0 < resumed <= killed
    assert resumed % EVERY == 0, "it goes on at a checkpoint"
    assert weights(broken) == weights(whole)
