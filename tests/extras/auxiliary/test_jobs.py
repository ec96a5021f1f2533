"""A judge with a scripted chat model: its scores in their places, what cannot be read, and what is asked again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.data.tokenizer import CHAT_ML, build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.auxiliary import phase
from mugrpo_megatron.extras.auxiliary.checks import check_auxiliaries
from mugrpo_megatron.extras.auxiliary.jobs import TOO_LONG, parse_score
from mugrpo_megatron.phases.batches import neutral_where_missing
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.load import validate
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.samples import Prompt
from tests.extras.auxiliary.parsing import score
from tests.extras.auxiliary.stand import (
    COUNT,
    LEARNER,
    PROMPTS,
    RESPONSES,
    UPDATES,
    Answers,
    sealed_stage,
    stage_updates,
    stand,
)
from tests.tiny import save_model

TOKENIZER = build_arithmetic_tokenizer(CHAT_ML)
QUESTION = "Rate {{ response }}against {{ gold }}.\n"


class Scripted(Answers):
    """Scores response n of group g with g + n / 10, and has no opinion of every fifth group's second response."""

    def text_of(self, prompt: Prompt) -> np.ndarray:
        question = TOKENIZER.decode(prompt.ids)
        assert question.startswith("<|im_start|>user\nRate response ")
        assert question.endswith("<|im_start|>assistant\n")
        number, group = (int(word.rstrip(":")) for word in question.split()[3:6:2])
        silent = group % 5 == 0 and number == 1
        answer = "I cannot say" if silent else f"It is fine. score {group + number / 10}"
        return np.array(TOKENIZER.encode(answer), dtype=np.int32)


ANSWERS = Scripted
"""Of the fixture `answers`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("judge"))
    TOKENIZER.save_pretrained(directory)
    return directory


def judged(tmp_path: Path, model: Path, question: str = QUESTION, **judge: Any) -> Recipe:
    (tmp_path / "question.j2").write_text(question, encoding="utf-8")
    function = {
        "function": "judge",
        "model": "wise",
        "prompt": tmp_path / "question.j2",
        "parse": "tests.extras.auxiliary.parsing:score",
        "max_tokens": 40,
        "weight": 2.0,
        **judge,
    }
    return Recipe.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "model": {"path": model},
            "data": {"max_prompt_tokens": 32},
            "rollout": {"prompts_per_update": PROMPTS, "responses_per_prompt": RESPONSES, "max_response_tokens": 32},
            "reward": {"functions": {"math": {"function": "math"}, "quality": function}},
            "auxiliary": {"wise": {"model": model}},
        }
    )


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Any:
    return stand(judged(tmp_path, model), tmp_path / "run")


def test_scores_are_in_their_places_with_what_was_asked_and_answered(run: Any, answers: Answers) -> None:
    store = sealed_stage(run.directory)
    phase.score_stage(run, LEARNER, store, Cursor())
    assert len(answers.prompts) == COUNT
    updates = stage_updates(run, store)
    silent = 0
    for age in range(UPDATES):
        rows = updates.columns.scores["quality"].read_table(age).to_pylist()
        plain = store.read_update(age)
        for place, (sample, before, row) in enumerate(zip(updates.samples(age), plain, rows, strict=True)):
            number = place % RESPONSES
            if before.group % 5 == 0 and number == 1:
                silent += 1
                assert (row["score"], row["why"], row["answer"]) == (None, "no score in the answer", "I cannot say")
                assert "quality" not in sample.components
                expected = before.group + (0.0 + 0.2 + 0.3) / 3  # of the other three
            else:
                expected = before.group + number / 10
                assert row["score"] == sample.components["quality"] == pytest.approx(expected)
                assert row["answer"] == f"It is fine. score {expected}"
            assert row["prompt"].startswith(f"<|im_start|>user\nRate response {number} of {before.group}: é\n")
            assert sample.reward == pytest.approx(before.reward + 2.0 * expected)
    ((_, facts),) = run.rows
    assert facts["unparsed/quality"] == silent == 2
    assert facts["reward/quality"] == pytest.approx((sum(range(10)) * 4 + 10 * 0.6 - 5 - 2 * 0.1) / 38)


def test_updates_of_informative_groups_count_the_judge(tmp_path: Path, model: Path, answers: Answers) -> None:
    """No group's rewards are equal once its responses are scored differently."""
    recipe = judged(tmp_path, model)
    objective = recipe.objective.model_copy(update={"zero_variance": "leave_out"})
    run = stand(recipe.model_copy(update={"objective": objective}), tmp_path / "run")
    store = sealed_stage(run.directory)
    phase.score_stage(run, LEARNER, store, Cursor())
    updates = stage_updates(run, store)
    problems = [sample.problem for age in range(UPDATES) for sample in updates.samples(age)][::RESPONSES]
    assert problems == [f"tiny:{group}" for group in range(UPDATES * PROMPTS)]


