"""Whole runs with adapters, with the real learner and the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from mugrpo_megatron.observe.log import read_rows
from tests.forked import started
from tests.tiny import mugrpo, save_model, take_stages, write_run

pytestmark = pytest.mark.process
SECTIONS = {
    "schedule": {"stages": 2, "updates_per_stage": 4},
    "checkpoint": {"every_updates": 1},
    "engine": {"check_weights": "every"},
    "objective": {"kl_anchor": "start", "kl_coef": 0.01},
    "lora": {"rank": 4},
}


@pytest.mark.slow
def test_engines_get_merged_weights_and_a_killed_run_ends_bitwise_like_the_unbroken_one(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    mugrpo("train", write_run(tmp_path, model, **SECTIONS))
    run = tmp_path / "run"
    rows = list(read_rows(run / "metrics.jsonl"))
    checked = [row["checked"] for row in rows if row["kind"] == "phase" and row["phase"] == "sync"]
    assert checked == [2 + 4 * 7] * 3, "every tensor of every sync is the engine's, bit by bit"
    stages = [row for row in rows if row["kind"] == "stage"]
    assert all(row["mismatch_max"] < 1e-4 for row in stages)
    first, last = [row for row in rows if row["kind"] == "update"][:: 2 * 4 - 1]
    assert first["kl_anchor"] == 0.0 != last["kl_anchor"]
    base, merged = (load_file(path / "model.safetensors") for path in (model, run / "hf"))
    assert sum(not base[name].equal(merged[name]) for name in base) == 4 * 7
    assert {path.name for path in (run / "hf" / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }

    again = tmp_path / "again"
    recipe = write_run(again, model, **SECTIONS)
    take_stages(run, again / "run")
    log = again / "run" / "metrics.jsonl"
    with started("train", recipe) as command:
        while not log.exists() or sum(row["kind"] == "update" for row in read_rows(log)) < 6:
            assert command.wait(0.05) is None, command.said
        command.process.kill()
    mugrpo("train", recipe)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (again / "run" / "hf" / name).read_bytes() == (run / "hf" / name).read_bytes()

    start = {
        **SECTIONS,
        "lora": {"rank": 4, "start": str(run / "hf" / "adapter")},
        "schedule": {"updates_per_stage": 1},
    }
    mugrpo("train", write_run(tmp_path / "third", model, **start), "--dry-run")
