"""From sampled responses to scored groups: the verifier scores while the engine continues sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.data.prompts import TOKENIZER_TEMPLATE, Template, fitting_prompts_by_set
from mugrpo_megatron.engine.wire import SampledGroup
from mugrpo_megatron.evaluation.estimators import (
    Interval,
    Measure,
    clustered_interval,
    majority_at_k,
    mean_interval,
    pass_at_k,
)
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.items import Pending, Score, prompt_of_problem
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.samples import Problem, Prompt, Response


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The responses to one prompt, with their texts and scores in the same order."""

    prompt: Prompt
    responses: list[Response]
    texts: list[str]
    scores: list[Score]

    @property
    def tokens(self) -> int:
        """Response tokens of the group."""
        return sum(len(response.ids) for response in self.responses)


LOOK_EVERY_S = 0.2
EPISODE = "episode."
"""Begins the names of an episode's numbers among a score's components."""


class Scorer:
    """A queue of groups whose scores are pending, first in, first out."""

    def __init__(self, verifier: Verifier, tokenizer: PreTrainedTokenizerBase) -> None:
        self._verifier, self._tokenizer = verifier, tokenizer
        self._waiting: deque[tuple[Prompt, list[Response], list[str], Pending]] = deque()

    def during(self, groups: Iterable[SampledGroup]) -> Iterator[ScoredGroup]:
        """Submit each group as it is sampled, and yield those whose scores are there; waits for no score."""
        for prompt, responses in groups:
            ids = [response.ids.tolist() for response in responses]
            texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
            answers, answer_ids = self._answers(responses, texts, ids)
            pending = self._submit(prompt.problem, answers, answer_ids)
            self._waiting.append((prompt, responses, texts, pending))
            while self._waiting and self._waiting[0][-1].done():
                yield self._next()

    def _answers(
        self, responses: list[Response], texts: list[str], ids: list[list[int]]
    ) -> tuple[list[str], list[list[int]]]:
        """What the verifier reads, as text and as ids: of an episode the last turn, unless it has its score."""
        if all(response.episode is None for response in responses):
            return texts, ids
        turns = [r.ids[r.episode.last_turn :].tolist() for r in responses if r.episode and not r.episode.settled]
        if not turns:  # of no rows, `batch_decode` makes one empty text
            return [], []
        return self._tokenizer.batch_decode(turns, skip_special_tokens=True), turns

    def _submit(self, problem: Problem, texts: list[str], ids: list[list[int]]) -> Pending:
        n = len(texts)
        return self._verifier.submit(
            texts,
            [problem.gold] * n,
            [problem.row] * n,
            [prompt_of_problem(problem)] * n,
            answers=[problem.answer] * n,
            sources=[problem.data_source] * n,
            ids=ids,
        )

    def rest(self, stopping: Callable[[], bool] = lambda: False) -> Iterator[ScoredGroup]:
        """Wait for the groups that are still pending, and yield them; once `stopping()`, drop those without scores."""
        while self._waiting:
            with suppress(TimeoutError):
                self._waiting[0][-1].result(LOOK_EVERY_S)
            if stopping():
                self._waiting = deque(group for group in self._waiting if group[-1].done())
            if self._waiting and self._waiting[0][-1].done():
                yield self._next()

    def _next(self) -> ScoredGroup:
        prompt, responses, texts, pending = self._waiting.popleft()
        verdicts = iter(pending.result())
        return ScoredGroup(prompt, responses, texts, [score_of(response, verdicts) for response in responses])


def score_of(response: Response, verdicts: Iterator[Score]) -> Score:
    """The next of the verifier's verdicts, or what the episode says of itself; with the episode's numbers."""
    episode = response.episode
    if episode is None:
        return next(verdicts)
    parts = {f"{EPISODE}{name}": value for name, value in episode.parts.items()}
    if not episode.settled:
        score = next(verdicts)
        return replace(score, components={**score.components, **parts})
    if episode.reward is not None:
        parts = {"episode": episode.reward, **parts}
    return Score(episode.reward or 0.0, "", episode.why, 0.0, components=parts)


