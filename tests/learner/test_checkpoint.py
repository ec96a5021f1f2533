"""A saved learner goes on in any layout as if nothing had happened."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint_state import STATE
from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.update import update
from tests import models
from tests.learner.tiny import VOCAB, advantages, as_on_cuda, recipe, samples, save_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.process

CURSOR = {"stage": 3, "age": 2, "updates": 14}
Sections = dict[str, dict[str, Any]]


def train_and_save(model: str, directory: str, sections: Sections) -> list[dict[str, float]]:
    """Two updates, a save, two more: the metrics of the latter."""
    learner = build_learner(recipe(Path(model), **sections))
    for seed in range(2):
        update(learner, samples(seed=seed), advantages(24, seed))
    checkpoint.begin_save(learner, Path(directory), {"run": "r", "cursor": CURSOR})()
    return [update(learner, samples(seed=seed), advantages(24, seed)) for seed in (2, 3)]


def resume(model: str, directory: str, sections: Sections) -> tuple[Any, int, list[dict[str, float]]]:
    learner = build_learner(recipe(Path(model), **sections))
    cursor = checkpoint.load(learner, Path(directory))["cursor"]
    return cursor, learner.updates_done, [update(learner, samples(seed=s), advantages(24, s)) for s in (2, 3)]


def assert_goes_on(result: list[dict[str, float]], unbroken: list[dict[str, float]], exactly: bool = False) -> None:
    for again, before in zip(result, unbroken, strict=True):
        for name in ("loss", "grad_norm", "lr"):
            assert again[name] == pytest.approx(before[name], rel=0 if exactly else 1e-4, abs=0)


def refused(model: str, directory: str) -> str:
    learner = build_learner(recipe(Path(model)))
    with pytest.raises(UserError) as error:
        checkpoint.load(learner, Path(directory))
    return str(error.value)


BFLOAT16 = {"model": {"dtype": "bfloat16"}}
SP = {"parallel": {"tensor": 2, "pipeline": 2}}


@pytest.mark.parametrize(
    ("saved_by", "saved_in", "loaded_by", "loaded_in"),
    [
        (1, {}, 1, {}),
        (1, BFLOAT16, 1, BFLOAT16),
        (1, {}, 2, {"parallel": {"tensor": 2}}),
        (4, SP, 2, {}),
        (2, {}, 2, {"parallel": {"pipeline": 2}}),
    ],
)
def test_resume_goes_on_as_if_unbroken(
    model: str, tmp_path: Path, saved_by: int, saved_in: Sections, loaded_by: int, loaded_in: Sections
) -> None:
    directory = tmp_path / "checkpoint"
    unbroken = run_ranks(saved_by, train_and_save, model, str(directory), saved_in)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    for cursor, updates, metrics in run_ranks(loaded_by, resume, model, str(directory), loaded_in):
        assert cursor == CURSOR
        assert updates == 2
        assert_goes_on(metrics, unbroken, exactly=(saved_by, saved_in) == (loaded_by, loaded_in))


def save_as_on_cuda(model: str, directory: str, sections: Sections) -> list[dict[str, float]]:
    with as_on_cuda():
        return train_and_save(model, directory, sections)


def test_a_checkpoint_of_many_buckets_goes_on_with_one(model: str, tmp_path: Path) -> None:
    unbroken = run_ranks(2, save_as_on_cuda, model, str(tmp_path / "c"), {})[0]
    [(_, _, metrics)] = run_ranks(1, resume, model, str(tmp_path / "c"), {})
    assert_goes_on(metrics, unbroken)


def test_a_checkpoint_goes_on_without_expert_parallelism(routed: str, tmp_path: Path) -> None:
    unbroken = run_ranks(2, train_and_save, routed, str(tmp_path / "c"), {"parallel": {"expert": 2}})[0]
    [(_, _, metrics)] = run_ranks(1, resume, routed, str(tmp_path / "c"), {})
    assert_goes_on(metrics, unbroken)


def test_a_checkpoint_of_gated_delta_networks_goes_on_in_another_layout(tmp_path: Path) -> None:
    models.save_model(tmp_path / "hybrid", "qwen3_5_text", vocab_size=VOCAB, scale=2.0)
    model, directory = str(tmp_path / "hybrid"), str(tmp_path / "c")
    unbroken = run_ranks(4, train_and_save, model, directory, SP)[0]
    for world, sections in ((1, {}), (4, SP)):
        [(_, _, metrics), *_] = run_ranks(world, resume, model, directory, sections)
        assert_goes_on(metrics, unbroken, exactly=sections == SP)


def test_float32_rows_among_bfloat16_go_on_exactly(tmp_path: Path) -> None:
    """Megatron's optimizer keeps them in another order than the model, here divided over two ranks."""
    models.save_model(tmp_path / "hybrid", "qwen3_5_text", vocab_size=VOCAB, scale=2.0)
    model, directory = str(tmp_path / "hybrid"), str(tmp_path / "c")
    unbroken = run_ranks(2, train_and_save, model, directory, BFLOAT16)[0]
    [(_, _, metrics), *_] = run_ranks(2, resume, model, directory, BFLOAT16)
    assert_goes_on(metrics, unbroken, exactly=True)


