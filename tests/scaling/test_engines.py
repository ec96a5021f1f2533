"""Two engines fill one stage: one of them is killed, then the whole job, and one engine alone continues."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.manifest import manifest_name, read_manifest
from mugrpo_megatron.stages.store import StageStore
from tests.scaling.nodes import TORCHRUN, kill
from tests.stages.test_store import assert_same
from tests.tiny import COIN, mugrpo, rows, save_model, write_recipe

pytestmark = pytest.mark.process

UPDATES, PROMPTS = 40, 64
GROUPS = UPDATES * PROMPTS


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], output: Path) -> None:
    while not condition():
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(output.read_text())


def committed(stage: Path) -> list[set[int]]:
    """What each of two writers has made durable."""
    shards = [read_manifest(stage, manifest_name(writer)).shards for writer in (0, 1)]
    return [{group for shard in own for group in shard.groups} for own in shards]


def engine_of(torchrun: subprocess.Popen[bytes], rank: int) -> psutil.Process:
    for process in psutil.Process(torchrun.pid).children(recursive=True):
        if "mugrpo_megatron.engine.host" in process.cmdline():
            parent = process.parent()
            assert parent is not None
            if parent.environ()["RANK"] == str(rank):
                return process
    raise AssertionError(f"rank {rank} leads no engine")


def groups_of(store: StageStore, wanted: set[int]) -> dict[int, list[Sample]]:
    """Some groups of a sealed stage."""
    found: dict[int, list[Sample]] = {}
    for update in range(UPDATES):
        for sample in store.read_update(update):
            if sample.group in wanted:
                found.setdefault(sample.group, []).append(sample)
    return found


def groups_on_disk(stage: Path, wanted: set[int]) -> dict[int, list[Sample]]:
    """Some groups of a stage that is not sealed, from its shards."""
    import pyarrow.parquet as pq

    from mugrpo_megatron.stages.schema import to_samples

    found: dict[int, list[Sample]] = {}
    for writer in (0, 1):
        for shard in read_manifest(stage, manifest_name(writer)).shards:
            for sample in to_samples(pq.read_table(stage / shard.file)):
                if sample.group in wanted:
                    found.setdefault(sample.group, []).append(sample)
    return found


@pytest.mark.night
def test_an_engine_dies_then_the_job_and_a_single_process_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        save_model(tmp_path / "model"),
        run_dir,
        schedule={"stages": 2, "updates_per_stage": UPDATES},
        rollout={"prompts_per_update": PROMPTS},
        engine={"max_running_requests": 64},
        reward=COIN,
    )
    output = tmp_path / "output.log"
    with output.open("wb") as file:
        torchrun = subprocess.Popen([TORCHRUN, "2", "train", str(recipe)], stdout=file, stderr=file)
    first, second = run_dir / "stages" / "00000", run_dir / "stages" / "00001"
    try:
        wait_until(lambda: all(committed(first)), torchrun, output)
        engine_of(torchrun, rank=1).kill()
        # Its leader restarts it, the stage is completed and optimized, and the next one begins on both engines.
        wait_until(lambda: all(committed(second)), torchrun, output)
    finally:
        kill(torchrun)
    assert "rank 1: the engine's host process is gone" in output.read_text()
    (failure,) = [row for row in rows(run_dir, "event") if row["event"] == "engine_failure"]
    assert "rank 1" in failure["text"]
    sealed = StageStore(first)
    assert sealed.sealed
    for update in range(UPDATES):
        expected = [group for group in range(update * PROMPTS, (update + 1) * PROMPTS) for _ in range(4)]
        assert [sample.group for sample in sealed.read_update(update)] == expected

    zero, one = committed(second)
    assert zero.isdisjoint(one), "no group was claimed twice"
    before = groups_on_disk(second, zero | one)
    mugrpo("train", recipe)
    store = StageStore(second)
    assert store.present() == set(range(GROUPS))
    after = groups_of(store, zero | one)
    assert before.keys() == after.keys() == zero | one
    for group, samples in before.items():
        assert_same(after[group], samples)
    assert [row["mismatch_max"] < 1e-4 for row in rows(run_dir, "stage")] == [True, True]
    assert len({row["update"] for row in rows(run_dir, "update")}) == 2 * UPDATES
