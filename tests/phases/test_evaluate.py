"""Evaluation during a run, with an engine that does as told: what is sampled, and what happens when it breaks off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mugrpo_megatron.data.prompts import FittingPrompts
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.engine.client import MOST_FAILURES
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.learner.groups import Ranks
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.observe.examples import read_examples
from mugrpo_megatron.observe.log import FILE_NAME, MetricLog, read_rows
from mugrpo_megatron.observe.progress import Display
from mugrpo_megatron.phases import evaluate
from mugrpo_megatron.phases.evaluate import SHOWN, evaluate_if_due, evaluate_weights, sampled_alike
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.scoring import EvalSection
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.checkpoints import Saver
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.leader import EngineLeader, Engines
from mugrpo_megatron.run.record import Record
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stopping import AllStopped
from mugrpo_megatron.run.world import World
from mugrpo_megatron.samples import Problem, Prompt, Response
from mugrpo_megatron.weights.sync import Bridge

TOKENIZER = build_arithmetic_tokenizer()
LEARNER = cast(Learner, SimpleNamespace(reload=lambda: None))
"""Only syncing and resting the engines needs it, which these tests replace."""
SETS = {"two": 6, "four": 5, "other": 4}
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


@dataclass
class Oracle:
    """An engine that answers every problem of the set `two` with 2 and of the others with 4; all golds are 2."""

    lives: list[int] = field(default_factory=list)
    """Problems that it answers before it dies, one number for each of its lives; then it lives on."""
    running: bool = True
    asked: list[tuple[str, int, Sampling]] = field(default_factory=list)
    answering: Callable[[], None] = lambda: None

    def generate_from(
        self, take: Callable[[int, int], list[Prompt]], n: int, sampling: Sampling
    ) -> Iterator[tuple[Prompt, list[Response]]]:
        while prompts := take(0, 4):
            for prompt in prompts:
                self.answering()
                if self.lives and not self.lives[0]:
                    self.lives.pop(0)
                    self.running = False
                    raise EngineFailure("it died")
                self.lives[:1] = [left - 1 for left in self.lives[:1]]
                self.asked.append((prompt.problem.source, n, sampling))
                answer = "2" if prompt.problem.source == "two" else "4"
                ids = np.array(TOKENIZER.encode(answer), dtype=np.int32)
                ends = ["length", *["stop"] * 3] if n == 4 else ["stop"]  # one of four is cut off
                yield prompt, [Response(ids, np.zeros(1, dtype=np.float32), end, 0) for end in ends]


@dataclass
class Saved:
    """A saver that only notes what it is asked."""

    cursors: list[Cursor] = field(default_factory=list)

    def save(self, cursor: Cursor) -> None:
        self.cursors.append(cursor)

    def wait(self) -> None: ...


@dataclass
class Stand:
    """A run that stands in a stage, with an engine that is `engine`."""

    run: Run
    engines: Engines
    engine: Oracle
    saver: Saved
    syncs: list[int]

    def evaluate(self, cursor: Cursor) -> None:
        evaluate_weights(self.run, LEARNER, self.engines, cursor)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for row in read_rows(self.run.directory.path / FILE_NAME) if row["kind"] == "eval"]

    @property
    def failures(self) -> int:
        return sum(row["kind"] == "event" for row in read_rows(self.run.directory.path / FILE_NAME))


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(RECIPE.reward) as verifier:
        yield verifier


@pytest.fixture
def stand(tmp_path: Path, log: MetricLog, verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> Stand:
    (tmp_path / "checkpoints").mkdir()
    engine, saver, syncs = Oracle(), Saved(), list[int]()
    problems = [Problem(f"{name}:{n}", f"{n}", "2", name) for name, count in SETS.items() for n in range(count)]
    generator = SimpleNamespace(
        engine=engine,
        verifier=verifier,
        tokenizer=TOKENIZER,
        problems=SimpleNamespace(held_out=FittingPrompts(problems, [[1]] * len(problems), 0)),
        failure=None,
        failures_in_a_row=0,
    )

    def failed(failure: EngineFailure) -> None:
        generator.failure, generator.failures_in_a_row = failure, generator.failures_in_a_row + 1

    generator.failed = failed
    ranks = cast(Ranks, SimpleNamespace(rank=0, world=1, heartbeat=None))
    directory = RunDirectory(tmp_path)
    world = World(ranks, None, engines=1)
    run = Run(RECIPE, directory, world, log, Display(None, None), cast(Saver, saver), Record("r"))

    def sync(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
        engine.running = True
        syncs.append(cursor.updates)

    monkeypatch.setattr(evaluate, "sync_weights", sync)
    monkeypatch.setattr(evaluate, "sleep_engines", lambda run, engines: None)
    return Stand(run, Engines(cast(Bridge, None), cast(EngineLeader, generator)), engine, saver, syncs)


def test_sets_are_sampled_each_as_it_asks_and_never_pooled(stand: Stand) -> None:
    stand.evaluate(Cursor(1, 3, 11))
    (row,) = stand.rows
    assert (row["stage"], row["update"], row["age"]) == (1, 11, 3)
    assert [row[f"accuracy/{name}"] for name in (*SETS, "mean")] == [1.0, 0.0, 0.0, pytest.approx(1 / 3)]
    assert [row[f"problems/{name}"] for name in SETS] == list(SETS.values())
    assert [row[f"samples/{name}"] for name in SETS] == [1, 4, 1]
    assert [row[f"truncated/{name}"] for name in SETS] == [0.0, 0.25, 0.0]
    assert row["low/mean"] < row["accuracy/mean"] < row["high/mean"]
    assert row["tokens"] == 6 + 4 * 5 + 4
    assert {(name, n, s.temperature, s.top_p, s.max_tokens) for name, n, s in stand.engine.asked} == {
        ("two", 1, 0.0, 1.0, 7),
        ("four", 4, 0.6, 0.9, 5),
        ("other", 1, 0.0, 1.0, 7),
    }


def test_a_stage_that_others_have_generated_is_evaluated_once_before_its_first_update(stand: Stand) -> None:
    for cursor in (Cursor(1, 0, 8), Cursor(1, 0, 8), Cursor(1, 1, 9), Cursor(2, 0, 16)):
        evaluate_if_due(stand.run, LEARNER, stand.engines, cursor)
    assert [(row["stage"], row["update"], row["age"]) for row in stand.rows] == [(1, 8, 0), (2, 16, 0)]
    assert stand.syncs == [8, 16]


def test_a_program_has_no_answer_to_find(stand: Stand) -> None:
    """`unparsed` is of math's answers; pass@k is of every reward that is right or wrong."""
    code = RECIPE.reward.model_copy(update={"function": "code"})
    stand.run = replace(stand.run, recipe=RECIPE.model_copy(update={"reward": code}))
    stand.evaluate(Cursor(1, 3, 11))
    (row,) = stand.rows
    assert not [name for name in row if name.startswith("unparsed/")]
    assert [name for name in row if name.startswith("passed/")]