def test_a_question_that_is_too_long_is_counted_and_not_asked(tmp_path: Path, model: Path, answers: Answers) -> None:
    question = "{% if '1 of 3' in response %}{{ 'x' * 5000 }}{% else %}" + QUESTION.strip() + "{% endif %}"
    run = stand(judged(tmp_path, model, question), tmp_path / "run")
    store = sealed_stage(run.directory)
    phase.score_stage(run, LEARNER, store, Cursor())
    assert len(answers.prompts) == COUNT - 1
    rows = stage_updates(run, store).columns.scores["quality"].read_table(1).to_pylist()
    assert [row["why"] for row in rows].count(TOO_LONG) == 1
    assert run.rows[0][1]["unparsed/quality"] == 3


def test_what_cannot_be_read_has_no_score() -> None:
    assert parse_score(score, "score 7.5") == (7.5, "")
    assert parse_score(score, "none") == (None, "no score in the answer")
    assert parse_score(score, "score nan") == (None, "the score is nan")
    assert parse_score(score, "score 1.2.3")[1].startswith("ValueError: could not convert string to float")
    assert parse_score(lambda answer: [], "")[0] is None


def test_a_missing_score_is_its_groups_mean() -> None:
    scores = np.array([1.0, np.nan, 3.0, np.nan, np.nan, 5.0])
    groups = np.array([7, 7, 7, 2, 2, 9])
    np.testing.assert_array_equal(neutral_where_missing(scores, groups), [1, 2, 3, 0, 0, 5])


def test_a_question_that_cannot_be_rendered_names_its_problem(tmp_path: Path, model: Path, answers: Answers) -> None:
    with pytest.raises(UserError, match=r"quality\.prompt = .*: not a Jinja template"):
        check_auxiliaries(judged(tmp_path, model, "{{ response"), print)
    run = stand(judged(tmp_path, model, "{{ answer }}"), tmp_path / "run")
    with pytest.raises(UserError, match=r"quality\.prompt = .*: fails on tiny:0 \(UndefinedError: 'answer'"):
        phase.score_stage(run, LEARNER, sealed_stage(run.directory), Cursor())


@pytest.mark.parametrize(
    ("functions", "match"),
    [
        ({"a": {"function": "judge"}}, "a judge needs model"),
        ({"a": {"function": "math", "prompt": "p.j2"}}, 'prompt goes with function = "judge"'),
        ({"a": {"function": "judge", "model": "m", "prompt": "p", "parse": "x"}}, "parse: name your own function"),
        (
            {"a": {"function": "judge", "model": "m", "prompt": "p", "parse": "x:y", "sources": ["s"]}},
            "a judge scores every response",
        ),
        ({"a": {"function": "judge", "model": "m", "prompt": "p", "parse": "x:y"}}, "evaluations need a function"),
        (
            {"b": {"function": "math"}, "a": {"function": "judge", "model": "m", "prompt": "p", "parse": "x:y"}},
            "there is no such auxiliary model",
        ),
    ],
)
def test_judges_that_are_not_whole(functions: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        validate({"reward": {"functions": functions}}, "recipe")
