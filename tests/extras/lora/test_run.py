"""Whole runs with adapters, and adapters merged and taken out of checkpoints bit by bit as the learner does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mugrpo_megatron.extras.lora import convert
from mugrpo_megatron.files.checkpoint_state import read_state
from mugrpo_megatron.files.durable import write_checksummed_json
from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.update import update
from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.weights.hf import save_hf
from tests import models
from tests.extras.lora.adapted import adapted, write_adapter, write_files
from tests.learner.tiny import advantages, samples
from tests.ranks import run_ranks
from tests.test_resume import interrupted
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
    with interrupted("optimize", recipe, 2) as killed:
        killed.process.kill()
    mugrpo("optimize", recipe)
    end = "checkpoints/stage00001-age00000/__0_0.distcp"
    assert (tmp_path / "run" / end).read_bytes() == (run / end).read_bytes()


CURSOR = {"stage": 0, "age": 1, "updates": 1}
LAYOUTS = {"qwen2": "tensor", "qwen3_moe": "expert", "glm4_moe": "expert"}
"""Family -> what divides its learner over two ranks."""


def train_and_export(model: str, folder: str, layout: str) -> None:
    """An update; then hf/ with its adapter, and a checkpoint."""
    learner = adapted(model, {"model": {"dtype": "bfloat16"}, "parallel": {layout: 2}})
    update(learner, samples(), advantages(24))
    assert learner.adapters
    write_files(Path(folder), learner.adapters.files(learner.models))
    save_hf(learner.models, learner.architecture, Path(model), Path(folder) / "hf")
    checkpoint.begin_save(learner, Path(folder) / "checkpoint", {"run": "r", "cursor": CURSOR})()


@pytest.fixture(
    scope="module",
    params=["qwen2", *(pytest.param(name, marks=pytest.mark.night) for name in ("qwen3_moe", "glm4_moe"))],
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the base in bfloat16, what a run on it writes, and an adapter of another base."""
    folder = tmp_path_factory.mktemp("run")
    save_model(folder / "tokenizer")
    models.save_model(folder / "base", request.param, models.Storage(models.torch.bfloat16), vocab_size=272)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "base" / name).write_bytes((folder / "tokenizer" / name).read_bytes())
    run_ranks(2, train_and_export, str(folder / "base"), str(folder), LAYOUTS[request.param])
    write_adapter(folder / "foreign", folder / "base", base="0" * 64)
    return folder


def command(*arguments: object) -> int:
    return convert.main([str(argument) for argument in arguments])


def test_what_is_extracted_and_merged_is_what_the_run_exports(exported: Path, tmp_path: Path) -> None:
    assert (
        command("extract", "--megatron", exported / "checkpoint", "--hf", exported / "base", "--out", tmp_path / "out")
        == 0
    )
    name = "adapter_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (exported / "adapter" / name).read_bytes()
    assert (
        command("merge", "--adapter", exported / "adapter", "--hf", exported / "base", "--out", tmp_path / "merged")
        == 0
    )
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", exported / "hf"))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items())


def test_what_does_not_belong_together_is_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert command("merge", "--adapter", exported / "foreign", "--hf", exported / "base", "--out", out) == 2
    assert "was trained on other weights" in capsys.readouterr().err
    assert command("extract", "--megatron", exported / "checkpoint", "--hf", exported / "hf", "--out", out) == 2
    assert "trained on other weights" in capsys.readouterr().err
    assert command("extract", "--megatron", exported / "base", "--hf", exported / "base", "--out", out) == 2
    assert "not a complete checkpoint" in capsys.readouterr().err
    state = exported / "checkpoint" / "state.json"
    sound, content = state.read_bytes(), read_state(state.parent)
    for name, value, why in (("lora_alpha", "x", "could not convert"), ("lora_targets", "", "names no layer")):
        write_checksummed_json(state, "state", content | {"model": content["model"] | {name: value}})
        assert command("extract", "--megatron", state.parent, "--hf", exported / "base", "--out", out) == 2
        assert why in capsys.readouterr().err
    state.write_bytes(sound)
    assert not out.exists()
