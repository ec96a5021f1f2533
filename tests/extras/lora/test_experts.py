"""Adapters on routed experts: PEFT's updates and files, every layout, merged in what is sent, in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests import models
from tests.extras.lora.adapted import Outcome, updates, updates_by_peft, write_adapter
from tests.extras.lora.test_updates import check_same
from tests.extras.lora.test_weights import BFLOAT16, check_checkpoint, check_comes_back, files_of, what_is_sent
from tests.learner.tiny import VOCAB
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
    with_adapter = check_comes_back(model, start, tmp_path, 2, EXPERT)
    with_adapter.save_pretrained(tmp_path / "theirs")  # its config names PEFT's own settings
    [again] = run_ranks(1, files_of, model, str(tmp_path / "theirs"), {})
    assert again["adapter/adapter_model.safetensors"] == (Path(start) / "adapter_model.safetensors").read_bytes()


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
    check_checkpoint(model, tmp_path / "checkpoint", EXPERT, TENSOR)
