"""Adapters on routed experts: PEFT's updates and files, every layout, merged in what is sent, in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from mugrpo_megatron.extras.lora.convert import main
from mugrpo_megatron.learner.update import update
from mugrpo_megatron.weights.hf import save_hf
from tests import models
from tests.extras.lora.adapted import Outcome, adapted, updates, updates_by_peft, write_adapter, write_files
from tests.extras.lora.test_updates import check_same
from tests.extras.lora.test_weights import BFLOAT16, files_of, resume, train_and_save, what_is_sent
from tests.learner.tiny import VOCAB, advantages, samples
from tests.ranks import run_ranks

pytestmark = pytest.mark.process
LAYERS, EXPERTS = 4, 4
EXPERT = {"parallel": {"expert": 2}}
TENSOR = {"parallel": {"tensor": 2}}


def saved(folder: Path, family: str = "qwen3_moe", **config: Any) -> str:
    models.save_model(folder, family, vocab_size=VOCAB, **config)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def start(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_adapter(tmp_path_factory.mktemp("start"), Path(model)))


@pytest.fixture(scope="module")
def alone(model: str, start: str) -> Outcome:
    [found] = run_ranks(1, updates, model, start, {})
    return found  # type: ignore[no-any-return]


def test_updates_are_those_of_peft_in_transformers(model: str, start: str, alone: Outcome) -> None:
    pytest.importorskip("peft")
    check_same(alone, updates_by_peft(model, start), 2e-5)
    before = load_file(Path(start) / "adapter_model.safetensors")
    assert len(before) == 2 * LAYERS * (4 + 2)
    assert all(np.abs(alone[2][name] - factor.numpy()).max() > 1e-4 for name, factor in before.items())


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"ep2": (2, EXPERT)}
AT_NIGHT: dict[str, tuple[int, dict[str, Any]]] = {
    "ep4": (4, {"parallel": {"expert": 4}}),
    "ep2 dp2": (4, EXPERT),
    "ep2 pp2": (4, {"parallel": {"expert": 2, "pipeline": 2}}),
    "ep2 cp2": (4, {"parallel": {"expert": 2, "context": 2}}),
    "ep2 pp2 vpp2": (4, {"parallel": {"expert": 2, "pipeline": 2, "virtual_pipeline": 2}}),
    "tp2": (2, TENSOR),
    "tp2 dp2": (4, TENSOR),
    "ep2, full recompute": (2, {**EXPERT, "learner": {"recompute": "full"}}),
}


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.night) for name in AT_NIGHT)])
def test_updates_are_the_same_in_every_layout(layout: str, model: str, start: str, alone: Outcome) -> None:
    world, sections = {**LAYOUTS, **AT_NIGHT}[layout]
    for rank in run_ranks(world, updates, model, start, sections):
        check_same(rank, alone, 5e-5)


@pytest.mark.parametrize(
    ("world", "sections"),
    [
        (2, {**BFLOAT16, **EXPERT}),
        pytest.param(2, {**BFLOAT16, **TENSOR}, marks=pytest.mark.night),
    ],
)
def test_a_sync_sends_every_expert_merged_bit_by_bit(
    world: int, sections: dict[str, Any], model: str, tmp_path: Path
) -> None:
    other = saved(tmp_path / "other", seed=1)
    run_ranks(world, what_is_sent, model, other, sections, LAYERS * (4 + 3 * EXPERTS))


def test_an_adapter_comes_back_as_it_was_read(model: str, start: str, tmp_path: Path) -> None:
    """PEFT -> the learner over two ranks -> PEFT."""
    files, _ = run_ranks(2, files_of, model, start, EXPERT)
    write_files(tmp_path, files)
    before, after = (Path(path) / "adapter_model.safetensors" for path in (start, tmp_path / "adapter"))
    assert after.read_bytes() == before.read_bytes()
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    with_adapter = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), after.parent)
    state, tensors = peft.get_peft_model_state_dict(with_adapter), load_file(before)
    assert state.keys() == tensors.keys()
    assert all(state[name].equal(one) for name, one in tensors.items())
    with_adapter.save_pretrained(tmp_path / "theirs")  # its config names PEFT's own settings
    [again] = run_ranks(1, files_of, model, str(tmp_path / "theirs"), {})
    assert again["adapter/adapter_model.safetensors"] == before.read_bytes()


@pytest.mark.night
@pytest.mark.parametrize("targets", [["gate_up_proj"], ["q_proj", "down_proj"], ["k_proj", "o_proj"]])
def test_some_layers_alone(targets: list[str], model: str, tmp_path: Path) -> None:
    """With one parameter of the experts PEFT's name of its module is another; without any they are frozen."""
    pytest.importorskip("peft")
    start = str(write_adapter(tmp_path / "start", Path(model), targets))
    expected = updates_by_peft(model, start)
    for found in run_ranks(2, updates, model, start, {**EXPERT, "lora": {"targets": targets}}):
        check_same(found, expected, 5e-5)


