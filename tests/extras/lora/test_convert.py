"""Adapters merged into their models, and taken out of checkpoints, bit by bit as the learner does."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from mugrpo_megatron.extras.lora import convert
from mugrpo_megatron.files.checkpoint_state import read_state
from mugrpo_megatron.files.durable import write_checksummed_json
from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.update import update
from mugrpo_megatron.weights.hf import save_hf
from tests import models
from tests.extras.lora.adapted import adapted, write_adapter, write_files
from tests.learner.tiny import advantages, samples
from tests.ranks import run_ranks
from tests.tiny import save_model

pytestmark = pytest.mark.process
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
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_what_is_extracted_and_merged_is_what_the_run_exports(run: Path, tmp_path: Path) -> None:
    assert command("extract", "--megatron", run / "checkpoint", "--hf", run / "base", "--out", tmp_path / "out") == 0
    name = "adapter_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (run / "adapter" / name).read_bytes()
    assert command("merge", "--adapter", run / "adapter", "--hf", run / "base", "--out", tmp_path / "merged") == 0
    ours, exported = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", run / "hf"))
    assert ours.keys() == exported.keys()
    assert all(ours[name].equal(tensor) for name, tensor in exported.items())


def test_what_does_not_belong_together_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert command("merge", "--adapter", run / "foreign", "--hf", run / "base", "--out", out) == 2
    assert "was trained on other weights" in capsys.readouterr().err
    assert command("extract", "--megatron", run / "checkpoint", "--hf", run / "hf", "--out", out) == 2
    assert "adapters of other weights" in capsys.readouterr().err
    assert command("extract", "--megatron", run / "base", "--hf", run / "base", "--out", out) == 2
    assert "not a complete checkpoint" in capsys.readouterr().err
    state = run / "checkpoint" / "state.json"
    sound, content = state.read_bytes(), read_state(state.parent)
    for name, value, why in (("lora_alpha", "x", "could not convert"), ("lora_targets", "", "names no layer")):
        write_checksummed_json(state, "state", content | {"model": content["model"] | {name: value}})
        assert command("extract", "--megatron", state.parent, "--hf", run / "base", "--out", out) == 2
        assert why in capsys.readouterr().err
    state.write_bytes(sound)
    assert not out.exists()
