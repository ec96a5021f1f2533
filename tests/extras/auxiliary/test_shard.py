"""A stage scored in shards: which updates a shard has, who makes the columns, and what a run takes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.extras.auxiliary import phase
from mugrpo_megatron.extras.auxiliary.shard import ShardScoring
from mugrpo_megatron.phases import rounds
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import file_lock
from mugrpo_megatron.run.stopping import Stopped
from tests.extras.auxiliary.stand import COUNT, LEARNER, UPDATES, WIDTH, Answers, Killed, check_scored
from tests.tiny import COIN, FINISHED, mugrpo, rows, take_stages, weights, write_run


def shard_of(run: Any, number: int, of: int) -> ShardScoring:
    slot = EngineSlot(True, number=number, engines=of, local=0, local_engines=1, gpu=0)
    return ShardScoring(run, run.store, Cursor(), slot)


@pytest.mark.parametrize("of", [1, 3, UPDATES + 1])
def test_shards_divide_the_updates_and_the_last_makes_the_column(run: Any, answers: Answers, of: int) -> None:
    for number in range(of):
        updates = len(range(number, UPDATES, of))
        answers.prompts.clear()
        shard_of(run, number, of).score()
        assert len(answers.prompts) == updates * WIDTH
        rest = UPDATES - sum(len(range(other, UPDATES, of)) for other in range(number + 1))
        lacks = f"teacher logprobs of big ({rest} of {UPDATES} updates)" if rest else ""
        assert shard_of(run, number, of).merge() == lacks
    check_scored(run, run.store)
    answers.prompts.clear()
    phase.score_stage(run, LEARNER, run.store, Cursor())
    assert answers.prompts == [], "the run has nothing to ask"


def test_the_run_takes_over_from_a_shard_and_a_shard_from_the_run(run: Any, answers: Answers) -> None:
    shard_of(run, 1, 2).score()
    answers.after, answers.error = WIDTH, Killed
    with pytest.raises(Killed):
        phase.score_stage(run, LEARNER, run.store, Cursor())
    shard_of(run, 0, 4).score()
    assert len(answers.prompts) == (2 + 1 + 1) * WIDTH, "updates 1 and 3, 0, 4"
    phase.score_stage(run, LEARNER, run.store, Cursor())
    assert len(answers.prompts) == COUNT, "nothing twice"
    check_scored(run, run.store)


def test_an_engine_that_fails_is_restarted_and_one_that_fails_again_ends_the_shard(
    run: Any, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.after = WIDTH + 1
    shard_of(run, 0, 2).score()
    assert answers.starts == 2
    assert run.said == ["engine_failure", "it died\nThe auxiliary model's engine is restarted for what is missing."]
    monkeypatch.setattr(rounds, "MOST_FAILURES", 1)
    answers.after = 0
    with pytest.raises(EngineFailure, match="it died"):
        shard_of(run, 1, 2).score()


def test_asked_to_stop_a_shard_keeps_what_is_done(run: Any, answers: Answers) -> None:
    run.stop.requested = True
    with pytest.raises(Stopped, match=f"0 of {UPDATES} updates are on disk"):
        shard_of(run, 0, 2).score()


def test_a_shard_leaves_the_stage_to_the_run_that_scores_it(
    run: Any, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mugrpo_megatron.run.directory.LOCK_WAIT_S", 0.0)
    with file_lock(run.directory.stage_lock(0)):
        shard_of(run, 0, 1).score()
        assert shard_of(run, 0, 1).merge() == "what other processes are computing now"
    assert answers.starts == 0
    assert run.said == ["this process does nothing, since the run itself scores stage 0 now"]


@pytest.mark.process
@pytest.mark.slow
def test_a_process_without_a_learner_scores_a_stage_and_the_run_takes_it(finished_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "question.j2").write_text("{{ prompt }} {{ response }} {{ gold }}", encoding="utf-8")
    judge = {"function": "judge", "model": "wise", "max_tokens": 8, "prompt": str(tmp_path / "question.j2")}
    functions = {"coin": COIN, "quality": {**judge, "parse": "tests.extras.auxiliary.parsing:characters"}}
    recipe = write_run(
        tmp_path,
        finished_run.parent / "model",
        rollout={"behaviour": "engine"},
        reward={"function": "math", "functions": functions},
        auxiliary={"wise": {"model": str(finished_run.parent / "model")}},
        eval={"every_stages": 0},
        checkpoint={"every_updates": 0},
    )
    take_stages(finished_run, run_dir)
    said = mugrpo("generate", recipe, "--engine-only", "--shard", "0/1").stdout
    assert "the stage has all that auxiliary models compute" in said
    mugrpo("optimize", recipe)
    assert len(rows(run_dir, "update")) == FINISHED["updates_per_stage"]
    assert not [row for row in rows(run_dir, "phase") if row["phase"] == "auxiliary"], (
        "the run has started no auxiliary model"
    )
    mugrpo("publish", run_dir, "--stage", 0, "--to", tmp_path / "set")
    mugrpo("optimize", recipe, "--from", tmp_path / "set", "--set", f"run.dir={tmp_path / 'again'}")
    assert weights(run_dir) == weights(tmp_path / "again"), (
        "a branch of the published stage has the auxiliary models' columns"
    )
    name = "auxiliary/stage00000-reward-quality.parquet"
    assert (run_dir / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