def test_sets_that_are_sampled_alike_are_asked_together() -> None:
    assert sampled_alike(RECIPE.eval, list(SETS)) == [["two", "other"], ["four"]]
    alike = EvalSection.model_validate({"samples": 4, "sets": {"a": {"samples": 4}, "b": {}}})
    assert sampled_alike(alike, ["a", "b", "c"]) == [["a", "b", "c"]]


def test_evaluations_inside_a_stage_are_due_at_multiples_and_not_at_its_ends(stand: Stand) -> None:
    cursors = [Cursor(2, age, 40 + age) for age in range(1, 10)]
    for cursor in cursors:
        evaluate_if_due(stand.run, LEARNER, stand.engines, cursor)
    assert [(row["update"], row["age"]) for row in stand.rows] == [(43, 3), (46, 6), (49, 9)]
    assert stand.syncs == [43, 46, 49]


def test_the_same_weights_are_evaluated_once(stand: Stand) -> None:
    for _ in range(2):
        stand.evaluate(Cursor(1, 3, 11))
    assert len(stand.rows) == len(stand.syncs) == 1


@pytest.mark.parametrize("lives", [[0], [7], [0, 3], [8, 8]])
def test_engines_that_fail_are_restarted_until_every_problem_is_answered(stand: Stand, lives: list[int]) -> None:
    stand.engine.lives = list(lives)
    stand.evaluate(Cursor(1, 3, 11))
    assert len(stand.syncs) == 1 + len(lives)
    assert stand.failures == len(lives)
    (row,) = stand.rows
    assert row["accuracy/two"] == 1.0
    assert stand.engines.leader
    assert stand.engines.leader.failures_in_a_row == 0


def test_an_engine_that_keeps_failing_ends_the_run(stand: Stand) -> None:
    stand.engine.lives = [7] * MOST_FAILURES
    with pytest.raises(EngineFailure, match="it died"):
        stand.evaluate(Cursor(1, 3, 11))
    assert stand.rows == []


def test_a_request_to_stop_is_answered_with_the_state_saved_and_nothing_logged(stand: Stand) -> None:
    asked = stand.engine.asked

    def ask() -> None:
        stand.run.stop.asked = len(asked) >= 3

    stand.engine.answering = ask
    with pytest.raises(AllStopped) as stopped:
        stand.evaluate(Cursor(1, 3, 11))
    assert stand.rows == []
    assert len(asked) == 4
    assert stopped.value.cursor == Cursor(1, 3, 11)


def test_a_request_that_comes_with_the_last_answer_loses_no_evaluation(stand: Stand) -> None:
    asked = stand.engine.asked

    def ask() -> None:
        stand.run.stop.asked = len(asked) == sum(SETS.values()) - 1

    stand.engine.answering = ask
    stand.evaluate(Cursor(1, 3, 11))
    assert len(stand.rows) == 1
    assert stand.saver.cursors == []


def test_shares_are_those_of_the_responses(stand: Stand) -> None:
    stand.evaluate(Cursor(1, 3, 11))
    (row,) = stand.rows
    assert [row[f"passed/{name}"] for name in SETS] == [1.0, 0.0, 0.0]
    assert [row[f"unparsed/{name}"] for name in SETS] == [0.0, 0.0, 0.0]


def test_one_response_of_the_same_problems_is_kept_at_every_evaluation(stand: Stand) -> None:
    for cursor in (Cursor(0, 0, 0), Cursor(1, 3, 11)):
        stand.evaluate(cursor)
    first, later = (read_examples(stand.run.directory.samples(update)) for update in (0, 11))
    assert [one.problem for one in first] == [one.problem for one in later]
    assert [one.set for one in first] == [name for name, size in SETS.items() for _ in range(min(SHOWN, size))]
    for one in first:
        answer = "2" if one.set == "two" else "4"
        assert (one.text, one.extracted, one.gold, one.reward) == (answer, answer, "2", float(one.set == "two"))
        assert one.truncated == (one.set == "four")
