"""What the learner has on a GPU alone (direct weight gradients, reduced early), on CPU: the same updates everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from mugrpo_megatron.learner import model as learner_model
from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.linear import ColumnParallel, DirectLayers
from mugrpo_megatron.learner.model import choose_backend, policy
from mugrpo_megatron.learner.update import update
from tests import models
from tests.learner.test_checkpoint import resume, train_and_save
from tests.learner.tiny import VOCAB, advantages, recipe, samples, save_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.process

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "bfloat16": (1, {"model": {"dtype": "bfloat16"}}),
    "full recompute": (1, {"learner": {"recompute": "full"}}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "dp2": (2, {}),
    "cp2": (2, {"parallel": {"context": 2}}),
    "dp2 full recompute": (2, {"learner": {"recompute": "full"}}),
    "pp2 dp2": (4, {"parallel": {"pipeline": 2}}),
    "vpp2 dp2": (4, {"parallel": {"pipeline": 2, "virtual_pipeline": 2}}),
    "tp2 dp2": (4, {"parallel": {"tensor": 2}}),
    "ep2": (2, {"parallel": {"expert": 2}}),
}
START = _ParamAndGradBucketGroup.start_grad_sync
Update = tuple[float, float]


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Linear layers that add to `main_grad`, and gradients reduced early, in small buckets."""
    buckets = partial(DistributedDataParallelConfig, bucket_size=1000)
    with (
        patch.object(learner_model, "choose_backend", lambda *_: DirectLayers()),
        patch.object(learner_model, "reduces_early", lambda ranks: ranks.dp_size * ranks.cp_size > 1),
        patch.object(learner_model, "DistributedDataParallelConfig", buckets),
    ):
        yield


def build(model: str, sections: dict[str, Any], cuda: bool) -> Learner:
    with as_on_cuda() if cuda else nullcontext():
        return build_learner(recipe(Path(model), **sections))


def three_updates(model: str, sections: dict[str, Any], cuda: bool) -> list[Update]:
    """Loss and gradient norm of three updates of several micro-batches; Megatron reduces early from the second on."""
    learner = build(model, sections, cuda)
    assert cuda == any(isinstance(part, ColumnParallel) for part in policy(learner.chunks[0]).modules())
    data = samples()
    with patch.object(_ParamAndGradBucketGroup, "start_grad_sync", autospec=True) as reductions:
        reductions.side_effect = START
        metrics = [update(learner, data, advantages(len(data))) for _ in range(3)]
    if cuda and learner.ranks.dp_size > 1:
        groups = sum(len([*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]) for chunk in learner.chunks)
        assert reductions.call_count == 3 * groups
        assert groups > len(learner.chunks) or learner.ranks.pp > 0, "Megatron has one bucket on later stages"
    return [(row["loss"], row["grad_norm"]) for row in metrics]


@pytest.fixture(scope="module")
def models_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for name, tied in (("untied", False), ("tied", True)):
        save_model(folder / name, tied=tied)
    models.save_model(folder / "routed", "qwen3_moe", vocab_size=VOCAB, moe_intermediate_size=16, num_hidden_layers=2)
    return {name: str(folder / name) for name in ("untied", "tied", "routed")}


RARE = [("untied", "pp2"), ("untied", "dp2 full recompute"), ("tied", "dp2"), ("routed", "one")]
"""A part of each is in another case."""
CASES = [
    *(("untied", layout) for layout in LAYOUTS if layout not in ("ep2", "pp2", "dp2 full recompute")),
    *(("tied", layout) for layout in ("one", "pp2 dp2")),
    *(("routed", layout) for layout in ("dp2", "ep2")),
    *(pytest.param(*case, marks=pytest.mark.night) for case in RARE),
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_updates_are_those_of_megatrons_layers(kind: str, layout: str, models_of: dict[str, str]) -> None:
    world, sections = LAYOUTS[layout]
    expected = run_ranks(world, three_updates, models_of[kind], sections, False)
    found = run_ranks(world, three_updates, models_of[kind], sections, True)
    tolerance = 0.02 if layout == "bfloat16" else 1e-4
    for one, other in zip(found, expected, strict=True):
        for (loss, norm), (loss_before, norm_before) in zip(one, other, strict=True):
            assert loss == pytest.approx(loss_before, rel=tolerance, abs=tolerance)
            assert norm == pytest.approx(norm_before, rel=10 * tolerance)


def save_as_on_cuda(model: str, directory: str, sections: dict[str, Any]) -> Any:
    with as_on_cuda():
        return train_and_save(model, directory, sections)


def test_a_checkpoint_of_many_buckets_goes_on_with_one(models_of: dict[str, str], tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    unbroken = run_ranks(2, save_as_on_cuda, models_of["untied"], directory, {})[0]
    [(_, _, metrics)] = run_ranks(1, resume, models_of["untied"], directory, {})
    for again, before in zip(metrics, unbroken, strict=True):
        assert again["loss"] == pytest.approx(before["loss"], rel=1e-4)
        assert again["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-4)


def test_choose_takes_them_on_cuda_alone() -> None:
    assert isinstance(choose_backend("local", torch.device("cuda")), DirectLayers)
    assert not isinstance(choose_backend("local", torch.device("cpu")), DirectLayers)
