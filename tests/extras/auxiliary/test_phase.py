"""An auxiliary model's turn with an engine that needs no model: what is computed, killed, stopped, failed and gone
on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.errors import EngineFailure, UserError
from mugrpo_megatron.extras.auxiliary import phase
from mugrpo_megatron.extras.auxiliary.auxiliary_columns import ColumnParts, link_columns
from mugrpo_megatron.phases import rounds
from mugrpo_megatron.phases.batches import teacher_column
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.stopping import Stopped
from tests.extras.auxiliary.stand import (
    COUNT,
    LEARNER,
    UPDATES,
    WIDTH,
    Answers,
    Killed,
    check_scored,
    score_of,
    sealed_stage,
    stage_updates,
)


def test_every_token_is_scored_once_and_in_its_place(run: Any, answers: Answers) -> None:
    phase.score_stage(run, LEARNER, run.store, Cursor())
    assert len(answers.prompts) == COUNT
    assert answers.starts == 1
    check_scored(run, run.store)
    ((name, facts),) = run.rows
    assert name == "auxiliary"
    assert facts["memory_before"] > 0
    assert facts["memory_after"] > 0
    updates = stage_updates(run, run.store)
    everything = [sample for age in range(UPDATES) for sample in updates.samples(age)]
    gaps = np.concatenate([sample.engine_logprobs - sample.teacher_logprobs for sample in everything])
    assert facts["kl_teacher"] == pytest.approx(gaps.mean(), rel=1e-5)
    phase.score_stage(run, LEARNER, run.store, Cursor())
    assert answers.starts == 1, "nothing lacks, so nothing starts"
    assert sorted(path.name for path in run.directory.auxiliary(0, "teacher-big").parent.iterdir()) == [
        "stage00000-teacher-big.json",
        "stage00000-teacher-big.parquet",
    ]


@pytest.mark.parametrize("after", [0, 21, COUNT - 1])
def test_killed_in_its_turn_it_asks_only_for_what_is_missing(run: Any, answers: Answers, after: int) -> None:
    answers.after, answers.error = after, Killed
    with pytest.raises(Killed):
        phase.score_stage(run, LEARNER, run.store, Cursor())
    first = list(answers.prompts)
    durable = len(list(run.directory.auxiliary(0, "teacher-big").parent.glob("*.parts-*/*.parquet"))) * WIDTH
    assert durable == after // WIDTH * WIDTH
    answers.prompts.clear()
    phase.score_stage(run, LEARNER, run.store, Cursor())
    assert len(answers.prompts) == COUNT - durable
    asked_twice = {prompt.index for prompt in first} & {prompt.index for prompt in answers.prompts}
    assert len(asked_twice) == after - durable, "those of the update that was in flight"
    assert run.directory.auxiliary(0, "teacher-big").exists()


def test_an_engine_that_fails_is_restarted_for_the_rest(run: Any, answers: Answers) -> None:
    answers.after = 10
    phase.score_stage(run, LEARNER, run.store, Cursor())
    assert answers.starts == 2
    assert run.said == ["engine_failure", "it died\nThe auxiliary model's engine is restarted for what is missing."]


def test_an_engine_that_fails_again_and_again_ends_the_run(
    run: Any, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "MOST_FAILURES", 1)
    answers.after = 0
    with pytest.raises(EngineFailure, match="it died"):
        phase.score_stage(run, LEARNER, run.store, Cursor())


def test_asked_to_stop_it_keeps_what_is_done(run: Any, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    write = ColumnParts.write

    def stopping(self: Any, update: int, table: Any) -> None:
        write(self, update, table)
        run.stop.requested = True

    with monkeypatch.context() as patch:
        patch.setattr(ColumnParts, "write", stopping)
        with pytest.raises(Stopped, match=f"1 of {UPDATES} updates are on disk"):
            phase.score_stage(run, LEARNER, run.store, Cursor())
    run.stop.requested = False
    answers.prompts.clear()
    phase.score_stage(run, LEARNER, run.store, Cursor())
    assert len(answers.prompts) == COUNT - WIDTH


def test_other_weights_are_refused_in_the_same_stage_and_in_the_next(run: Any, answers: Answers) -> None:
    phase.score_stage(run, LEARNER, run.store, Cursor())
    model = run.recipe.auxiliary.by_name["big"].model
    (model / "model.safetensors").write_bytes(b"other")
    for number in (0, 1):
        with pytest.raises(UserError, match=r"weights in auxiliary\.big\.model have changed since"):
            phase.score_stage(run, LEARNER, sealed_stage(run.directory, 1) if number else run.store, Cursor(number))


def test_a_damaged_part_is_told_by_its_name(run: Any, answers: Answers) -> None:
    answers.after, answers.error = COUNT - 1, Killed
    with pytest.raises(Killed):
        phase.score_stage(run, LEARNER, run.store, Cursor())
    part = sorted(run.directory.auxiliary(0, "teacher-big").parent.glob("*.parts-*/*.parquet"))[0]
    content = bytearray(part.read_bytes())
    content[40] ^= 255
    part.write_bytes(content)
    with pytest.raises(UserError, match=f"{part.name}: damaged"):
        phase.score_stage(run, LEARNER, run.store, Cursor())


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
