"""Two nodes of four ranks, TP2 x PP2 x DP2, an engine on each: they train together, one is cut off, the run resumes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.run.checkpoints import newest_cursor
from mugrpo_megatron.stages.store import StageStore
from tests.scaling.nodes import Cluster, kill, two_nodes
from tests.tiny import COIN, save_model, write_recipe

pytestmark = pytest.mark.process

RANKS = 4
UPDATES, EVERY = 12, 2
TIMEOUT_S = 60
FAILURE = re.compile(r"rank (\d) of 8 failed in (.+?): (.+)")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_nodes() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    return write_recipe(
        folder / "recipe.toml",
        save_model(folder / "model"),
        folder / "run",
        run={"dir": str(folder / "run"), "collective_timeout_s": TIMEOUT_S},
        schedule={"stages": 1, "updates_per_stage": UPDATES},
        parallel={"tensor": 2, "pipeline": 2},
        engine={"max_running_requests": 64},
        checkpoint={"every_updates": EVERY},
        reward=COIN,
    )


def start(cluster: Cluster, recipe: Path, logs: Path) -> list[subprocess.Popen[bytes]]:
    return [cluster.start(node, RANKS, logs, "train", str(recipe)) for node in (0, 1)]


def said(logs: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(logs.rglob("*.log")))


def updates(recipe: Path) -> list[dict[str, float]]:
    log = recipe.parent / "run" / "metrics.jsonl"
    return [row for row in read_rows(log) if row["kind"] == "update"] if log.exists() else []


@pytest.mark.night
def test_a_node_cut_off_is_named_and_the_run_goes_on_later(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    nodes = start(cluster, recipe, tmp_path / "cut")
    family: list[psutil.Process] = []
    try:
        while len(updates(recipe)) < 3:
            for node in nodes:
                assert node.poll() is None, said(tmp_path / "cut")
            psutil.wait_procs([psutil.Process(node.pid) for node in nodes], timeout=0.2)
        family = [p for node in nodes for p in psutil.Process(node.pid).children(recursive=True)]
        assert sum("mugrpo_megatron.engine.host" in p.cmdline() for p in family) == 2, "an engine on each node"
        cluster.disconnect(1, nodes[1])
        codes = [node.wait(6 * TIMEOUT_S) for node in nodes]
    finally:
        for node in nodes:
            kill(node)
    assert all(codes), "a run that lost a node is not done"
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == [], "nothing outlives the run"

    failures = {int(rank): (phase, cause) for rank, phase, cause in FAILURE.findall(said(tmp_path / "cut" / "node-0"))}
    assert failures, said(tmp_path / "cut")
    assert failures.keys() <= set(range(RANKS))
    assert all(re.match(r"update \d+|saving ", phase) for phase, _ in failures.values()), failures
    for phase, cause in failures.values():
        # A link that is down reports nothing. A killed process closes its connections, which an update's
        # collectives notice; a save has no collectives and waits for the heartbeat.
        silent = cluster.namespaces or phase.startswith("saving")
        expected = "no heartbeat from ranks 4-7" if silent else "another rank died or its node was cut off"
        assert cause.startswith(expected), failures
    assert all("last heard" in cause and "(node 1, " in cause for _, cause in failures.values()), failures
    store = StageStore(recipe.parent / "run" / "stages" / "00000")
    assert store.sealed
    done = len(updates(recipe))
    assert 3 <= done < UPDATES
    saved = newest_cursor(recipe.parent / "run" / "checkpoints").updates

    cluster.reconnect(1)
    nodes = start(cluster, recipe, tmp_path / "again")
    try:
        assert [node.wait(900) for node in nodes] == [0, 0], said(tmp_path / "again")
    finally:
        for node in nodes:
            kill(node)
    rows = updates(recipe)
    assert {row["update"] for row in rows} == set(range(UPDATES))
    assert len(rows) - UPDATES == done - saved, "a resume goes on from the newest checkpoint that was complete"
    assert done - saved <= 2 * EVERY, "no more is repeated than the checkpoint before the one under way lacks"
    assert (recipe.parent / "run" / "summary.json").exists()


@pytest.mark.night
def test_one_process_and_eight_ranks_train_alike_on_a_sealed_stage(recipe: Path, tmp_path: Path) -> None:
    """The same stage and seed: the loss of every update agrees within 1e-4 between the layouts."""
    eight = {int(row["update"]): row for row in updates(recipe)}
    if len(eight) < UPDATES:
        pytest.skip("the run on two nodes did not end")
    alone = tmp_path / "run"
    command = ["optimize", str(recipe), "--stage", "0", "--from", str(recipe.parent / "run")]
    changes = [f"run.dir={alone}", "parallel.tensor=1", "parallel.pipeline=1"]
    overrides = [part for change in changes for part in ("--set", change)]
    done = subprocess.run(
        [sys.executable, "-m", "mugrpo_megatron", *command, *overrides], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = [row for row in read_rows(alone / "metrics.jsonl") if row["kind"] == "update"]
    assert len(rows) == UPDATES
    for row in rows:
        other = eight[int(row["update"])]
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
