"""Evaluation during a run, with an engine that does as told: what is sampled, and what happens when it breaks off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mugrpo_megatron import train
from mugrpo_megatron.engine.client import MOST_FAILURES
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.observe.examples import read_examples
from mugrpo_megatron.observe.log import MetricLog
from mugrpo_megatron.phases.evaluate import SHOWN, evaluation_due, sampled_alike
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.scoring import EvalSection
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.engines import Engines
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stopping import AllStopped
from mugrpo_megatron.samples import Problem, Prompt, Response
from mugrpo_megatron.train import evaluate_policy
from tests.phases.stand import Oracle, Stand, response, standing

LEARNER = cast(Learner, SimpleNamespace(reload=lambda: None))
"""Only the hand-over needs it, which these tests replace."""
SETS = {"two": 6, "four": 5, "other": 4}
PROBLEMS = [Problem(f"{name}:{n}", f"{n}", "2", name) for name, count in SETS.items() for n in range(count)]
RECIPE = Recipe.model_validate(
    {
        "reward": {"workers": 1},
        "rollout": {"max_response_tokens": 7},
        "eval": {
            "every_updates": 3,
            "sets": {"four": {"samples": 4, "temperature": 0.6, "top_p": 0.9, "max_tokens": 5}},
        },
    }
)


def answers(prompt: Prompt, n: int) -> list[Response]:
    """Every problem of the set `two` with 2 and of the others with 4; all golds are 2. One of four is cut off."""
    ends = ["length", *["stop"] * 3] if n == 4 else ["stop"]
    return [response("2" if prompt.problem.source == "two" else "4", end=end) for end in ends]


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(RECIPE.reward) as verifier:
        yield verifier


@pytest.fixture
def stand(tmp_path: Path, log: MetricLog, verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return synced(standing(tmp_path, log, RECIPE, Oracle(answers), verifier, PROBLEMS), monkeypatch)


def synced(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Syncs are noted, and start the engine again."""

    def sync(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
        stand.engine.running = True
        stand.syncs.append(cursor.updates)

    monkeypatch.setattr(train, "hand_over", sync)
    monkeypatch.setattr(stand.engines, "sleep", lambda: None)
    return stand


def evaluated(stand: Stand, cursor: Cursor) -> None:
    evaluate_policy(stand.run, LEARNER, stand.engines, cursor)


def test_sets_are_sampled_each_as_it_asks_and_never_pooled(stand: Stand) -> None:
    evaluated(stand, Cursor(1, 3, 11))
    (row,) = stand.rows("eval")
    assert (row["stage"], row["update"], row["age"]) == (1, 11, 3)
    assert [row[f"accuracy/{name}"] for name in (*SETS, "mean")] == [1.0, 0.0, 0.0, pytest.approx(1 / 3)]
    assert [row[f"problems/{name}"] for name in SETS] == list(SETS.values())
    assert [row[f"samples/{name}"] for name in SETS] == [1, 4, 1]
    assert [row[f"truncated/{name}"] for name in SETS] == [0.0, 0.25, 0.0]
    assert [row[f"passed/{name}"] for name in SETS] == [1.0, 0.0, 0.0]
    assert [row[f"unparsed/{name}"] for name in SETS] == [0.0, 0.0, 0.0]
    assert row["low/mean"] < row["accuracy/mean"] < row["high/mean"]
    assert row["tokens"] == 6 + 4 * 5 + 4
    assert {(name, n, s.temperature, s.top_p, s.max_tokens) for name, n, s in stand.engine.asked} == {
        ("two", 1, 0.0, 1.0, 7),
        ("four", 4, 0.6, 0.9, 5),
        ("other", 1, 0.0, 1.0, 7),
    }


def test_a_stage_that_others_have_generated_is_evaluated_once_before_its_first_update(stand: Stand) -> None:
    for cursor in (Cursor(1, 0, 8), Cursor(1, 0, 8), Cursor(1, 1, 9), Cursor(2, 0, 16)):
        if evaluation_due(stand.run, cursor):
            evaluated(stand, cursor)
    assert [(row["stage"], row["update"], row["age"]) for row in stand.rows("eval")] == [(1, 8, 0), (2, 16, 0)]
    assert stand.syncs == [8, 16]


def test_a_program_has_no_answer_to_find(stand: Stand) -> None:
    """`unparsed` is of math's answers; pass@k is of every reward that is right or wrong."""
    code = RECIPE.reward.model_copy(update={"function": "code"})
    stand.run = replace(stand.run, recipe=RECIPE.model_copy(update={"reward": code}))
    evaluated(stand, Cursor(1, 3, 11))
    (row,) = stand.rows("eval")
    assert not [name for name in row if name.startswith("unparsed/")]
    assert [name for name in row if name.startswith("passed/")]


def test_sets_that_are_sampled_alike_are_asked_together() -> None:
    assert sampled_alike(RECIPE.eval, list(SETS)) == [["two", "other"], ["four"]]
    alike = EvalSection.model_validate({"samples": 4, "sets": {"a": {"samples": 4}, "b": {}}})
    assert sampled_alike(alike, ["a", "b", "c"]) == [["a", "b", "c"]]


def test_evaluations_inside_a_stage_are_due_at_multiples_and_not_at_its_ends(stand: Stand) -> None:
    cursors = [Cursor(2, age, 40 + age) for age in range(1, 10)]
    for cursor in cursors:
        if evaluation_due(stand.run, cursor):
            evaluated(stand, cursor)
    assert [(row["update"], row["age"]) for row in stand.rows("eval")] == [(43, 3), (46, 6), (49, 9)]
    assert stand.syncs == [43, 46, 49]


@pytest.mark.parametrize("lives", [[0], [7], [0, 3], [8, 8]])
def test_engines_that_fail_are_restarted_until_every_problem_is_answered(stand: Stand, lives: list[int]) -> None:
    stand.engine.lives = list(lives)
    evaluated(stand, Cursor(1, 3, 11))
    assert len(stand.syncs) == 1 + len(lives)
    assert len(stand.rows("event")) == len(lives)
    (row,) = stand.rows("eval")
    assert row["accuracy/two"] == 1.0
    assert stand.leader.failures_in_a_row == 0


def test_an_engine_that_keeps_failing_ends_the_run(stand: Stand) -> None:
    stand.engine.lives = [7] * MOST_FAILURES
    with pytest.raises(EngineFailure, match="it died"):
        evaluated(stand, Cursor(1, 3, 11))
    assert stand.rows("eval") == []


def test_a_request_to_stop_is_answered_with_the_state_saved_and_nothing_logged(stand: Stand) -> None:
    asked = stand.engine.asked
    stand.engine.answering = lambda: setattr(stand.run.stop, "requested", len(asked) >= 3)
    with pytest.raises(AllStopped) as stopped:
        evaluated(stand, Cursor(1, 3, 11))
    assert stand.rows("eval") == []
    assert len(asked) == 3
    assert stopped.value.cursor == Cursor(1, 3, 11)


def test_a_request_that_comes_with_the_last_answer_loses_no_evaluation(stand: Stand) -> None:
    asked = stand.engine.asked
    stand.engine.answering = lambda: setattr(stand.run.stop, "requested", len(asked) == sum(SETS.values()))
    evaluated(stand, Cursor(1, 3, 11))
    assert len(stand.rows("eval")) == 1


def test_one_response_of_the_same_problems_is_kept_at_every_evaluation(stand: Stand) -> None:
    for cursor in (Cursor(0, 0, 0), Cursor(1, 3, 11)):
        evaluated(stand, cursor)
    first, later = (read_examples(stand.run.directory.samples(update)) for update in (0, 11))
    assert [one.problem for one in first] == [one.problem for one in later]
    assert [one.set for one in first] == [name for name, size in SETS.items() for _ in range(min(SHOWN, size))]
    for one in first:
        answer = "2" if one.set == "two" else "4"
        assert (one.text, one.extracted, one.gold, one.reward) == (answer, answer, "2", float(one.set == "two"))
        assert one.truncated == (one.set == "four")
