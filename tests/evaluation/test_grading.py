from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.engine.wire import SampledGroup
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.evaluation.scoring import ProblemResult, measure_of, problem_result, prompts_of, scored, summarize
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.samples import Problem, Prompt, Response

TOKENIZER = build_arithmetic_tokenizer()
PROBLEMS = [Problem(f"sums:{n}", f"{n}+1=", str(n + 1), "sums") for n in range(6)]


def response(text: str, finish_reason: str = "stop") -> Response:
    ids = np.array([*TOKENIZER.encode(text), *[TOKENIZER.eos_token_id] * (finish_reason == "stop")], dtype=np.int32)
    return Response(ids, np.zeros(len(ids), dtype=np.float32), finish_reason, 0)


def backwards(prompts: list[Prompt], n: int) -> Iterator[SampledGroup]:
    """An engine that finishes last what came first: sample j is right for problems above j, cut for problem 5."""
    for prompt in reversed(prompts):
        right = int(prompt.problem.answer)
        reason = "length" if right == 6 else "stop"
        yield SampledGroup(prompt, [response(str(right if right > j + 1 else -1), reason) for j in range(n)])


def test_every_problem_is_graded_once_with_its_own_answers() -> None:
    prompts = prompts_of(PROBLEMS, TOKENIZER, "plain", 10)
    with Verifier(RewardSection()) as verifier:
        found = {g.prompt.problem.id: problem_result(g) for g in scored(backwards(prompts, 3), verifier, TOKENIZER)}
    assert sorted(found) == [p.id for p in PROBLEMS]
    assert [sum(found[p.id].rewards) for p in PROBLEMS] == [0, 1, 2, 3, 3, 3]
    assert found["sums:2"].texts == ["3", "3", "-1"] == found["sums:2"].answers
    assert found["sums:2"].tokens == [2, 2, 3]
    assert [found[p.id].truncated for p in PROBLEMS] == [0, 0, 0, 0, 0, 3]
    summary = summarize("sums", list(found.values()), "accuracy")
    assert summary.mean.value == pytest.approx((0 + 1 + 2 + 3 + 3 + 3) / 18)
    assert summary.passes[1] == summary.mean
    assert summary.passes[2].value == pytest.approx((0 + 2 / 3 + 1 + 1 + 1 + 1) / 6)
    assert summary.majority.value == pytest.approx((0 + 0 + 1 + 1 + 1 + 1) / 6)
    assert (summary.problems, summary.samples, summary.truncated) == (6, 3, 3)


def test_prompts_of_a_set_of_which_none_fits_are_the_users_mistake() -> None:
    with pytest.raises(UserError, match="all 1 prompts of long are longer"):
        prompts_of([*PROBLEMS, Problem("long:1", "1" * 50, "1", "long")], TOKENIZER, "plain", 10)


def graded(place: int, rewards: list[float]) -> ProblemResult:
    k = len(rewards)
    return ProblemResult(PROBLEMS[place], rewards, ["a", "a", *"bcdefg"][:k], [""] * k, [1] * k, 0, [""] * k)


def test_rewards_of_a_users_function_have_their_mean_unclipped() -> None:
    """It may give half a point, or three, or take some away; a sample passes where it has a whole one."""
    summary = summarize("partial", [graded(0, [0.5, 0.5, 3.0, -2.0]), graded(1, [1.5, 0.5, -0.5, 0.5])], "reward")
    assert summary.mean.value == pytest.approx(0.5)
    assert summary.passes[4].value == 1.0
    assert summary.passes[1].value == pytest.approx(0.25)
    assert summary.majority.value == pytest.approx((0.5 + 1.0) / 2)
    assert summary.mean.low <= summary.mean.value <= summary.mean.high


def test_without_extracted_answers_there_is_no_majority() -> None:
    """A user's function need not report what it read; one answer in the set is enough to vote."""
    silent = [replace(graded(place, [float(place)]), answers=[""]) for place in range(3)]
    assert summarize("silent", silent, "reward").majority is None
    found = summarize("told", [graded(place, [float(place)]) for place in range(3)], "reward")
    assert found.majority == found.mean
    assert summarize("one", [*silent[:2], graded(2, [2.0])], "reward").majority is not None


def test_the_reward_function_decides_what_the_figures_are_called() -> None:
    assert measure_of(RewardSection(overlong_buffer_tokens=8)) == "accuracy"
    assert measure_of(RewardSection(function="tests.rewards.functions:parity")) == "reward"
