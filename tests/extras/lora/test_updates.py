"""Adapters of dense layers and of routed experts: PEFT's updates on transformers, in every layout; experts besides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import models
from tests.extras.lora.adapted import Outcome, updates, updates_by_peft, write_adapter
from tests.extras.lora.test_weights import BFLOAT16, check_checkpoint, check_comes_back, files_of, what_is_sent
from tests.learner.tiny import VOCAB, save_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.process
LAYERS, EXPERTS = 4, 4
EXPERT = {"parallel": {"expert": 2}}
TENSOR = {"parallel": {"tensor": 2}}
Case = tuple[str, str, Outcome]
"""A model, an adapter of it, and its updates on one rank."""


def saved(folder: Path, family: str, **config: Any) -> str:
    models.save_model(folder, family, vocab_size=VOCAB, **config)
    return str(folder)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    dense = request.param == "dense"
    model = str(save_model(folder / "model")) if dense else saved(folder / "model", "qwen3_moe")
    start = str(write_adapter(folder / "start", Path(model)))
    return model, start, run_ranks(1, updates, model, start, {})[0]


of_experts = pytest.mark.parametrize("case", ["experts"], indirect=True)


def check_same(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Losses, norms, log-probabilities, and the factors after the updates, against how far these have moved them."""
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=tolerance)
    np.testing.assert_allclose(found[1], expected[1], atol=20 * tolerance)
    assert found[2].keys() == expected[2].keys()
    for name, factor in expected[2].items():
        np.testing.assert_allclose(found[2][name], factor, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("case", "factors", "moves"), [("dense", 2 * 4 * 7, 1e-3), ("experts", 2 * 4 * 6, 1e-4)], indirect=["case"]
)
def test_they_are_those_of_peft_in_transformers(case: Case, factors: int, moves: float) -> None:
    """And the reference loss's there: the learner's is fused. They move every factor."""
    model, start, alone = case
    before = load_file(Path(start) / "adapter_model.safetensors")
    assert len(before) == factors
    assert all(np.abs(alone[2][name] - factor).max() > moves for name, factor in before.items())
    assert alone[0][0]["vetoed_fraction"] > 0.1, "the veto takes part"
    pytest.importorskip("peft")
    check_same(alone, updates_by_peft(model, start), 2e-5)


FULL = {"learner": {"recompute": "full"}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dense, tp2": (2, TENSOR),
    "dense, pp2 cp2": (4, {"parallel": {"pipeline": 2, "context": 2}}),
    "dense, full recompute": (1, FULL),
    "experts, ep2": (2, EXPERT),
}
AT_NIGHT: dict[str, tuple[int, dict[str, Any]]] = {
    "dense, tp2 pp2": (4, {"parallel": {"tensor": 2, "pipeline": 2}}),
    "dense, tp2 cp2": (4, {"parallel": {"tensor": 2, "context": 2}}),
    "dense, pp2 vpp2, full recompute": (2, {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, **FULL}),
    "dense, dp2": (2, {}),
    "dense, one micro-batch": (1, {"learner": {"micro_batch_tokens": 4096}}),
    "dense, selective recompute": (1, {"learner": {"recompute": "selective"}}),
    "experts, ep4": (4, {"parallel": {"expert": 4}}),
    "experts, ep2 dp2": (4, EXPERT),
    "experts, ep2 pp2": (4, {"parallel": {"expert": 2, "pipeline": 2}}),
    "experts, ep2 cp2": (4, {"parallel": {"expert": 2, "context": 2}}),
    "experts, ep2 pp2 vpp2": (4, {"parallel": {"expert": 2, "pipeline": 2, "virtual_pipeline": 2}}),
    "experts, tp2": (2, TENSOR),
    "experts, tp2 dp2": (4, TENSOR),
    "experts, ep2, full recompute": (2, {**EXPERT, **FULL}),
}


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(name.split(",")[0], name, marks=[pytest.mark.night] * (name in AT_NIGHT))
        for name in [*LAYOUTS, *AT_NIGHT]
    ],
    indirect=["case"],
)
def test_they_are_the_same_in_every_layout(case: Case, layout: str) -> None:
    model, start, alone = case
    world, sections = {**LAYOUTS, **AT_NIGHT}[layout]
    for rank in run_ranks(world, updates, model, start, sections):
        check_same(rank, alone, 5e-5)


@pytest.mark.night
@pytest.mark.parametrize(
    ("family", "targets", "sections"),
    [
        *((family, ["q_proj", "v_proj", "up_proj"], TENSOR) for family in ("qwen3", "llama")),
        *(
            ("qwen3_moe", targets, EXPERT)
            for targets in (["gate_up_proj"], ["q_proj", "down_proj"], ["k_proj", "o_proj"])
        ),
        *((family, "all-linear", EXPERT) for family in ("mixtral", "glm4_moe")),
    ],
)
def test_other_families_and_some_layers_alone(
    family: str, targets: list[str] | str, sections: dict[str, Any], tmp_path: Path
) -> None:
    """With one parameter of the experts PEFT's name of its module is another; without any they are frozen.

    GLM's first layer is dense, and its shared experts have no adapter.
    """
    pytest.importorskip("peft")
    model = saved(tmp_path / "model", family)
    start = str(write_adapter(tmp_path / "start", Path(model), targets))
    expected = updates_by_peft(model, start)
    for found in run_ranks(2, updates, model, start, {**sections, "lora": {"targets": targets}}):
        check_same(found, expected, 5e-5)


@of_experts
@pytest.mark.parametrize("layout", [EXPERT, pytest.param(TENSOR, marks=pytest.mark.night)])
def test_a_sync_sends_every_expert_merged_bit_by_bit(layout: dict[str, Any], case: Case, tmp_path: Path) -> None:
    other = saved(tmp_path / "other", "qwen3_moe", seed=1)
    run_ranks(2, what_is_sent, case[0], other, {**BFLOAT16, **layout}, LAYERS * (4 + 3 * EXPERTS))


@of_experts
def test_an_adapter_of_experts_comes_back_as_it_was_read(case: Case, tmp_path: Path) -> None:
    model, start, _ = case
    with_adapter = check_comes_back(model, start, tmp_path, 2, EXPERT)
    with_adapter.save_pretrained(tmp_path / "theirs")  # its config names PEFT's own settings
    [again] = run_ranks(1, files_of, model, str(tmp_path / "theirs"), {})
    assert again["adapter/adapter_model.safetensors"] == (Path(start) / "adapter_model.safetensors").read_bytes()


@of_experts
@pytest.mark.night
def test_a_checkpoint_goes_on_with_the_experts_elsewhere(case: Case, tmp_path: Path) -> None:
    check_checkpoint(case[0], tmp_path / "checkpoint", EXPERT, TENSOR)