@pytest.mark.night
@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """GLM's first layer is dense, and its shared experts have no adapter."""
    pytest.importorskip("peft")
    model = saved(tmp_path / "model", family)
    start = str(write_adapter(tmp_path / "start", tmp_path / "model"))
    expected = updates_by_peft(model, start)
    for found in run_ranks(2, updates, model, start, EXPERT):
        check_same(found, expected, 5e-5)


@pytest.mark.night
def test_a_checkpoint_goes_on_with_the_experts_elsewhere(model: str, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    [(metrics, final)] = run_ranks(1, train_and_save, model, str(directory), {})
    [(again, same)] = run_ranks(1, resume, model, str(directory), {})
    assert [one["loss"] for one in again] == [one["loss"] for one in metrics]
    assert all(np.array_equal(same[name], final[name]) for name in final)
    for sections in (EXPERT, TENSOR):
        for found, other in run_ranks(2, resume, model, str(directory), sections):
            assert found[1]["loss"] == pytest.approx(metrics[1]["loss"], rel=1e-3)
            for name in final:
                np.testing.assert_allclose(other[name], final[name], atol=1e-4)


def train_and_export(model: str, folder: str) -> None:
    """An update; then hf/ with its adapter, and a checkpoint."""
    from mugrpo_megatron.learner import checkpoint

    learner = adapted(model, {**BFLOAT16, **EXPERT})
    update(learner, samples(), advantages(24))
    assert learner.adapters
    write_files(Path(folder), learner.adapters.files(learner.models))
    save_hf(learner.models, learner.architecture, Path(model), Path(folder) / "hf")
    notes = {"run": "r", "cursor": {"stage": 0, "age": 1, "updates": 1}}
    checkpoint.begin_save(learner, Path(folder) / "checkpoint", notes)()


@pytest.mark.night
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_the_converter_merges_and_extracts_as_the_run_exports(family: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    models.save_model(base, family, models.Storage(models.torch.bfloat16), vocab_size=272)
    with_tokenizer(base)
    run_ranks(2, train_and_export, str(base), str(tmp_path))
    words = ["extract", "--megatron", tmp_path / "checkpoint", "--hf", base, "--out", tmp_path / "out"]
    assert main([str(word) for word in words]) == 0
    name = "adapter_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()
    words = ["merge", "--adapter", tmp_path / "adapter", "--hf", base, "--out", tmp_path / "merged"]
    assert main([str(word) for word in words]) == 0
    ours, exported = (load_file(tmp_path / path / "model.safetensors") for path in ("merged", "hf"))
    assert ours.keys() == exported.keys()
    assert all(ours[name].equal(one) for name, one in exported.items())


def with_tokenizer(directory: Path) -> None:
    from tests.tiny import save_model

    save_model(directory / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / "tokenizer" / name).rename(directory / name)
