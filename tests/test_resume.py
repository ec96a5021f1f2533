"""Runs that are killed or asked to stop: nothing finished is lost, and the end is the unbroken run's."""

from __future__ import annotations

import shutil
import signal
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from mugrpo_megatron.engine.sglang_compat import has_gated_delta
from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.recipe.removed import KEYS
from mugrpo_megatron.run.checkpoints import complete_checkpoints, newest_cursor
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.stages.store import StageStore
from tests.forked import Command, started
from tests.patience import PATIENCE_S
from tests.tiny import FINISHED, mugrpo, rows, save_model, take_stages, weights, write_recipe, write_run

UPDATES, EVERY = FINISHED["updates_per_stage"], 4

pytestmark = pytest.mark.process


@pytest.fixture
def recipe(finished_run: Path, tmp_path: Path) -> Path:
    """For a run which has the sealed stages of the finished one and no update yet, and is evaluated inside them."""
    take_stages(finished_run, tmp_path / "run")
    return write_run(tmp_path, finished_run.parent / "model", eval={"every_updates": EVERY})


def update_rows(run_dir: Path) -> list[int]:
    return [row["update"] for row in rows(run_dir, "update")]


def evaluated(run_dir: Path) -> list[int]:
    return [row["update"] for row in rows(run_dir, "eval")]


def wait_for(command: Command, run_dir: Path, kind: str, count: int) -> None:
    """Until the run has logged `count` rows of a kind."""
    log = run_dir / "metrics.jsonl"
    while not log.exists() or sum(row["kind"] == kind for row in read_rows(log)) < count:
        assert command.wait(0.05) is None, f"ended before {count} {kind} rows: {command.said}"


@contextmanager
def interrupted(name: str, recipe: Path, updates: int) -> Iterator[Command]:
    """A command on its way, `updates` updates into the run; every process of it is gone when the block ends."""
    with started(name, recipe) as command:
        wait_for(command, recipe.parent / "run", "update", updates)
        offspring = command.offspring
        yield command
        command.wait()
    _, alive = psutil.wait_procs(offspring, timeout=PATIENCE_S)
    assert alive == []


def hold_removed_keys(path: Path) -> None:
    """Write the keys that recipes no longer have into a run's recipe, at the defaults that they had."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    for key, removed in KEYS.items():
        section, name = key.split(".")
        table[section][name] = removed.default
    path.write_text(tomli_w.dumps(table), encoding="utf-8")


def kill(name: str, recipe: Path, updates: int) -> int:
    """Kill the command after as many updates; how many rows its next start may repeat."""
    run_dir = recipe.parent / "run"
    with interrupted(name, recipe, updates) as command:
        command.process.kill()
    repeated = len(update_rows(run_dir)) - newest_cursor(run_dir / "checkpoints").updates
    assert repeated <= 6, "no more is repeated than the checkpoint before the one under way lacks"
    return repeated


@pytest.mark.parametrize("updates", [pytest.param(1, marks=pytest.mark.night), 8])
def test_a_stage_killed_while_optimizing_ends_bitwise_like_the_unbroken_one(
    updates: int, finished_run: Path, recipe: Path
) -> None:
    run_dir = recipe.parent / "run"
    repeated = kill("optimize", recipe, updates)
    assert "nothing is evaluated inside the stage" in mugrpo("optimize", recipe).stdout
    assert evaluated(run_dir) == []
    end = "checkpoints/stage00001-age00000/__0_0.distcp"
    assert (run_dir / end).read_bytes() == (finished_run / end).read_bytes()
    taken = update_rows(run_dir)
    assert set(taken) == set(range(UPDATES))
    assert len(taken) - UPDATES == repeated, "a resume goes on from the newest checkpoint that was complete"


@pytest.mark.slow
def test_an_evaluated_run_that_was_stopped_and_killed_ends_bitwise_like_the_unbroken_one(
    finished_run: Path, recipe: Path
) -> None:
    """Ctrl-C in the first stage, SIGKILL in the second; the finished run was not evaluated inside its stages.

    Between the two its recipe.toml is one of an earlier version, with keys that were removed since.
    """
    run_dir = recipe.parent / "run"
    with interrupted("train", recipe, EVERY + 3) as command:
        psutil.Process(command.pid).send_signal(signal.SIGINT)
        assert command.wait() == 130, command.said
        assert "stopped as asked" in command.stdout
    assert update_rows(run_dir) == list(range(newest_cursor(run_dir / "checkpoints").updates))
    hold_removed_keys(run_dir / "recipe.toml")
    repeated = kill("train", recipe, UPDATES + 5)
    mugrpo("train", recipe)
    taken = update_rows(run_dir)
    assert set(taken) == set(range(2 * UPDATES))
    assert len(taken) - 2 * UPDATES == repeated, "nothing is repeated after an orderly stop"
    assert evaluated(run_dir) == list(range(0, 2 * UPDATES + 1, EVERY)), "and nothing twice"
    assert weights(run_dir) == weights(finished_run)


@pytest.mark.night
@pytest.mark.skipif(not has_gated_delta(), reason="the pinned SGLang has no class for the text of Qwen3.5")
def test_a_killed_run_in_bfloat16_keeps_float32_rows_and_ends_bitwise_like_the_unbroken_one(tmp_path: Path) -> None:
    """Qwen3.5's decays and norms of heads: into the engine, through a resume, into `hf/`."""
    model = save_model(tmp_path / "model", "qwen3_5_text")
    shape: dict[str, dict[str, Any]] = {"model": {"dtype": "bfloat16"}, "engine": {"check_weights": "every"}}
    mugrpo("train", write_run(tmp_path / "unbroken", model, **shape))
    unbroken, run_dir = tmp_path / "unbroken" / "run", tmp_path / "killed" / "run"
    take_stages(unbroken, run_dir)
    recipe = write_run(tmp_path / "killed", model, **shape)
    kill("train", recipe, UPDATES + 5)
    mugrpo("train", recipe)
    assert weights(run_dir) == weights(unbroken)
    measured = [{row["update"]: row["grad_norm"] for row in rows(run, "update")} for run in (run_dir, unbroken)]
    assert measured[0] == measured[1]
    assert all(row["checked"] for row in rows(unbroken, "phase") if row["phase"] == "sync")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run_dir / "hf"))
    wide = {name: tensor for name, tensor in after.items() if tensor.dtype == torch.float32}
    assert wide.keys() == {name for name in after if name.endswith(("A_log", "linear_attn.norm.weight"))}
    assert not any(torch.equal(tensor, tensor.bfloat16().float()) for tensor in wide.values())
    assert not any(torch.equal(tensor, before[name]) for name, tensor in wide.items())


