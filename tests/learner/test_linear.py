"""The linear layers that a GPU has, on CPU: the same updates as with Megatron's, in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mugrpo_megatron.learner import model as learner_model
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.linear import ColumnParallel, DirectLayers
from mugrpo_megatron.learner.model import choose_backend, policy
from mugrpo_megatron.learner.update import update
from tests import models
from tests.learner.tiny import VOCAB, advantages, recipe, samples, save_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.process

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "bfloat16": (1, {"model": {"dtype": "bfloat16"}}),
    "full recompute": (1, {"learner": {"recompute": "full"}}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "tp2 sp": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "dp2": (2, {}),
}
Update = tuple[float, float]


@contextmanager
def direct_layers() -> Iterator[None]:
    with patch.object(learner_model, "choose_backend", lambda *_: DirectLayers()):
        yield


def two_updates(model: str, sections: dict[str, Any], direct: bool) -> list[Update]:
    """Loss and gradient norm of two updates of several micro-batches."""
    if direct:
        with direct_layers():
            learner = build_learner(recipe(Path(model), **sections))
        assert any(isinstance(part, ColumnParallel) for part in policy(learner.chunks[0]).modules())
    else:
        learner = build_learner(recipe(Path(model), **sections))
    data = samples()
    metrics = [update(learner, data, advantages(len(data))) for _ in range(2)]
    return [(row["loss"], row["grad_norm"]) for row in metrics]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("dense"), tied=False))


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("routed")
    models.save_model(directory, "qwen3_moe", vocab_size=VOCAB, moe_intermediate_size=16, num_hidden_layers=2)
    return str(directory)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_are_those_of_megatrons_layers(layout: str, dense: str) -> None:
    world, sections = LAYOUTS[layout]
    expected = run_ranks(world, two_updates, dense, sections, False)
    found = run_ranks(world, two_updates, dense, sections, True)
    tolerance = 0.02 if layout == "bfloat16" else 1e-4
    for one, other in zip(found, expected, strict=True):
        assert one[0] == pytest.approx(other[0], rel=tolerance)
        assert one[1] == pytest.approx(other[1], rel=10 * tolerance)


@pytest.mark.parametrize(("world", "sections"), [(1, {}), (2, {"parallel": {"expert": 2}})], ids=["one", "ep2"])
def test_experts_too(world: int, sections: dict[str, Any], routed: str) -> None:
    expected = run_ranks(world, two_updates, routed, sections, False)
    found = run_ranks(world, two_updates, routed, sections, True)
    for one, other in zip(found, expected, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-4)
        assert one[1] == pytest.approx(other[1], rel=1e-3)


def test_choose_takes_them_on_cuda_alone() -> None:
    assert isinstance(choose_backend("local", torch.device("cuda")), DirectLayers)
    assert not isinstance(choose_backend("local", torch.device("cpu")), DirectLayers)