def scored(
    groups: Iterable[SampledGroup],
    verifier: Verifier,
    tokenizer: PreTrainedTokenizerBase,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[ScoredGroup]:
    """Every group with its scores, in the order of `groups`; once `stopping()`, only those whose scores are there."""
    scorer = Scorer(verifier, tokenizer)
    yield from scorer.during(groups)
    yield from scorer.rest(stopping)


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """One problem's K samples."""

    problem: Problem
    rewards: list[float]
    answers: list[str]
    """Extracted answers, empty where none was found."""
    whys: list[str]
    tokens: list[int]
    """Response tokens."""
    truncated: int
    """Responses cut at the length limit."""
    texts: list[str]


@dataclass(frozen=True, slots=True)
class Summary:
    """One data set's figures."""

    name: str
    measure: Measure
    """What `mean` and `majority` are means of."""
    problems: int
    samples: int
    """K: responses per problem."""
    mean: Interval
    """mean@K."""
    passes: dict[int, Interval]
    """pass@k for k = 1, 2, 4, ... K."""
    majority: Interval | None
    """majority@K; None where no response of the set has an extracted answer, so that there is nothing to vote for."""
    tokens: int
    truncated: int


def prompts_of(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    style: str,
    max_prompt_tokens: int,
    template: Template = TOKENIZER_TEMPLATE,
) -> list[Prompt]:
    """Problems as prompts, set by set; those that do not fit are left out."""
    fits = fitting_prompts_by_set(problems, tokenizer, style, max_prompt_tokens, template)
    pairs = zip(fits.problems, fits.prompts, strict=True)
    return [Prompt(index, problem, ids) for index, (problem, ids) in enumerate(pairs)]


def problem_result(group: ScoredGroup) -> ProblemResult:
    """A scored group as one problem's result."""
    return ProblemResult(
        problem=group.prompt.problem,
        rewards=[score.reward for score in group.scores],
        answers=[score.extracted for score in group.scores],
        whys=[score.why for score in group.scores],
        tokens=[len(response.ids) for response in group.responses],
        truncated=sum(response.finish_reason == "length" for response in group.responses),
        texts=group.texts,
    )


def measure_of(section: RewardSection) -> Measure:
    """`accuracy` where the verifier decides right or wrong, `reward` where a user's function gives any number.

    The function decides, not the rewards it returned, so a run's figures keep one name. Overlong penalties apply
    to training only.
    """
    return "accuracy" if section.is_right_or_wrong else "reward"


def mean_at_k(rewards: Sequence[Sequence[float]], measure: Measure) -> Interval:
    """mean@K of one data set, from each problem's K rewards; the interval's unit of sampling is the problem."""
    means = [sum(own) / len(own) for own in rewards]
    return clustered_interval(means, len(rewards[0])) if measure == "accuracy" else mean_interval(means)


def summarize(name: str, graded: Sequence[ProblemResult], measure: Measure) -> Summary:
    """Figures of one data set from its graded problems, each with the same number of samples.

    A response passes with a reward of 1 or more.
    """
    samples = len(graded[0].rewards)
    passes = {}
    k = 1
    while k <= samples:
        per_problem = [pass_at_k(samples, sum(reward >= 1.0 for reward in g.rewards), k) for g in graded]
        passes[k] = clustered_interval(per_problem, samples)
        k *= 2
    votes = [[majority_at_k(g.answers, g.rewards)] for g in graded]
    return Summary(
        name=name,
        measure=measure,
        problems=len(graded),
        samples=samples,
        mean=mean_at_k([g.rewards for g in graded], measure),
        passes=passes,
        majority=mean_at_k(votes, measure) if any(any(g.answers) for g in graded) else None,
        tokens=sum(sum(g.tokens) for g in graded),
        truncated=sum(g.truncated for g in graded),
    )
