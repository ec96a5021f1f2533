"""A guest's turn with an engine that needs no model: what is computed, killed, stopped, failed and gone on with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mugrpo_megatron.errors import EngineFailure, UserError
from mugrpo_megatron.extras.guests import turn
from mugrpo_megatron.extras.guests.parts import Parts
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.phases.batches import StageUpdates, columns_of
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.stopping import Stopped
from tests.extras.guests.stand import (
    PROMPTS,
    RESPONSES,
    UPDATES,
    Answers,
    Killed,
    StandInEngine,
    score_of,
    sealed_stage,
    stand,
)

CPU = SimpleNamespace(device=SimpleNamespace(type="cpu"))
LEARNER = cast(Learner, SimpleNamespace(ranks=CPU, offload=lambda part: None, reload=lambda: None))
COUNT = UPDATES * PROMPTS * RESPONSES


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    answers = Answers()
    start = SimpleNamespace(start=lambda *_: StandInEngine(answers))
    monkeypatch.setattr(turn, "Engine", start)
    return answers


def taught(tmp_path: Path) -> Recipe:
    model = tmp_path / "teacher"
    model.mkdir(exist_ok=True)
    (model / "model.safetensors").write_bytes(b"weights")
    return Recipe.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "rollout": {"prompts_per_update": PROMPTS, "responses_per_prompt": RESPONSES},
            "objective": {"teacher": "big", "teacher_coef": 1.0},
            "guest": {"big": {"model": model}},
        }
    )


@pytest.fixture
def run(tmp_path: Path) -> Any:
    return stand(taught(tmp_path), tmp_path / "run")


def test_every_token_is_scored_once_and_in_its_place(run: Any, answers: Answers) -> None:
    store = sealed_stage(run.directory)
    turn.take_turns(run, LEARNER, store, Cursor())
    assert len(answers.prompts) == COUNT
    assert answers.starts == 1
    updates = StageUpdates(run.recipe, store, 0, columns_of(run.recipe, run.directory, "r", store, 0))
    for age in range(UPDATES):
        for sample in updates.samples(age):
            np.testing.assert_array_equal(sample.teacher_logprobs, score_of(sample.response_ids))
    ((name, facts),) = run.rows
    assert name == "guest"
    assert facts["memory_before"] > 0
    assert facts["memory_after"] > 0
    everything = [sample for age in range(UPDATES) for sample in updates.samples(age)]
    gaps = np.concatenate([one.behaviour_logprobs - one.teacher_logprobs for one in everything])
    assert facts["kl_teacher"] == pytest.approx(gaps.mean(), rel=1e-5)
    turn.take_turns(run, LEARNER, store, Cursor())
    assert answers.starts == 1, "nothing lacks, so nothing starts"
    assert sorted(path.name for path in run.directory.guest(0, "teacher-big").parent.iterdir()) == [
        "stage00000-teacher-big.json",
        "stage00000-teacher-big.parquet",
    ]


@pytest.mark.parametrize("after", [0, 9, 21, COUNT - 1])
def test_killed_in_its_turn_it_asks_only_for_what_is_missing(run: Any, answers: Answers, after: int) -> None:
    store = sealed_stage(run.directory)
    answers.after, answers.error = after, Killed
    with pytest.raises(Killed):
        turn.take_turns(run, LEARNER, store, Cursor())
    first = list(answers.prompts)
    durable = len(list(run.directory.guest(0, "teacher-big").parent.glob("*.parts-*/*.parquet"))) * PROMPTS * RESPONSES
    assert durable == after // (PROMPTS * RESPONSES) * PROMPTS * RESPONSES
    answers.prompts.clear()
    turn.take_turns(run, LEARNER, store, Cursor())
    assert len(answers.prompts) == COUNT - durable
    asked_twice = {one.index for one in first} & {one.index for one in answers.prompts}
    assert len(asked_twice) == after - durable, "those of the update that was in flight"
    assert run.directory.guest(0, "teacher-big").exists()


def test_an_engine_that_fails_is_restarted_for_the_rest(run: Any, answers: Answers) -> None:
    store = sealed_stage(run.directory)
    answers.after = 10
    turn.take_turns(run, LEARNER, store, Cursor())
    assert answers.starts == 2
    assert run.said == ["engine_failure", "it died\nThe guest's engine is restarted for what is missing."]


def test_an_engine_that_fails_again_and_again_ends_the_run(
    run: Any, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn, "MOST_FAILURES", 1)
    answers.after = 0
    with pytest.raises(EngineFailure, match="it died"):
        turn.take_turns(run, LEARNER, sealed_stage(run.directory), Cursor())


def test_asked_to_stop_it_keeps_what_is_done(run: Any, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    store = sealed_stage(run.directory)
    write = Parts.write

    def stopping(self: Any, update: int, table: Any) -> None:
        write(self, update, table)
        run.stop.asked = True

    with monkeypatch.context() as patch:
        patch.setattr(Parts, "write", stopping)
        with pytest.raises(Stopped, match=f"1 of {UPDATES} updates are on disk"):
            turn.take_turns(run, LEARNER, store, Cursor())
    run.stop.asked = False
    answers.prompts.clear()
    turn.take_turns(run, LEARNER, store, Cursor())
    assert len(answers.prompts) == COUNT - PROMPTS * RESPONSES


def test_other_weights_are_refused_in_the_same_stage_and_in_the_next(run: Any, answers: Answers) -> None:
    store = sealed_stage(run.directory)
    turn.take_turns(run, LEARNER, store, Cursor())
    model = run.recipe.guest.by_name["big"].model
    (model / "model.safetensors").write_bytes(b"other")
    for number in (0, 1):
        with pytest.raises(UserError, match=r"guest\.big\.model holds other weights"):
            turn.take_turns(run, LEARNER, sealed_stage(run.directory, 1) if number else store, Cursor(number))


def test_a_damaged_part_is_told_by_its_name(run: Any, answers: Answers) -> None:
    store = sealed_stage(run.directory)
    answers.after, answers.error = COUNT - 1, Killed
    with pytest.raises(Killed):
        turn.take_turns(run, LEARNER, store, Cursor())
    part = sorted(run.directory.guest(0, "teacher-big").parent.glob("*.parts-*/*.parquet"))[0]
    content = bytearray(part.read_bytes())
    content[40] ^= 255
    part.write_bytes(content)
    with pytest.raises(UserError, match=f"{part.name}: damaged"):
        turn.take_turns(run, LEARNER, store, Cursor())
