"""One engine on two nodes: it generates, one of its processes is killed, the stage seals, samples are right.

The nodes are network namespaces that share neither loopback nor /dev/shm; without the right to make them, processes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mugrpo_megatron.stages.store import StageStore
from tests.patience import PATIENCE_S
from tests.scaling.nodes import TORCHRUN, Cluster, family_of, kill, said, two_nodes, wait_until
from tests.tiny import COIN, rows, save_model, write_recipe

pytestmark = [pytest.mark.process, pytest.mark.night]

STAGES, UPDATES, PROMPTS = 3, 2, 8
MEMORY = ("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
"""Runs a command inside a namespace with a /dev/shm of its own."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_nodes() as cluster:
        if cluster.namespaces:
            first, second = ((*inside, *MEMORY) for inside in cluster.inside)
            cluster = replace(cluster, inside=(first, second))
        yield cluster


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("across")
    return write_recipe(
        folder / "recipe.toml",
        save_model(folder / "model"),
        folder / "run",
        schedule={"stages": STAGES, "updates_per_stage": UPDATES},
        rollout={"prompts_per_update": PROMPTS, "max_response_tokens": 48},
        engine={"tensor": 2, "nodes": 2, "max_running_requests": 16, "check_weights": "every"},
        eval={"max_tokens": 12},
        reward=COIN,
    )


def host_of(torchrun: subprocess.Popen[bytes]) -> psutil.Process:
    """The engine's process on a node."""
    family = psutil.Process(torchrun.pid).children(recursive=True)
    (host,) = [process for process in family if "mugrpo_megatron.engine.host" in process.cmdline()]
    return host


def greedy(recipe: Path, run: str) -> dict[str, str]:
    text = (recipe.parent / run / "evaluations" / "update000000.jsonl").read_text(encoding="utf-8")
    return {row["problem"]: row["text"] for row in map(json.loads, text.splitlines())}


def syncs(recipe: Path) -> list[dict[str, Any]]:
    return [row for row in rows(recipe.parent / "run", "phase") if row["phase"] == "sync"]


def test_a_run_that_is_asked_to_stop_while_it_generates_ends(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    nodes = [cluster.start(node, 1, tmp_path, "train", str(recipe)) for node in (0, 1)]
    try:
        wait_until(lambda: bool(rows(recipe.parent / "run", "eval")), nodes, tmp_path)
        family = family_of(nodes)
        for node in nodes:
            node.terminate()
        assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0], said(tmp_path)
    finally:
        for node in nodes:
            kill(node)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == [], "nothing outlives the run"
    assert rows(recipe.parent / "run", "event") == [], "no engine has failed"


def test_an_engine_of_two_nodes_trains_and_restarts(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    """The engine's process on the second node is killed, then that of its leader, then SGLang's on the second node."""
    run, before = recipe.parent / "run", len(syncs(recipe))
    nodes = [cluster.start(node, 1, tmp_path, "train", str(recipe)) for node in (0, 1)]
    try:
        wait_until(lambda: len(syncs(recipe)) >= before + 1, nodes, tmp_path)
        host_of(nodes[1]).kill()
        # one more in the first stage, one in the second
        wait_until(lambda: len(syncs(recipe)) >= before + 3, nodes, tmp_path)
        host_of(nodes[0]).kill()
        wait_until(lambda: len(syncs(recipe)) >= before + 5, nodes, tmp_path)
        (scheduler,) = [p for p in host_of(nodes[1]).children() if "scheduler" in " ".join(p.cmdline())]
        scheduler.kill()
        family = family_of(nodes)
        assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0], said(tmp_path)
    finally:
        for node in nodes:
            kill(node)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == [], "nothing outlives the run"

    failures = [row["text"] for row in rows(recipe.parent / "run", "event") if row["event"] == "engine_failure"]
    assert len(failures) == 3, failures
    assert all(text.startswith("rank 0: ") and "generate" in text for text in failures), failures
    stores = [StageStore(run / "stages" / f"{stage:05d}") for stage in range(STAGES)]
    assert all(store.sealed for store in stores)
    assert all(row["checked"] > 0 for row in syncs(recipe)), "the ranks on both nodes hold the learner's weights"
    for stage, store in enumerate(stores):
        samples = [sample for update in range(UPDATES) for sample in store.read_update(update)]
        assert {sample.weight_version for sample in samples} == {stage * UPDATES}
    assert max(row["mismatch_max"] for row in rows(recipe.parent / "run", "stage")) < 1e-4, (
        "the engine samples from the learner"
    )

    alone = {"run.dir": recipe.parent / "alone", "engine.nodes": 1, "rollout.max_response_tokens": 4}
    overrides = [part for key, value in alone.items() for part in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [TORCHRUN, "2", "generate", str(recipe), *overrides], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The first evaluation: greedy responses are those of an engine of one node.
    assert greedy(recipe, "run") == greedy(recipe, "alone") != {}
