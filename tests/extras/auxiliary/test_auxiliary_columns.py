"""A branch of a stage has the columns that its own auxiliary models would compute, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.auxiliary import phase
from mugrpo_megatron.extras.auxiliary.auxiliary_columns import link_columns
from mugrpo_megatron.phases.batches import teacher_column
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from tests.extras.auxiliary.stand import LEARNER, UPDATES, Answers, score_of, sealed_stage


@pytest.fixture
def source(run: Any, answers: Answers) -> Any:
    phase.score_stage(run, LEARNER, run.store, Cursor())
    return run


def taken(recipe: Recipe, source: Any, tmp_path: Path, seed: int = 0) -> Any:
    """The teacher's column in a branch of the source's stage, or of another one."""
    target = RunDirectory(tmp_path / "branch")
    store = sealed_stage(target, seed)
    if seed:
        target.stage(seed).rename(target.stage(0))
        store = type(store)(target.stage(0))
    link_columns(recipe, source.directory, target, 0)
    return store, teacher_column(recipe, target, store, 0)


def test_the_same_auxiliary_s_column_is_taken(source: Any, tmp_path: Path) -> None:
    store, column = taken(source.recipe, source, tmp_path)
    assert column.complete
    for update in range(UPDATES):
        for sample, logprobs in zip(store.read_update(update), column.read(update), strict=True):
            np.testing.assert_array_equal(logprobs, score_of(sample.response_ids))
    link_columns(source.recipe, source.directory, RunDirectory(tmp_path / "branch"), 0)
    assert column.complete


def test_a_column_of_another_temperature_of_other_weights_or_of_another_stage_is_not(
    source: Any, tmp_path: Path
) -> None:
    rollout = source.recipe.rollout.model_copy(update={"temperature": 0.5})
    assert not taken(source.recipe.model_copy(update={"rollout": rollout}), source, tmp_path / "hot")[1].complete
    assert not taken(source.recipe, source, tmp_path / "stage", seed=1)[1].complete
    (tmp_path / "teacher" / "model.safetensors").write_bytes(b"other")
    _, column = taken(source.recipe, source, tmp_path / "weights")
    assert not column.complete
    with pytest.raises(UserError, match="`mugrpo train` or `mugrpo generate` with this recipe computes them"):
        column.read(0)
