"""Whole runs with adapters, with the real learner and the real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mugrpo_megatron.observe.log import read_rows
from tests.forked import started
from tests.tiny import mugrpo, save_model, take_stages, write_run

pytestmark = pytest.mark.process
SECTIONS: dict[str, dict[str, Any]] = {
    "schedule": {"stages": 2, "updates_per_stage": 4},
    "checkpoint": {"every_updates": 1, "keep": 50},
    "engine": {"check_weights": "every"},
    "objective": {"kl_ref": "start", "kl_coef": 0.01},
    "lora": {"rank": 4},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    mugrpo("train", write_run(folder, save_model(folder / "model"), **SECTIONS))
    return folder / "run"


@pytest.mark.slow
def test_engines_get_merged_weights(run: Path) -> None:
    rows = list(read_rows(run / "metrics.jsonl"))
    checked = [row["checked"] for row in rows if row["kind"] == "phase" and row["phase"] == "sync"]
    assert checked == [2 + 4 * 7] * 3, "every tensor of every sync is the engine's, bit by bit"
    stages = [row for row in rows if row["kind"] == "stage"]
    assert all(row["mismatch_max"] < 1e-4 for row in stages)
    first, last = [row for row in rows if row["kind"] == "update"][:: 2 * 4 - 1]
    assert first["kl_ref"] == 0.0 != last["kl_ref"]
    base, merged = (load_file(path / "model.safetensors") for path in (run.parent / "model", run / "hf"))
    assert sum(not base[name].equal(merged[name]) for name in base) == 4 * 7
    assert {path.name for path in (run / "hf" / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


@pytest.mark.night
def test_a_stage_killed_inside_ends_bitwise_like_the_unbroken_one(run: Path, tmp_path: Path) -> None:
    recipe = write_run(tmp_path, run.parent / "model", **SECTIONS)
    take_stages(run, tmp_path / "run")
    log = tmp_path / "run" / "metrics.jsonl"
    with started("optimize", recipe) as command:
        while not log.exists() or sum(row["kind"] == "update" for row in read_rows(log)) < 2:
            assert command.wait(0.05) is None, command.said
        command.process.kill()
    mugrpo("optimize", recipe)
    end = "checkpoints/stage00001-age00000/__0_0.distcp"
    assert (tmp_path / "run" / end).read_bytes() == (run / end).read_bytes()