def saved_by_each_rank(model: str, directory: str, sections: Sections) -> dict[str, int]:
    """Bytes that this rank copies for a save, by key; the save is then written."""
    learner = build_learner(recipe(Path(model), **sections))
    tree = checkpoint._to_save(learner, copy=True)
    weights = {p.untyped_storage().data_ptr() for chunk in learner.chunks for p in chunk.parameters()}
    result: dict[str, int] = {}
    for value in nested_values(tree):
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and is_main_replica(value.replica_id):
            assert value.data.untyped_storage().data_ptr() not in weights, "training goes on in them"
            result[value.key] = result.get(value.key, 0) + value.data.nbytes
    checkpoint.begin_save(learner, Path(directory), CURSOR, copy=True)()
    return result


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    return run_ranks(1, saved_by_each_rank, model, str(tmp_path_factory.mktemp("alone") / "c"), {})[0]


@pytest.mark.parametrize(
    ("sections", "replicas"),
    [
        ({"parallel": {"context": 2}}, [(0, 1)]),
        ({"parallel": {"tensor": 2}}, [(0, 2), (1, 3)]),
        ({"parallel": {"pipeline": 2}}, [(0, 1), (2, 3)]),
    ],
    ids=str,
)
def test_data_parallel_ranks_share_the_writing(
    model: str, alone: dict[str, int], tmp_path: Path, sections: Sections, replicas: list[tuple[int, int]]
) -> None:
    """Together they copy every state once; those of the same parameters about equally much, into a file each."""
    world = 2 * len(replicas)
    result = run_ranks(world, saved_by_each_rank, model, str(tmp_path / "c"), sections)
    together: dict[str, int] = {}
    for rank in result:
        for key, size in rank.items():
            together[key] = together.get(key, 0) + size
    assert together == alone
    for replica, other in replicas:
        assert sum(result[replica].values()) == pytest.approx(sum(result[other].values()), rel=0.25)
    files = sorted(path.name for path in (tmp_path / "c").glob("*.distcp"))
    assert files == [f"__{rank}_0.distcp" for rank in range(world)]


def test_incomplete_or_foreign_checkpoints_are_refused(model: str, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    run_ranks(1, train_and_save, model, str(directory), {})
    other = str(save_model(tmp_path / "other", layers=2, vocab=96))
    [message] = run_ranks(1, refused, other, str(directory))
    assert "'V': 90" in message
    assert "'V': 96" in message
    shutil.move(directory / STATE, tmp_path)
    [message] = run_ranks(1, refused, model, str(directory))
    assert "is not a complete checkpoint" in message