@pytest.mark.night
def test_an_engine_killed_while_generating_costs_no_group(tmp_path: Path) -> None:
    prompts, updates = 64, 20
    shape: dict[str, dict[str, Any]] = {
        "schedule": {"stages": 1, "updates_per_stage": updates},
        "rollout": {"prompts_per_update": prompts},
    }
    recipe = write_recipe(tmp_path / "recipe.toml", save_model(tmp_path / "model"), tmp_path / "run", **shape)
    with started("generate", recipe, real_engine=True) as command:
        wait_for(command, tmp_path / "run", "eval", 1)
        [engine] = command.hosts
        engine.kill()
        assert command.wait() == 0, command.said
        assert "restarted for what is missing" in command.said
    store = StageStore(tmp_path / "run" / "stages" / "00000")
    assert store.verified_groups() == set(range(prompts * updates))
    assert [sample.group for sample in store.read_update(1)[::4]] == list(range(prompts, 2 * prompts))


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, as if it had been killed at the start of its second stage."""
    shutil.copytree(finished_run, tmp_path / "run")
    for path in complete_checkpoints(tmp_path / "run" / "checkpoints"):
        if path.name > "stage00001-age00000":
            shutil.rmtree(path)
    (tmp_path / "run" / "summary.json").unlink()
    write_run(tmp_path, finished_run.parent / "model")
    return tmp_path / "run"


def flipped_behaviour(run: Path) -> None:
    path = run / "stages" / "00001" / "behaviour.parquet"
    data = bytearray(path.read_bytes())
    data[20] ^= 1  # in the first update
    path.write_bytes(data)


def test_damaged_logprobs_and_damaged_checkpoints_are_told(run: Path) -> None:
    """A flipped byte of what the update trains on ends the command; a damaged checkpoint is passed over aloud."""
    whole = (run / "stages" / "00001" / "behaviour.parquet").read_bytes()
    flipped_behaviour(run)
    said = mugrpo("optimize", run.parent / "recipe.toml", code=2)
    assert "behaviour.parquet: damaged, since bytes" in said.stderr
    (run / "stages" / "00001" / "behaviour.parquet").write_bytes(whole)
    (run / "checkpoints" / "stage00001-age00000" / "state.json").unlink()
    told = mugrpo("optimize", run.parent / "recipe.toml").stdout
    assert "has no state.json" in told
    assert "kept as stage00001-age00000.damaged, and the run resumes from stage00000-age00009" in told
    assert newest_cursor(run / "checkpoints") == Cursor(1, 0, FINISHED["updates_per_stage"])
    assert '"event": "damaged_checkpoint"' in (run / "metrics.jsonl").read_text()
