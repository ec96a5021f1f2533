"""Two nodes of four ranks, TP2 x PP2 x DP2, and their engines: they train, one is cut off, the run resumes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from mugrpo_megatron.observe.environment import usable_cores
from mugrpo_megatron.run.checkpoints import newest_cursor
from mugrpo_megatron.stages.store import StageStore
from tests.patience import PATIENCE_S
from tests.scaling.nodes import Cluster, family_of, kill, said, two_nodes, wait_until
from tests.tiny import COIN, mugrpo, rows, save_model, write_recipe

pytestmark = pytest.mark.process

RANKS = 4
UPDATES, EVERY = 12, 2
TIMEOUT_S = 240
"""Eight ranks share what cores there are: a collective of a slow machine takes its time, too."""
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


def updates(recipe: Path) -> list[dict[str, float]]:
    return rows(recipe.parent / "run", "update")


def engine_groups(family: list[psutil.Process]) -> Iterator[int]:
    """Process groups of the engines' hosts: what a host forks may look like it for a while."""
    for process in family:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if "mugrpo_megatron.engine.host" in process.cmdline():
                yield os.getpgid(process.pid)


@pytest.mark.night
def test_a_node_cut_off_is_named_and_the_run_goes_on_later(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    nodes = start(cluster, recipe, tmp_path / "cut")
    family: list[psutil.Process] = []
    try:
        wait_until(lambda: len(updates(recipe)) >= 3, nodes, tmp_path / "cut")
        family = family_of(nodes)
        assert len(set(engine_groups(family))) == 2 * min(RANKS, usable_cores()), "of both nodes"
        cluster.disconnect(1, nodes[1])
        codes = [node.wait(6 * TIMEOUT_S) for node in nodes]
    finally:
        for node in nodes:
            kill(node)
    assert all(codes), "a run that lost a node is not done"
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
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
        assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0], said(tmp_path / "again")
    finally:
        for node in nodes:
            kill(node)
    taken = updates(recipe)
    assert {row["update"] for row in taken} == set(range(UPDATES))
    assert len(taken) - UPDATES == done - saved, "a resume goes on from the newest checkpoint that was complete"
    assert done - saved <= 2 * EVERY, "no more is repeated than the checkpoint before the one under way lacks"
    assert (recipe.parent / "run" / "summary.json").exists()
    check_one_process_trains_alike(recipe, tmp_path)


def check_one_process_trains_alike(recipe: Path, tmp_path: Path) -> None:
    """On the sealed stage of eight ranks: the loss of every update agrees within 1e-4."""
    eight = {int(row["update"]): row for row in updates(recipe)}
    alone = tmp_path / "run"
    command = ["optimize", str(recipe), "--stage", "0", "--from", str(recipe.parent / "run")]
    changes = [f"run.dir={alone}", "parallel.tensor=1", "parallel.pipeline=1"]
    overrides = [part for change in changes for part in ("--set", change)]
    mugrpo(*command, *overrides)
    taken = rows(alone, "update")
    assert len(taken) == UPDATES
    for row in taken:
        other = eight[int(row["update"])]
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
