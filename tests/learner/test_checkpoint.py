"""A saved learner goes on in any layout as if nothing had happened."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import STATE
from mugrpo_megatron.files.torch_dist import Reader
from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.checkpoint import fill
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.learner.optimizer import STATES, read_states, shards
from mugrpo_megatron.learner.update import update
from tests.learner.tiny import advantages, recipe, samples, save_model
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


def refused(model: str, directory: str) -> str:
    learner = build_learner(recipe(Path(model)))
    with pytest.raises(UserError) as error:
        checkpoint.load(learner, Path(directory))
    return str(error.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


SP = {"parallel": {"tensor": 2, "pipeline": 2}}


@pytest.mark.parametrize(
    ("saved_by", "saved_in", "loaded_by", "loaded_in"),
    [
        (1, {}, 1, {}),
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
        for again, before in zip(metrics, unbroken, strict=True):
            assert again["loss"] == pytest.approx(before["loss"], rel=1e-4)
            assert again["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-4)


def states_read(model: str, directory: str) -> list[str]:
    """Names of the states that this rank reads, each after it has dropped the one before."""
    learner = build_learner(recipe(Path(model)))
    reader, sharded = Reader(Path(directory)), [policy(chunk).sharded_state_dict() for chunk in learner.chunks]
    names: list[str] = []
    held: list[weakref.ref[torch.Tensor]] = []

    def read(state: Any) -> torch.Tensor:
        assert not any(tensor() is not None for tensor in held), "one state at a time in memory"
        parts = nested_values(state.build() if isinstance(state, ShardedTensorFactory) else [state])
        names.append(f"{state.key} at {[part.global_offset for part in parts]}")
        whole = fill(state, reader)
        held.append(weakref.ref(whole))
        return cast(torch.Tensor, whole)

    with torch.no_grad():
        for shard in shards(learner.optimizer):
            read_states(shard, sharded, read)
    return names


def test_a_rank_reads_the_states_that_it_holds_a_slice_of(model: str, tmp_path: Path) -> None:
    run_ranks(1, train_and_save, model, str(tmp_path / "c"), {})
    [alone] = run_ranks(1, states_read, model, str(tmp_path / "c"))
    first, second = run_ranks(2, states_read, model, str(tmp_path / "c"))
    assert len(alone) == len(set(alone))
    assert {*first, *second} == set(alone)
    assert len({*first} & {*second}) <= len(STATES), "only the parameter that the slices meet in"


def saved_by_each_rank(model: str, directory: str, sections: Sections) -> dict[str, int]:
    """Bytes that this rank copies for a save, by key; the save is then written."""
    learner = build_learner(recipe(Path(model), **sections))
    tree = checkpoint._to_save(learner, copy=True)
    weights = {p.untyped_storage().data_ptr() for chunk in learner.chunks for p in chunk.parameters()}
    found: dict[str, int] = {}
    for value in nested_values(tree):
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and is_main_replica(value.replica_id):
            assert value.data.untyped_storage().data_ptr() not in weights, "training goes on in them"
            found[value.key] = found.get(value.key, 0) + value.data.nbytes
    checkpoint.begin_save(learner, Path(directory), CURSOR, copy=True)()
    return found


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    return run_ranks(1, saved_by_each_rank, model, str(tmp_path_factory.mktemp("alone") / "c"), {})[0]


@pytest.mark.parametrize(
    ("sections", "replicas"),
    [
        ({}, [(0, 1)]),
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
    found = run_ranks(world, saved_by_each_rank, model, str(tmp_path / "c"), sections)
    together: dict[str, int] = {}
    for rank in found:
        for key, size in rank.items():
            together[key] = together.get(key, 0) + size
    assert together == alone
    for one, other in replicas:
        assert sum(found[one].values()) == pytest.approx(sum(found[other].values()), rel=0.25)
    files = sorted(path.name for path in (tmp_path / "c").glob("*.distcp"))
    assert files == [f"__{rank}_0.distcp" for rank in range(world)]


def test_bf16_master_weights_survive(model: str, tmp_path: Path) -> None:
    sections = {"model": {"dtype": "bfloat16"}}
    unbroken = run_ranks(1, train_and_save, model, str(tmp_path / "c"), sections)[0]
    [(_, _, metrics)] = run_ranks(1, resume, model, str(tmp_path / "c"), sections)
    for again, before in zip(metrics, unbroken, strict=True):
        assert again["grad_norm"] == before["grad_norm"]


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
