"""Whole runs with episodes on SGLang's engine: killed and resumed, slow tools, exact ratios."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.stages.store import StageStore
from tests.extras.episodes.test_episodes import TOOLS
from tests.tiny import save_model, write_recipe

pytestmark = [pytest.mark.process, pytest.mark.night]
HERE = "tests.extras.episodes"


def run_of(folder: Path, player: str, name: str, **sections: dict[str, Any]) -> Path:
    shape: dict[str, dict[str, Any]] = {
        "rollout": {player: f"{HERE}.{name}", "max_response_tokens": 96, "behaviour": "learner"},
        "schedule": {"stages": 1, "updates_per_stage": 4},
        "episodes": {"seconds": 600.0, "max_failure_share": 1.0, "programs": 2},
        "reward": {"function": "tests.rewards.functions:parity"},
        "objective": {"veto_reach": "turn"},
        "data": {
            "eval_problems": 4,
            "prompt_style": "chat",
            "chat_template": str(folder / "template.jinja"),
            "max_prompt_tokens": 64,
        },
    }
    (folder / "template.jinja").write_text(TOOLS, encoding="utf-8")
    merged = {name: {**shape.get(name, {}), **sections.get(name, {})} for name in {*shape, *sections}}
    return write_recipe(folder / "recipe.toml", save_model(folder / "model"), folder / "run", **merged)


def train(recipe: Path) -> subprocess.Popen[bytes]:
    log = (recipe.parent / "log").open("ab")
    return subprocess.Popen(
        [sys.executable, "-m", "mugrpo_megatron", "train", str(recipe)], stdout=log, stderr=log, start_new_session=True
    )


def kill(process: subprocess.Popen[bytes], victim: str) -> None:
    """Kill a run with its processes, or its engine alone."""
    if victim == "run":
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for child in psutil.process_iter(["ppid", "cmdline"]) if victim == "engine" else ():
        if child.info["ppid"] == process.pid and "mugrpo_megatron.engine.host" in (child.info["cmdline"] or ()):
            os.killpg(child.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("victim", "player", "name"),
    [
        ("run", "function", "functions:slow_calls"),
        ("run", "agent", "agents:asks_twice"),
        ("engine", "agent", "agents:asks_twice"),
    ],
)
def test_killed_in_mid_episode_no_group_is_doubled_or_lost(tmp_path: Path, victim: str, player: str, name: str) -> None:
    """A run that is killed is started again; one whose engine is killed restarts it."""
    recipe = run_of(tmp_path, player, name, rollout={"prompts_per_update": 8}, engine={"max_running_requests": 4})
    stage = tmp_path / "run" / "stages" / "00000"
    process, kills = train(recipe), 0
    for groups_on_disk in (1, 17) if victim == "run" else (1,):
        while process.poll() is None and (
            not stage.exists() or len(StageStore(stage).verified_groups()) < groups_on_disk
        ):
            time.sleep(0.2)
        if process.poll() is None:
            kill(process, victim)
            kills += 1
        process = process if process.poll() is None else train(recipe)
    assert process.wait() == 0, (tmp_path / "log").read_text()
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert any(row.get("event") == "engine_failure" for row in rows) == (victim == "engine")
    assert {row["failed/arithmetic"] for row in rows if row["kind"] == "eval"} == {0.0}
    store = StageStore(stage)
    samples = [sample for update in range(store.updates) for sample in store.read_update(update, with_text=True)]
    groups = [sample.group for sample in samples]
    assert sorted(set(groups)) == list(range(32))
    assert all(groups.count(group) == 4 for group in set(groups))
    assert kills
    for sample in samples:
        assert sample.loss_mask is not None
        assert (sample.engine_logprobs[~sample.loss_mask] == 0).all()
        assert len(np.unique(sample.turns)) == sample.components["episode.turns"] == 2
    first = next(row for row in rows if row["kind"] == "update")
    exact = ("ratio_mean", "ratio_neg_min", "ratio_neg_max", "ratio_pos_min", "ratio_pos_max")
    assert {first[name] for name in exact if name in first} == {1.0}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates"] == 4
