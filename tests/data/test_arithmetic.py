from __future__ import annotations

from collections import Counter
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.data.arithmetic import TASKS, demonstration, problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.rewards.math.extract import answer_of
from mugrpo_megatron.samples import Problem

CHAINS = ("chain", "chain_validation")


@given(st.integers(0, 2**31), st.integers(0, 2**31), st.sampled_from(sorted(TASKS)))
@settings(max_examples=20)
def test_no_training_question_is_ever_held_out(train_seed: int, eval_seed: int, task: str) -> None:
    train = {sorted_operands(p.question) for p in problems(train_seed, "train", 300, task)}
    held_out = {sorted_operands(p.question) for p in problems(eval_seed, "eval", 300, task)}
    assert len(train | held_out) > len(train)
    assert not train & held_out


def sorted_operands(question: str) -> tuple[str, ...]:
    """Two sums of the same terms are the same problem to a model."""
    operator = next(sign for sign in "+-*," if sign in question)
    return operator, *sorted(question.removeprefix("gcd(").rstrip(")=").split(operator))


@pytest.mark.parametrize("task", sorted(TASKS))
def test_answers_are_right_and_seeds_repeat(task: str) -> None:
    made = problems(3, "train", 500, task)
    assert [p.answer for p in made] == [str(eval(p.question.rstrip("="), {"gcd": gcd})) for p in made]
    assert len({p.id for p in made}) == 500
    assert made == problems(3, "train", 500, task) != problems(4, "train", 500, task)
    assert made[:100] == problems(3, "train", 100, task)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_held_out_questions_are_distinct(task: str) -> None:
    assert len({p.question for p in problems(3, "eval", 500, task)}) == 500


def test_a_long_training_set_keeps_the_mix() -> None:
    products = sum("*" in p.question for p in problems(0, "train", 4000))
    assert 0.035 < products / 4000 < 0.065


@pytest.mark.parametrize("task", sorted(TASKS))
def test_a_demonstration_is_a_right_response(task: str) -> None:
    assert all(answer_of(demonstration(p)) == p.answer for p in problems(0, "eval", 200, task))


def test_training_test_and_validation_problems_of_the_chain_are_disjoint() -> None:
    train, same = ({sorted_operands(p.question) for p in problems(1, "train", 2000, task)} for task in CHAINS)
    test, validation = ({sorted_operands(p.question) for p in problems(2, "eval", 2000, task)} for task in CHAINS)
    assert not (train | same) & (test | validation)
    assert not test & validation
    assert [p.question for p in problems(0, "train", 50, "chain")] == [
        p.question for p in problems(0, "train", 50, "chain_validation")
    ]


def test_a_chain_restates_every_step() -> None:
    made = Problem("1", "37+58+91+12+40+77=", "315", "chain")
    assert demonstration(made) == r"37+58=95 95+91=186 186+12=198 198+40=238 238+77=315 \boxed{315}"
    lengths = {len(demonstration(p)) for p in problems(0, "train", 500, "chain")}
    assert min(lengths) >= 55
    assert max(lengths) <= 75


def test_a_divisor_is_found_by_subtraction() -> None:
    made = Problem("1", "gcd(156,360)=", "12", "euclid")
    steps = "360-156=204 204-156=48 156-48=108 108-48=60 60-48=12 48-12=36 36-12=24 24-12=12"
    assert demonstration(made) == rf"{steps} \boxed{{12}}"
    drawn = problems(0, "train", 500, "euclid")
    lengths = {len(demonstration(p)) for p in drawn}
    assert min(lengths) >= 60
    assert max(lengths) <= 160
    assert max(Counter(p.answer for p in drawn).values()) < 50, "no answer to guess"


def test_long_sums_have_a_heavy_tail() -> None:
    lengths = sorted(len(demonstration(p)) for p in problems(0, "train", 1000, "arithmetic_long"))
    assert lengths[-10] > 5 * lengths[500]


def test_an_unknown_task_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="arithmetic_long"):
        problems(0, "train", 1, "algebra")
