"""A stage scored in shares: which updates a share has, who makes the columns, and processes that are killed."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.extras.guests import share, turn
from mugrpo_megatron.extras.guests.share import ShareTurn
from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.phases.batches import StageUpdates, columns_of
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import locked
from mugrpo_megatron.run.stopping import Stopped
from mugrpo_megatron.stages.store import StageStore
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
from tests.extras.guests.test_killed_turn import UPDATES as MANY
from tests.extras.guests.test_killed_turn import recipe_of
from tests.extras.guests.test_taught_run import read
from tests.extras.guests.test_turn import COUNT, LEARNER, taught
from tests.extras.prefetch.test_sealing import end
from tests.extras.prefetch.test_train_and_follow import follows, hold_until_claimed
from tests.extras.prefetch.test_train_and_follow import recipe_of as following
from tests.forked import started
from tests.tiny import mugrpo

WIDTH = PROMPTS * RESPONSES


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    answers = Answers()
    start = SimpleNamespace(start=lambda *_: StandInEngine(answers))
    for module in (share, turn):
        monkeypatch.setattr(module, "Engine", start)
    return answers


@pytest.fixture
def run(tmp_path: Path) -> Any:
    run = stand(taught(tmp_path), tmp_path / "run")
    run.store = sealed_stage(run.directory)
    return run


def share_of(run: Any, number: int, of: int) -> ShareTurn:
    slot = EngineSlot(True, number=number, engines=of, local=0, local_engines=1, gpu=0)
    return ShareTurn(run.recipe, run.store, 0, slot, run.display, run.stop)


def check_column(run: Any) -> None:
    updates = StageUpdates(run.recipe, run.store, 0, columns_of(run.recipe, run.directory, "r", run.store, 0))
    for age in range(UPDATES):
        for sample in updates.samples(age):
            np.testing.assert_array_equal(sample.teacher_logprobs, score_of(sample.response_ids))


@pytest.mark.parametrize("of", [1, 2, 3, UPDATES + 1])
def test_shares_divide_the_updates_and_the_last_makes_the_column(run: Any, answers: Answers, of: int) -> None:
    for number in range(of):
        own = len(range(number, UPDATES, of))
        answers.prompts.clear()
        share_of(run, number, of).take()
        assert len(answers.prompts) == own * WIDTH
        rest = UPDATES - sum(len(range(one, UPDATES, of)) for one in range(number + 1))
        lacks = f"teacher logprobs of big ({rest} of {UPDATES} updates)" if rest else ""
        assert share_of(run, number, of).gather() == lacks
    check_column(run)
    answers.prompts.clear()
    turn.take_turns(run, LEARNER, run.store, Cursor())
    assert answers.prompts == [], "the run has nothing to ask"


def test_the_run_takes_over_from_a_share_and_a_share_from_the_run(run: Any, answers: Answers) -> None:
    share_of(run, 1, 2).take()
    answers.after, answers.error = WIDTH, Killed
    with pytest.raises(Killed):
        turn.take_turns(run, LEARNER, run.store, Cursor())
    share_of(run, 0, 4).take()
    assert len(answers.prompts) == (2 + 1 + 1) * WIDTH, "updates 1 and 3, 0, 4"
    turn.take_turns(run, LEARNER, run.store, Cursor())
    assert len(answers.prompts) == COUNT, "nothing twice"
    check_column(run)


def test_an_engine_that_fails_is_restarted_and_one_that_fails_again_ends_the_share(
    run: Any, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.after = WIDTH + 1
    share_of(run, 0, 2).take()
    assert answers.starts == 2
    assert run.said == ["it died\nThe guest's engine is restarted for what is missing."]
    monkeypatch.setattr(share, "MOST_FAILURES", 1)
    answers.after = 0
    with pytest.raises(EngineFailure, match="it died"):
        share_of(run, 1, 2).take()


def test_asked_to_stop_a_share_keeps_what_is_done(run: Any, answers: Answers) -> None:
    run.stop.asked = True
    with pytest.raises(Stopped, match="3 updates of this share are missing"):
        share_of(run, 0, 2).take()


def test_a_share_leaves_the_stage_to_the_run_that_scores_it(
    run: Any, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mugrpo_megatron.extras.prefetch.shares.CLAIM_SECONDS", 0.0)
    with locked(run.directory.stage_lock(0)):
        share_of(run, 0, 1).take()
        assert share_of(run, 0, 1).gather() == "what they are computing"
    assert answers.starts == 0
    assert run.said == ["the guests score stage 0 in the run's own turn"]


@pytest.mark.process
@pytest.mark.slow
def test_two_processes_score_a_stage_and_one_is_killed_and_run_again(tmp_path: Path) -> None:
    """By a teacher, whose scores are the learner's pass, and by a judge, who would answer something else again."""
    recipe, run_dir = recipe_of(tmp_path, kl_anchor=str(tmp_path / "model")), tmp_path / "run"
    words = [["generate", recipe, "--engine-only", "--shard", f"{number}/2"] for number in (0, 1)]
    for one in words:
        assert "once all shares have, `mugrpo seal" in mugrpo(*one).stdout
    assert "run its shares again for its guests" in mugrpo("seal", run_dir).stdout
    guests = run_dir / "guests"
    with ExitStack() as stack:
        commands = [stack.enter_context(started(*one)) for one in words]
        while not any(guests.glob("*teacher*.parts-*/*[13579].parquet")):
            assert commands[1].wait(0.005) is None, commands[1].said
        end(commands[1], signal.SIGKILL)
        assert commands[0].wait() == 0, commands[0].said
        said = commands[0].said
    assert f"scores of quality of wise ({MANY // 2} of {MANY} updates); run them again" in said, said
    durable = {path: pq.read_table(path).to_pylist() for path in guests.glob("*.parts-*/*.parquet")}
    assert MANY < len(durable) < MANY * 3 // 2, "two halves, and a part of a half"
    assert "the stage has all that guests compute" in mugrpo(*words[1]).stdout
    for path, rows in durable.items():
        column = path.parent.with_name(f"{path.parent.name.partition('.')[0]}.parquet")
        with pq.ParquetFile(column) as file:
            assert file.num_row_groups == MANY
            assert file.read_row_group(int(path.stem)).to_pylist() == rows
    assert not list(guests.glob("*.parts-*"))
    mugrpo("optimize", recipe)
    log = read_rows(run_dir / "metrics.jsonl")
    assert sum(row["kind"] == "update" for row in log) == StageStore(run_dir / "stages" / "00000").updates == MANY
    assert not [row for row in log if row.get("phase") == "guest"], "the run has started no guest"
    for update in range(MANY):
        taught = read(guests / "stage00000-teacher-wise.parquet", update)
        np.testing.assert_allclose(taught, read(run_dir / "anchor" / "stage00000.parquet", update), atol=1e-4)
    mugrpo("publish", run_dir, "--stage", 0, "--to", tmp_path / "set")
    mugrpo("optimize", recipe, "--from", tmp_path / "set", "--set", f"run.dir={tmp_path / 'again'}")
    weights = [(path / "hf" / "model.safetensors").read_bytes() for path in (run_dir, tmp_path / "again")]
    assert weights[0] == weights[1], "a branch of the published stage has the guests' columns"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.night
def test_who_follows_a_run_also_scores_the_stage_ahead(tmp_path: Path) -> None:
    """The learner, which waits for that, has a guest in its own first stage alone."""
    folder = tmp_path / "early"
    guest = {"wise": {"model": str(folder / "model")}}
    recipe = following(folder, stages=2, age=3, prompts=300, objective={"teacher": "wise"}, guest=guest)
    run_dir = folder / "run"
    with started(*follows(recipe, "0/1")) as follower, started("train", recipe) as learner:
        hold_until_claimed(learner, follower, run_dir)
        for command in (learner, follower):
            assert command.wait() == 0, command.said
        assert "stage 1, share 0/1: teacher logprobs of wise" in follower.said
    log = read_rows(run_dir / "metrics.jsonl")
    assert [row["stage"] for row in log if row.get("phase") == "guest"] == [0]
    assert {row["stage"] for row in log if "kl_teacher" in row and row["kind"] == "update"} == {0, 1}
