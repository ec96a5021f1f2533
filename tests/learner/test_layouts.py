"""The same update in every layout: loss, gradient norm and log-probabilities equal those of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.transformer.transformer_config import TransformerConfig

from mugrpo_megatron.learner import model as layers
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.linear import ColumnParallel
from mugrpo_megatron.learner.model import policy, transformer_config
from tests import models as random
from tests.learner.test_latent import save_latent
from tests.learner.tiny import (
    VOCAB,
    Updates,
    as_on_cuda,
    assert_same_updates,
    recipe,
    save_model,
    save_routed,
    two_updates,
    updates_of,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "tied")
    save_model(folder / "untied", tied=False)
    save_routed(folder / "routed")
    save_latent(folder / "latent")
    # Adam's first step amplifies the rounding of gradients that nearly vanish: fewer do at this scale.
    random.save_model(folder / "hybrid", "qwen3_5_text", vocab_size=VOCAB, scale=2.0)
    return {path.name: str(path) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def alone(models: dict[str, str]) -> dict[str, Updates]:
    """A dense and a routed model compiled, as in a run; the layouts are not."""
    return {
        kind: run_ranks(1, two_updates, model, {}, compiled=kind in ("tied", "routed"))[0]
        for kind, model in models.items()
    }


def parallel(**sizes: Any) -> dict[str, Any]:
    return {"parallel": sizes}


FULL, SELECTIVE = {"learner": {"recompute": "full"}}, {"learner": {"recompute": "selective"}}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("tied", 2, parallel(tensor=2)),
    ("tied", 2, {}),
    ("tied", 4, parallel(tensor=2, pipeline=2)),
    ("tied", 2, {**parallel(pipeline=2, virtual_pipeline=2), **FULL}),
    ("tied", 4, parallel(tensor=4)),  # of 2 key/value heads
    ("tied", 4, parallel(pipeline=2, context=2)),
    ("tied", 4, parallel(pipeline=2)),
    ("tied", 1, {"learner": {"micro_batch_tokens": 4096}}),
    ("tied", 1, FULL),
    ("tied", 1, SELECTIVE),
    ("untied", 2, parallel(tensor=2)),
    ("untied", 2, parallel(pipeline=2)),
    ("untied", 2, parallel(pipeline=2, virtual_pipeline=2)),
    ("untied", 4, parallel(tensor=2, context=2)),
    ("routed", 2, parallel(expert=2)),
    ("routed", 2, parallel(tensor=2)),
    ("routed", 4, parallel(pipeline=2, expert=2)),
    ("routed", 1, FULL),
    ("latent", 3, parallel(pipeline=3)),  # stages of 2, 1 and 1 layers
    ("hybrid", 4, parallel(tensor=2, pipeline=2)),
    ("hybrid", 1, SELECTIVE),
]
RARE: list[tuple[str, int, dict[str, Any]]] = [
    ("latent", 1, SELECTIVE),
    ("latent", 1, FULL),
    ("latent", 2, parallel(context=2)),
    ("latent", 4, parallel(pipeline=2, expert=2)),
]


@pytest.mark.parametrize(
    ("kind", "world", "sections"), [*LAYOUTS, *(pytest.param(*row, marks=pytest.mark.night) for row in RARE)], ids=str
)
def test_update_is_that_of_one_process(
    kind: str, world: int, sections: dict[str, Any], models: dict[str, str], alone: dict[str, Updates]
) -> None:
    assert alone[kind][0]["vetoed_fraction"] > 0.1, "the veto takes part"
    for rank in run_ranks(world, two_updates, models[kind], sections):
        assert_same_updates(rank, alone[kind])
        assert rank[0]["packed_efficiency"] > 0.7


@pytest.mark.night
@pytest.mark.parametrize("kind", ["untied", "latent", "hybrid"])
def test_a_compiled_update_is_the_same(kind: str, models: dict[str, str], alone: dict[str, Updates]) -> None:
    assert_same_updates(run_ranks(1, two_updates, models[kind], {}, compiled=True)[0], alone[kind])


START = _ParamAndGradBucketGroup.start_grad_sync


def updates_as_on_cuda(model: str, sections: dict[str, Any]) -> Updates:
    """With direct weight gradients, of several micro-batches; Megatron reduces early from the second update on."""
    with as_on_cuda():
        learner = build_learner(recipe(Path(model), **sections))
    assert any(isinstance(module, ColumnParallel) for module in policy(learner.chunks[0]).modules())
    with patch.object(_ParamAndGradBucketGroup, "start_grad_sync", autospec=True) as reductions:
        reductions.side_effect = START
        result = updates_of(learner)
    if learner.ranks.dp_size > 1:
        groups = sum(len([*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]) for chunk in learner.chunks)
        assert reductions.call_count == 2 * groups
        assert groups > len(learner.chunks) or learner.ranks.pp > 0, "Megatron has one bucket on later stages"
    return result


@pytest.mark.parametrize(
    ("kind", "world", "sections"),
    [
        ("untied", 1, FULL),
        ("untied", 2, parallel(tensor=2)),
        ("untied", 2, parallel(context=2)),
        ("untied", 4, parallel(pipeline=2, virtual_pipeline=2)),
        ("untied", 4, parallel(tensor=2)),
        ("tied", 4, parallel(pipeline=2)),
        ("routed", 2, {}),
        ("routed", 2, parallel(expert=2)),
    ],
    ids=str,
)
def test_update_with_the_layers_that_cuda_has_is_that_of_megatrons(
    kind: str, world: int, sections: dict[str, Any], models: dict[str, str], alone: dict[str, Updates]
) -> None:
    for rank in run_ranks(world, updates_as_on_cuda, models[kind], sections):
        assert_same_updates(rank, alone[kind])


def updates_with_fused_experts(model: str) -> Updates:
    """On CPU, with the fused SwiGLU that experts have on CUDA."""

    def fused(*arguments: Any) -> TransformerConfig:
        return replace(transformer_config(*arguments), bias_activation_fusion=True)

    with patch.object(layers, "transformer_config", fused):
        return two_updates(model, {})


def test_experts_on_cuda_compute_what_they_do_on_cpu(models: dict[str, str], alone: dict[str, Updates]) -> None:
    assert_same_updates(run_ranks(1, updates_with_fused_experts, models["routed"])[0], alone["routed"])
