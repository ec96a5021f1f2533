"""From responses to scored groups, with a verifier whose scores come on demand, and the figures of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from mugrpo_megatron.data.prompts import fitting_prompts_by_set
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.engine.wire import SampledGroup
from mugrpo_megatron.errors import EngineFailure, UserError
from mugrpo_megatron.evaluation.scoring import ProblemResult, Scorer, measure_of, problem_result, summarize
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.items import Pending, Score
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.samples import Episode, Problem, Prompt, Response

TOKENIZER = build_arithmetic_tokenizer()


class Slow:
    """A verifier that scores a submission when a test calls `finish`; the score is the length of the text."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Pending[Score], list[str], list[str]]] = []
        self.arguments: list[tuple[object, ...]] = []

    def submit(self, responses: Sequence[str], golds: Sequence[str], *about: object, **known: object) -> Pending[Score]:
        pending = Pending[Score](len(responses))
        self.arguments.append((*about, known))
        self.submitted.append((pending, list(responses), list(golds)))
        return pending

    def finish(self, place: int) -> None:
        pending, responses, _ = self.submitted[place]
        for i, response in enumerate(responses):
            pending.put(i, Score(float(len(response)), response, "", 0.0))


@pytest.fixture
def verifier() -> Slow:
    return Slow()


@pytest.fixture
def scorer(verifier: Slow) -> Scorer:
    return Scorer(cast(Verifier, verifier), TOKENIZER)


def group(index: int, *texts: str) -> SampledGroup:
    problem = Problem(f"p{index}", "?", f"gold {index}")
    ids = [np.array([*TOKENIZER.encode(text), TOKENIZER.eos_token_id], dtype=np.int32) for text in texts]
    responses = [Response(row, np.zeros(len(row), dtype=np.float32), "stop", 0) for row in ids]
    return SampledGroup(Prompt(index, problem, [1]), responses)


def test_groups_are_yielded_as_their_scores_come_and_in_the_order_of_sampling(verifier: Slow, scorer: Scorer) -> None:
    sampling: list[int] = []

    def groups() -> Iterator[SampledGroup]:
        for index in range(4):
            sampling.append(index)
            yield group(index, "12", "3")
            if index == 1:
                verifier.finish(1)  # out of order
            if index == 2:
                verifier.finish(0)

    during = scorer.during(groups())
    assert [(next(during).prompt.index, len(sampling)), (next(during).prompt.index, len(sampling))] == [(0, 4), (1, 4)]
    assert list(during) == [], "it waits for no score"
    verifier.finish(2)
    verifier.finish(3)
    assert [group.prompt.index for group in scorer.rest()] == [2, 3]
    assert list(scorer.rest()) == []


def test_a_group_carries_its_texts_its_scores_and_its_tokens(verifier: Slow, scorer: Scorer) -> None:
    assert list(scorer.during([group(5, "123", "4")])) == []
    ((_, texts, golds),) = verifier.submitted
    assert (texts, golds) == (["123", "4"], ["gold 5"] * 2)
    verifier.finish(0)
    (scored,) = scorer.rest()
    assert (scored.prompt.index, scored.texts) == (5, ["123", "4"])
    assert [score.reward for score in scored.scores] == [3.0, 1.0]
    assert scored.tokens == 3 + 1 + 2
    assert [len(response.ids) for response in scored.responses] == [4, 2]


def test_what_ends_the_source_ends_the_pipeline_and_keeps_what_was_submitted(verifier: Slow, scorer: Scorer) -> None:
    def dies() -> Iterator[SampledGroup]:
        yield group(0, "1")
        raise EngineFailure("it died")

    with pytest.raises(EngineFailure, match="it died"):
        list(scorer.during(dies()))
    verifier.finish(0)
    assert [group.prompt.index for group in scorer.rest()] == [0]


