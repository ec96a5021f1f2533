"""Generation of a stage with an engine that does as told: what reaches the disk when it fails or the run is stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.engine.client import MOST_FAILURES
from mugrpo_megatron.engine.queue import read_load
from mugrpo_megatron.errors import EngineFailure, EngineStopped
from mugrpo_megatron.observe.log import MetricLog
from mugrpo_megatron.phases.generate import sample, seal_if_complete, whole_stage
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.items import Pending, Score
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.stage_groups import group_prompt
from mugrpo_megatron.run.stopping import Stopped
from mugrpo_megatron.samples import Problem
from mugrpo_megatron.stages.store import StageStore
from tests.hostile.damage import flip
from tests.phases.stand import Oracle, Stand, response, standing

UPDATES, PROMPTS, RESPONSES = 3, 4, 2
GROUPS = UPDATES * PROMPTS
RECIPE = Recipe.model_validate(
    {
        "reward": {"workers": 1},
        "rollout": {"prompts_per_update": PROMPTS, "responses_per_prompt": RESPONSES},
        "schedule": {"stages": 2, "updates_per_stage": UPDATES},
    }
)
PROBLEMS = [Problem(f"p{n}", str(n), str(n % 2), "coins", row={"n": n}) for n in range(2 * GROUPS)]
CURSOR = Cursor(1, 0, UPDATES)


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(RECIPE.reward) as verifier:
        yield verifier


@pytest.fixture
def stand(tmp_path: Path, log: MetricLog, verifier: Verifier) -> Stand:
    """Its engine answers every problem with 1 and 0, in this order."""
    engine = Oracle(lambda prompt, n: [response(text, version=3) for text in "10"])
    return standing(tmp_path, log, RECIPE, engine, verifier, PROBLEMS)


def store(stand: Stand) -> StageStore:
    return stand.run.stage_store(CURSOR)


def generated(stand: Stand) -> None:
    stage, whole = store(stand), whole_stage(RECIPE, CURSOR)
    sample(stand.run, stand.leader, stage, whole)
    seal_if_complete(stand.run, stage, whole)


def test_a_stage_holds_the_runs_next_problems_scored_and_in_order(stand: Stand) -> None:
    generated(stand)
    stage = store(stand)
    samples = [sample for update in range(stage.updates) for sample in stage.read_update(update, with_text=True)]
    assert [sample.group for sample in samples] == [group for group in range(GROUPS) for _ in range(RESPONSES)]
    prompts = [group_prompt(RECIPE, stand.leader.problems, CURSOR, group) for group in range(GROUPS)]
    assert [sample.problem for sample in samples[::RESPONSES]] == [prompt.problem.id for prompt in prompts]
    golds = [float(prompt.problem.answer) for prompt in prompts]
    assert [(a.reward, b.reward) for a, b in zip(samples[::2], samples[1::2], strict=True)] == [
        (gold, 1 - gold) for gold in golds
    ]
    assert [(one.text, one.gold) for one in samples[:2]] == [(text, prompts[0].problem.answer) for text in "10"]
    assert [one.extracted for one in samples[:2]] == ["1", "0"]
    assert all(one.why for one in samples)
    rewards, groups = np.array([one.reward for one in samples]), np.array([one.group for one in samples])
    assert [one.advantage for one in samples] == group_advantages(rewards, groups, RECIPE.objective).tolist()
    assert [json.loads(one.row)["n"] for one in samples[::2]] == [prompt.problem.row["n"] for prompt in prompts]


@pytest.mark.parametrize("finished", [0, 1, GROUPS - 1])
def test_an_engine_that_dies_keeps_what_it_finished_and_generates_the_rest_once(stand: Stand, finished: int) -> None:
    stand.engine.lives = [finished]
    generated(stand)
    assert not store(stand).sealed
    assert len(store(stand).verified_groups()) == finished
    assert len(stand.rows("event")) == 1
    generated(stand)  # it does not run, so nothing is added
    assert len(store(stand).verified_groups()) == finished
    stand.engine.running = True
    generated(stand)
    assert store(stand).sealed
    assert stand.engine.finished == GROUPS


def test_the_groups_of_a_damaged_shard_are_generated_again(stand: Stand) -> None:
    stand.engine.lives = [GROUPS - 1]
    generated(stand)
    [shard] = store(stand).directory.glob("shard-*.parquet")
    flip(shard)
    stand.engine.running = True
    generated(stand)
    assert store(stand).sealed
    assert stand.engine.finished == GROUPS - 1 + GROUPS


def test_an_engine_that_keeps_failing_without_a_finished_group_ends_the_run(stand: Stand) -> None:
    for failures in range(MOST_FAILURES):
        stand.engine.lives, stand.engine.running = [0], True
        if failures == MOST_FAILURES - 1:
            with pytest.raises(EngineFailure, match="it died"):
                generated(stand)
        else:
            generated(stand)
    assert store(stand).verified_groups() == set()


@pytest.mark.parametrize("count", [5, GROUPS])
def test_a_request_to_stop_leaves_every_finished_group_on_disk_and_the_stage_open(stand: Stand, count: int) -> None:
    """Also where it comes with the last group: the stage is sealed by the run that resumes."""
    stand.engine.answering = lambda: setattr(stand.run.stop, "requested", stand.engine.finished == count)
    with pytest.raises(Stopped):
        generated(stand)
    assert not store(stand).sealed
    assert stand.engine.finished == len(store(stand).verified_groups()) == count
    stand.run.stop.requested, stand.engine.answering = False, lambda: None
    generated(stand)
    assert store(stand).sealed
    assert stand.engine.finished == GROUPS


class SlowVerifier:
    """Scores the groups with an odd number of responses submitted so far at once, and the others never."""

    def __init__(self) -> None:
        self.submitted = 0

    def submit(self, responses: list[str], golds: list[str], *about: object, **known: object) -> Pending[Score]:
        self.submitted += 1
        pending = Pending[Score](len(responses))
        if self.submitted % 2:
            for place in range(len(responses)):
                pending.put(place, Score(1.0, "", "", 0.0))
        return pending


def test_a_request_to_stop_does_not_wait_for_scores(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group that is scored by then goes to disk, those behind an unscored one too."""
    monkeypatch.setattr(stand.leader, "verifier", SlowVerifier())
    stand.engine.answering = lambda: setattr(stand.run.stop, "requested", stand.engine.finished == GROUPS)
    with pytest.raises(Stopped, match=f"{GROUPS // 2} of {GROUPS} groups of this stage are on disk"):
        generated(stand)
    assert len(store(stand).verified_groups()) == GROUPS // 2


def test_an_engine_ended_by_a_request_has_not_failed(stand: Stand) -> None:
    def stop() -> None:
        stand.run.stop.requested = True
        stand.engine.running = False
        raise EngineStopped("the run was asked to stop")

    stand.engine.answering = stop
    with pytest.raises(Stopped):
        generated(stand)
    assert len(stand.rows("event")) == 0
    assert stand.leader.failures_in_a_row == 0


def test_an_engines_readings_lie_in_its_generation_though_the_clock_goes_back(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()

    def answering() -> None:
        monkeypatch.setattr(time, "time", lambda: now - 86_400)
        stand.engine.load_record.add(read_load(7, []))

    stand.engine.answering = answering
    generated(stand)
    [generation] = [row for row in stand.rows("phase") if row["phase"] == "generate"]
    readings = stand.rows("engine")
    assert [row["tokens"] for row in readings] == [7] * GROUPS
    assert all(generation["start"] <= row["time"] <= generation["end"] for row in readings)
