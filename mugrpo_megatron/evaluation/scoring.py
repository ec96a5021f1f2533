"""Turns sampled groups into scored groups; the verifier scores while the engine goes on sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.data.tokenizer import prompt_end
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
from mugrpo_megatron.rewards.math.thoughts import opening_of
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
        return sum(len(response.ids) for response in self.responses)

    @property
    def episodes(self) -> ScoredGroup:
        """The group with one response for each episode: the first of the responses that share the episode's score.
        Responses without an episode stay."""
        rows = zip(self.responses, self.texts, self.scores, strict=True)
        scored = [row for row in rows if not (row[0].episode and row[0].episode.scored_with_previous)]
        responses, texts, scores = (list(column) for column in zip(*scored, strict=True))
        return ScoredGroup(self.prompt, responses, texts, scores)


POLL_S = 0.2
"""Seconds between two checks, while scores are awaited, whether the run was asked to stop."""
EPISODE = "episode."
"""Prefix of an episode's numbers among a score's components."""


class Scorer:
    """A first-in, first-out queue of groups whose scores are pending."""

    def __init__(self, verifier: Verifier, tokenizer: PreTrainedTokenizerBase) -> None:
        self._verifier, self._tokenizer = verifier, tokenizer
        self._pending: deque[tuple[SampledGroup, list[str], Pending[Score]]] = deque()

    def scored(
        self, groups: Iterable[SampledGroup], stopping: Callable[[], bool] = lambda: False
    ) -> Iterator[ScoredGroup]:
        """Yield the groups with their scores, in order.

        Once all are sampled and `stopping()` is true, groups whose scores are not ready are dropped.
        """
        yield from self.during(groups)
        yield from self.rest(stopping)

    def during(self, groups: Iterable[SampledGroup]) -> Iterator[ScoredGroup]:
        """Submit each group to the verifier as it is sampled, and yield the groups whose scores are ready, without
        waiting."""
        for group in groups:
            ids = [response.ids.tolist() for response in group.responses]
            texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
            scored_texts, scored_ids = self._texts_to_score(group.responses, texts, ids)
            openings = self._openings(group)
            self._pending.append((group, texts, self._submit(group.prompt.problem, scored_texts, scored_ids, openings)))
            while self._pending and self._pending[0][-1].done():
                yield self._next()

    def _texts_to_score(
        self, responses: list[Response], texts: list[str], ids: list[list[int]]
    ) -> tuple[list[str], list[list[int]]]:
        """Returns the texts and token ids that the verifier scores: whole responses, and for an episode its answer or,
        without an answer, its last turn.

        An episode that already has its score is left out.
        """
        if all(response.episode is None for response in responses):
            return texts, ids
        unsettled = [(response, response.episode) for response in responses if response.episode]
        unsettled = [(response, episode) for response, episode in unsettled if not episode.settled]
        turns = [
            response.ids[episode.last_turn :].tolist()
            if episode.answer is None
            else self._tokenizer.encode(episode.answer, add_special_tokens=False)
            for response, episode in unsettled
        ]
        if not turns:  # `batch_decode` returns one empty text for no rows
            return [], []
        decoded = self._tokenizer.batch_decode(turns, skip_special_tokens=True)
        answers = [episode.answer for _, episode in unsettled]
        return [text if answer is None else answer for text, answer in zip(decoded, answers, strict=True)], turns

    def _openings(self, group: SampledGroup) -> list[str]:
        """For each text to score, the tag (such as `<think>`) with which the tokens before it open a thought.

        "" if they open none, and for the answer that an episode's function or program gave.
        """
        if all(response.episode is None for response in group.responses):
            return [self._opening(group.prompt.ids)] * len(group.responses)
        return [
            self._opening([*response.episode.prompt_ids, *response.ids[: response.episode.last_turn]])
            if response.episode.answer is None
            else ""
            for response in group.responses
            if response.episode and not response.episode.settled
        ]

    def _opening(self, ids: Sequence[int]) -> str:
        return opening_of(prompt_end(ids, self._tokenizer))

    def _submit(self, problem: Problem, texts: list[str], ids: list[list[int]], openings: list[str]) -> Pending[Score]:
        n = len(texts)
        return self._verifier.submit(
            texts,
            [problem.gold] * n,
            [problem.row] * n,
            [prompt_of_problem(problem)] * n,
            answers=[problem.answer] * n,
            sources=[problem.data_source] * n,
            ids=ids,
            openings=openings,
        )

    def rest(self, stopping: Callable[[], bool] = lambda: False) -> Iterator[ScoredGroup]:
        """Wait for the scores of the pending groups, and yield these groups; once `stopping()` is true, drop those
        whose scores are not ready."""
        while self._pending:
            with suppress(TimeoutError):
                self._pending[0][-1].result(POLL_S)
            if stopping():
                self._pending = deque(entry for entry in self._pending if entry[-1].done())
            if self._pending and self._pending[0][-1].done():
                yield self._next()

    def _next(self) -> ScoredGroup:
        (prompt, responses), texts, pending = self._pending.popleft()
        scored, scores = iter(pending.result()), list[Score]()
        for response in responses:
            shared = response.episode is not None and response.episode.scored_with_previous
            scores.append(scores[-1] if shared else score_of(response, scored))
        return ScoredGroup(prompt, responses, texts, scores)


def score_of(response: Response, scores: Iterator[Score]) -> Score:
    """Returns a response's score: the one that its episode has already, else the verifier's next one in `scores`.

    The episode's own numbers are added to the score's components.
    """
    episode = response.episode
    if episode is None:
        return next(scores)
    components = {f"{EPISODE}{name}": value for name, value in episode.parts.items()}
    if not episode.settled:
        score = next(scores)
        return replace(score, components={**score.components, **components})
    if episode.reward is not None:
        components = {"episode": episode.reward, **components}
    return Score(episode.reward or 0.0, "", episode.why, 0.0, components=components)


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """The K responses to one problem, and their scores."""

    problem: Problem
    rewards: list[float]
    answers: list[str]
    """Extracted answers, empty where none was found."""
    whys: list[str]
    tokens: list[int]
    """Number of tokens of each response."""
    truncated: int
    """Number of responses that were cut at the length limit."""
    texts: list[str]


@dataclass(frozen=True, slots=True)
class Summary:
    name: str
    measure: Measure
    """The quantity of which `mean` and `majority` are means: accuracy or reward."""
    problems: int
    samples: int
    """K: responses per problem."""
    mean: Interval
    """mean@K."""
    passes: dict[int, Interval]
    """pass@k for k = 1, 2, 4, ... K."""
    majority: Interval | None
    """majority@K; None where no response of the set has an extracted answer."""
    tokens: int
    truncated: int


def problem_result(group: ScoredGroup) -> ProblemResult:
    """The result of one problem from its scored group."""
    group = group.episodes
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
    """The name of the mean: `accuracy` if the verifier decides right or wrong, `reward` if a user's function gives a
    number.

    The name depends on the function, not on the rewards that it returned, so a run's figures keep one name. Overlong
    penalties do not change it, since they apply to training only.
    """
    return "accuracy" if section.is_right_or_wrong else "reward"


def mean_at_k(rewards: Sequence[Sequence[float]], measure: Measure) -> Interval:
    """mean@K of one data set from the K rewards of each problem, with an interval that treats problems as the
    sample."""
    means = [sum(problem) / len(problem) for problem in rewards]
    return clustered_interval(means, len(rewards[0])) if measure == "accuracy" else mean_interval(means)


def summarize(name: str, results: Sequence[ProblemResult], measure: Measure) -> Summary:
    """Summarize the results of one data set, in which all problems have the same number of responses. For pass@k, a
    response passes with a reward of 1 or more."""
    samples = len(results[0].rewards)
    passes = {}
    k = 1
    while k <= samples:
        per_problem = [pass_at_k(samples, sum(reward >= 1.0 for reward in result.rewards), k) for result in results]
        passes[k] = clustered_interval(per_problem, samples)
        k *= 2
    votes = [[majority_at_k(result.answers, result.rewards)] for result in results]
    return Summary(
        name=name,
        measure=measure,
        problems=len(results),
        samples=samples,
        mean=mean_at_k([result.rewards for result in results], measure),
        passes=passes,
        majority=mean_at_k(votes, measure) if any(any(result.answers) for result in results) else None,
        tokens=sum(sum(result.tokens) for result in results),
        truncated=sum(result.truncated for result in results),
    )