def test_a_reward_function_can_see_the_row_the_chat_and_the_tokens(verifier: Slow, scorer: Scorer) -> None:
    row = {"problem": "1+1?", "tests": [1, {"a": None}]}
    chat = ({"role": "system", "content": "Be terse."}, {"role": "user", "content": "1+1?"})
    problem = Problem("p", "1+1?", "2", "sums", chat, ["two", 2], "hard_sums", row)
    prompt, responses = group(0, "12", "3")
    bare = SampledGroup(Prompt(1, Problem("q", "2+2?", "4", "sums"), [1]), responses)
    assert list(scorer.during([SampledGroup(replace(prompt, problem=problem), responses), bare])) == []
    assert [golds for _, _, golds in verifier.submitted] == [[["two", 2]] * 2, ["4"] * 2]
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "1+1?"}]
    ids = [response.ids.tolist() for response in responses]
    assert verifier.arguments == [
        (
            [row] * 2,
            [messages] * 2,
            {"answers": ["2"] * 2, "sources": ["hard_sums"] * 2, "ids": ids, "openings": [""] * 2},
        ),
        ([{}] * 2, ["2+2?"] * 2, {"answers": ["4"] * 2, "sources": ["sums"] * 2, "ids": ids, "openings": [""] * 2}),
    ]


def test_of_an_episode_the_last_turn_is_scored_and_nothing_of_one_that_has_its_score(
    verifier: Slow, scorer: Scorer
) -> None:
    prompt, responses = group(0, "ask? 7 seven", "own", "broken")
    none = np.array([], dtype=np.int32)
    mask = np.array([True] * 4 + [False] * 3 + [True] * 6)
    sampled = [np.ones(len(response.ids), dtype=bool) for response in responses]
    outcomes = [
        Episode(none, mask, parts={"turns": 2.0}),
        Episode(none, sampled[1], 0.5, "own"),
        Episode(none, sampled[2], None, "broken", failed=True),
    ]
    episodes = [replace(response, episode=outcome) for response, outcome in zip(responses, outcomes, strict=True)]
    assert not list(scorer.during([SampledGroup(prompt, episodes)]))
    [(_, texts, golds)] = verifier.submitted
    assert (texts, golds) == (["seven"], ["gold 0"])
    verifier.finish(0)
    [scored] = scorer.rest()
    assert scored.texts == ["ask? 7 seven", "own", "broken"]
    assert [(score.reward, score.why) for score in scored.scores] == [(5.0, ""), (0.5, "own"), (0.0, "broken")]
    assert scored.scores[0].components == {"episode.turns": 2.0}


def test_a_group_of_episodes_that_all_have_their_scores_needs_no_verifier(verifier: Slow, scorer: Scorer) -> None:
    prompt, responses = group(0, "a", "b")
    none = np.array([], dtype=np.int32)
    episodes = [
        replace(response, episode=Episode(none, np.ones(len(response.ids), dtype=bool), float(index)))
        for index, response in enumerate(responses)
    ]
    [scored] = scorer.during([SampledGroup(prompt, episodes)])
    assert [score.reward for score in scored.scores] == [0.0, 1.0]
    assert [texts for _, texts, _ in verifier.submitted] == [[]]


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
    fits = fitting_prompts_by_set(PROBLEMS, TOKENIZER, "plain", 10)
    prompts = [Prompt(index, *pair) for index, pair in enumerate(zip(fits.problems, fits.prompts, strict=True))]
    with Verifier(RewardSection()) as verifier:
        groups = Scorer(verifier, TOKENIZER).scored(backwards(prompts, 3))
        found = {group.prompt.problem.id: problem_result(group) for group in groups}
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
        fitting_prompts_by_set([*PROBLEMS, Problem("long:1", "1" * 50, "1", "long")], TOKENIZER, "plain", 10)


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


def test_the_verifier_learns_whether_the_prompt_opens_a_thought(verifier: Slow, scorer: Scorer) -> None:
    opened = group(0, "12", "3")
    ids = TOKENIZER.encode("1+2=<thinking>\n", add_special_tokens=False)
    list(scorer.during([opened._replace(prompt=replace(opened.prompt, ids=ids)), group(1, "4")]))
    known = [arguments[-1] for arguments in verifier.arguments]
    assert [arguments["openings"] for arguments in known if isinstance(arguments, dict)] == [["<thinking>"] * 2, [""]]
