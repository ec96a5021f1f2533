"""A run killed again and again, at any moment: nothing committed is lost, and the end is the unbroken run's."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mugrpo_megatron.observe.log import read_rows
from tests.forked import started
from tests.patience import PATIENCE_S
from tests.tiny import COIN, mugrpo, save_model, take_stages, weights, write_recipe

pytestmark = pytest.mark.process

UPDATES, PROMPTS = 12, 128
"""Stages of 6,144 responses: the first shard, of 4,096, is committed well before the last response."""

Rows = list[dict[str, object]]

LOGGED: dict[str, Callable[[Rows], bool]] = {
    "start": lambda rows: True,
    "sync": lambda rows: any(row.get("phase") == "start" for row in rows),
    "generate": lambda rows: any(row.get("phase") == "sync" for row in rows),
    "score": lambda rows: any(row.get("phase") == "generate" for row in rows),
    "optimize": lambda rows: any(row["kind"] == "update" for row in rows),
    "published": lambda rows: any(row.get("phase") == "save" for row in rows),
}
"""Moments that the rows of this process show; a random time later it dies."""
WRITTEN = {
    "shard": ("stages/*/.shard-*.partial", "stages/*/shard-*.parquet"),
    "seal": ("stages/*/.stage.parquet.*.partial", "stages/*/stage.parquet"),
    "proximal": ("proximal/.*.partial", "proximal/*.parquet"),
    "save": ("checkpoints/.*.partial", "checkpoints/stage*"),
}
"""Moments that a new file shows: a temporary one or, since that comes and goes between two looks, the finished one."""
MOMENTS = (*LOGGED, *WRITTEN)


def contents(run_dir: Path) -> dict[tuple[str, int], str]:
    """(stage, group) -> digest of its rows, of every group that a manifest names; read without the store."""
    found: dict[tuple[str, int], str] = {}
    for stage in sorted(run_dir.glob("stages/*")):
        for manifest in sorted(stage.glob("manifest*.json")):
            body = json.loads(manifest.read_text(encoding="utf-8"))["stage"]
            names = [body["sealed"]["file"]] if body["sealed"] else [shard["file"] for shard in body["shards"]]
            for name in names:
                for group, digest in digests(pq.read_table(stage / name)):
                    assert (stage.name, group) not in found, "a group is there twice"
                    found[stage.name, group] = digest
    return found


def digests(table: pa.Table) -> Iterator[tuple[int, str]]:
    rows: dict[int, list[object]] = {}
    for row in table.to_pylist():
        rows.setdefault(row["group"], []).append(row)
    for group, members in rows.items():
        yield group, hashlib.sha256(repr(members).encode()).hexdigest()


def kill_at(name: str, delay_s: float, recipe: Path, run_dir: Path) -> bool:
    """Start the run and kill all of its processes `delay_s` after the moment; False if it was done before."""
    log = run_dir / "metrics.jsonl"
    before = len(read_rows(log)) if log.exists() else 0
    earlier = files_of(name, run_dir)
    due: float | None = None
    with started("train", recipe, real_engine=True) as command:
        while due is None or time.monotonic() < due:
            if (code := command.wait(0.005)) is not None:
                assert code == 0, command.said
                return False
            rows = read_rows(log)[before:] if log.exists() else []
            logged = name in LOGGED and LOGGED[name](rows)
            if due is None and (logged or files_of(name, run_dir) - earlier):
                due = time.monotonic() + delay_s
        family = command.family  # the whole job is killed as the block ends: nobody is left who could tidy up
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == []
    return True


def files_of(name: str, run_dir: Path) -> set[Path]:
    return {path for pattern in WRITTEN.get(name, ()) for path in run_dir.glob(pattern)}


def killed_again_and_again(folder: Path, kills: list[str], stages: int, seed: int) -> dict[str, int]:
    """Kill one run at each of `kills`, let it finish, check it against the unbroken one; how many of each came true."""
    folder.mkdir(exist_ok=True)
    shape: dict[str, dict[str, Any]] = {
        "schedule": {"stages": stages, "updates_per_stage": UPDATES},
        "rollout": {"prompts_per_update": PROMPTS},
        "objective": {"name": "off_policy_grpo", "proximal_every": 5},
        "checkpoint": {"every_updates": 3},
        "engine": {"max_running_requests": 256},
        "reward": COIN,
    }
    model = save_model(folder / "model")
    run_dir = folder / "run"
    recipe = write_recipe(folder / "recipe.toml", model, run_dir, **shape)
    draw = random.Random(seed)
    committed: dict[tuple[str, int], str] = {}
    hit: dict[str, int] = {}
    for name in kills:
        delay_s = draw.uniform(0.0, 12.0) if name == "start" else draw.uniform(0.0, 0.3)
        if not kill_at(name, delay_s, recipe, run_dir):
            break  # it ended before the moment came: the run is over
        hit[name] = hit.get(name, 0) + 1
        now = contents(run_dir)
        assert committed.items() <= now.items(), f"groups were lost or changed around the kill at {name}"
        committed = now

    mugrpo("train", recipe)
    final = contents(run_dir)
    assert committed.items() <= final.items()
    assert set(final) == {(f"{stage:05d}", group) for stage in range(stages) for group in range(UPDATES * PROMPTS)}
    updates = {row["update"] for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "update"}
    assert updates == set(range(stages * UPDATES))

    # The same sealed stages, in one go.
    take_stages(run_dir, folder / "unbroken")
    mugrpo("train", write_recipe(folder / "unbroken.toml", model, folder / "unbroken", **shape))
    assert weights(run_dir) == weights(folder / "unbroken")
    assert weights(run_dir) != (model / "model.safetensors").read_bytes()
    return hit


@pytest.mark.night
def test_killed_while_generating_sealing_refreshing_optimizing_and_saving(tmp_path: Path) -> None:
    hit = killed_again_and_again(tmp_path, ["shard", "seal", "proximal", "optimize", "save"], stages=1, seed=0)
    assert sum(hit.values()) == 5


@pytest.mark.night
@pytest.mark.parametrize("seed", range(8))
def test_killed_at_random_moments(seed: int, tmp_path: Path) -> None:
    """Up to 10 kills of each of 8 runs, every kind of moment once, in random order, until the run ends."""
    kills = list(MOMENTS)
    random.Random(seed).shuffle(kills)
    hit = killed_again_and_again(tmp_path, kills, stages=3, seed=seed)
    assert sum(hit.values()) >= 4
