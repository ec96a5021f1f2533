"""Two engines fill one stage: one of them is killed, then the whole job, and one engine alone continues."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.manifest import manifest_name, read_manifest
from mugrpo_megatron.stages.schema import to_samples
from mugrpo_megatron.stages.store import StageStore
from tests.scaling.nodes import TORCHRUN, kill, said, wait_until
from tests.stages.test_store import assert_same
from tests.tiny import COIN, mugrpo, rows, save_model, write_recipe

pytestmark = pytest.mark.process

UPDATES, PROMPTS = 40, 64
GROUPS = UPDATES * PROMPTS


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


def by_group(samples: Iterable[Sample], wanted: set[int]) -> dict[int, list[Sample]]:
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.group in wanted:
            found.setdefault(sample.group, []).append(sample)
    return found


def on_disk(stage: Path) -> Iterator[Sample]:
    """What a stage that is not sealed has in its shards."""
    for writer in (0, 1):
        for shard in read_manifest(stage, manifest_name(writer)).shards:
            yield from to_samples(pq.read_table(stage / shard.file))


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
    logs = tmp_path / "logs"
    logs.mkdir()
    with (logs / "output.log").open("wb") as file:
        torchrun = subprocess.Popen([TORCHRUN, "2", "train", str(recipe)], stdout=file, stderr=file)
    first, second = run_dir / "stages" / "00000", run_dir / "stages" / "00001"
    try:
        wait_until(lambda: all(committed(first)), [torchrun], logs)
        engine_of(torchrun, rank=1).kill()
        # Its leader restarts it, the stage is completed and optimized, and the next one begins on both engines.
        wait_until(lambda: all(committed(second)), [torchrun], logs)
    finally:
        kill(torchrun)
    assert "rank 1: the engine's host process is gone" in said(logs)
    (failure,) = [row for row in rows(run_dir, "event") if row["event"] == "engine_failure"]
    assert "rank 1" in failure["text"]
    sealed = StageStore(first)
    assert sealed.sealed
    for update in range(UPDATES):
        expected = [group for group in range(update * PROMPTS, (update + 1) * PROMPTS) for _ in range(4)]
        assert [sample.group for sample in sealed.read_update(update)] == expected

    zero, one = committed(second)
    assert zero.isdisjoint(one), "no group was claimed twice"
    before = by_group(on_disk(second), zero | one)
    mugrpo("train", recipe)
    store = StageStore(second)
    assert store.verified_groups() == set(range(GROUPS))
    after = by_group((one for update in range(UPDATES) for one in store.read_update(update)), zero | one)
    assert before.keys() == after.keys() == zero | one
    for group, samples in before.items():
        assert_same(after[group], samples)
    assert [row["mismatch_max"] < 1e-4 for row in rows(run_dir, "stage")] == [True, True]
    assert len({row["update"] for row in rows(run_dir, "update")}) == 2 * UPDATES
