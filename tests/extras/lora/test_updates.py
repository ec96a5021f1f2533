"""Updates of adapters: those of PEFT on transformers, the same in every layout, fused as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import models
from tests.extras.lora.adapted import Outcome, updates, updates_by_peft, write_adapter
from tests.learner.tiny import VOCAB, save_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def start(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_adapter(tmp_path_factory.mktemp("start"), Path(model)))


@pytest.fixture(scope="module")
def alone(model: str, start: str) -> Outcome:
    found: Outcome = run_ranks(1, updates, model, start, {})[0]
    return found


def check_same(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Losses, norms, log-probabilities, and the factors after the updates, against how far these have moved them."""
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=tolerance)
    np.testing.assert_allclose(found[1], expected[1], atol=20 * tolerance)
    assert found[2].keys() == expected[2].keys()
    for name, factor in expected[2].items():
        np.testing.assert_allclose(found[2][name], factor, atol=tolerance, err_msg=name)


def test_they_are_those_of_peft_in_transformers(model: str, start: str, alone: Outcome) -> None:
    """And the reference loss's there: the learner's is fused."""
    pytest.importorskip("peft")
    check_same(alone, updates_by_peft(model, start), 2e-5)


def test_they_move_every_factor(model: str, start: str, alone: Outcome) -> None:
    from safetensors.numpy import load_file

    before = load_file(Path(start) / "adapter_model.safetensors")
    assert all(np.abs(alone[2][name] - factor).max() > 1e-3 for name, factor in before.items())
    assert alone[0][0]["vetoed_fraction"] > 0.1, "the veto takes part"


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "pp2 cp2": (4, {"parallel": {"pipeline": 2, "context": 2}}),
    "full recompute": (1, {"learner": {"recompute": "full"}}),
}
AT_NIGHT: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 pp2": (4, {"parallel": {"tensor": 2, "pipeline": 2}}),
    "tp2 cp2": (4, {"parallel": {"tensor": 2, "context": 2}}),
    "pp2 vpp2, full recompute": (
        2,
        {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "learner": {"recompute": "full"}},
    ),
    "dp2": (2, {}),
    "one micro-batch": (1, {"learner": {"micro_batch_tokens": 4096}}),
    "selective recompute": (1, {"learner": {"recompute": "selective"}}),
}


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.night) for name in AT_NIGHT)])
def test_they_are_the_same_in_every_layout(layout: str, model: str, start: str, alone: Outcome) -> None:
    world, sections = {**LAYOUTS, **AT_NIGHT}[layout]
    for rank in run_ranks(world, updates, model, start, sections):
        check_same(rank, alone, 5e-5)


@pytest.mark.night
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_other_families_and_some_layers_alone(family: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    models.save_model(tmp_path / "model", family, vocab_size=VOCAB)
    targets = ["q_proj", "v_proj", "up_proj"]
    model = str(tmp_path / "model")
    start = str(write_adapter(tmp_path / "start", tmp_path / "model", targets))
    expected = updates_by_peft(model, start)
    for found in run_ranks(2, updates, model, start, {"parallel": {"tensor": 2}, "lora": {"targets": targets}}):
        check_same(found, expected, 5e-5)
