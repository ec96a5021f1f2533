"""From sampled responses to scored groups: the verifier scores while the engine continues sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.rewards.items import Asked
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.rewards.scores import Pending, Score
from mugrpo_megatron.samples import Problem, Prompt, Response

Group = tuple[Prompt, list[Response]]
"""The responses to one prompt, as `Engine.generate` yields them."""


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


class Scorer:
    """A queue of groups whose scores are pending, first in, first out."""

    def __init__(self, verifier: Verifier, tokenizer: PreTrainedTokenizerBase) -> None:
        self._verifier, self._tokenizer = verifier, tokenizer
        self._waiting: deque[tuple[Prompt, list[Response], list[str], Pending]] = deque()

    def during(self, groups: Iterable[Group]) -> Iterator[ScoredGroup]:
        """Submit each group as it is sampled, and yield those whose scores are there; waits for no score."""
        for prompt, responses in groups:
            ids = [response.ids.tolist() for response in responses]
            texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
            pending = self._submit(prompt.problem, texts, ids)
            self._waiting.append((prompt, responses, texts, pending))
            while self._waiting and self._waiting[0][-1].done():
                yield self._next()

    def _submit(self, problem: Problem, texts: list[str], ids: list[list[int]]) -> Pending:
        n = len(texts)
        return self._verifier.submit(
            texts,
            [problem.gold] * n,
            [problem.row] * n,
            [asked_of(problem)] * n,
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
        return ScoredGroup(prompt, responses, texts, pending.result())


def asked_of(problem: Problem) -> Asked:
    """What the model was asked: the messages where the problem is a chat, else the question."""
    return [{"role": role, "content": text} for role, text in problem.messages] or problem.question


def scored(
    groups: Iterable[Group],
    verifier: Verifier,
    tokenizer: PreTrainedTokenizerBase,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[ScoredGroup]:
    """Every group with its scores, in the order of `groups`; once `stopping()`, only those whose scores are there."""
    scorer = Scorer(verifier, tokenizer)
    yield from scorer.during(groups)
    yield from scorer.rest(stopping)
