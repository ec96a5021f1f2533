"""The verifier: scores responses in order, with one or several reward functions in worker processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from mugrpo_megatron.recipe.scoring import OVERLONG, RewardSection
from mugrpo_megatron.rewards.dispatch import Dispatcher
from mugrpo_megatron.rewards.items import ChatOrText, Pending, Row, Score, ScoringInput, Verdict


def combined(verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> Score:
    """The score of one response: the sum of weight x reward over the functions that apply, 0 when none does.

    It is `missing` when no function applies, or when one failed whose weight is not 0: an evaluation then counts 0, and
    training leaves the response out of its group.

    Components are the unweighted rewards under the functions' names, and other numbers of a function as `name.part`.
    The extracted answer is the first that a function found.
    """
    if len(verdicts) == 1:  # a faster way for the common case, since a stage may have millions of responses
        ((name, verdict),) = verdicts.items()
        reward = 0.0 if verdict.reward is None else weights[name] * verdict.reward
        missing = verdict.reward is None or (verdict.failed and weights[name] != 0)
        failed = (name,) * verdict.failed
        return Score(
            reward, verdict.extracted, verdict.why, verdict.seconds, _components(name, verdict), missing, failed
        )
    components: dict[str, float] = {}
    missing = all(verdict.reward is None for verdict in verdicts.values())
    for name, verdict in verdicts.items():
        components |= _components(name, verdict)
    return Score(
        reward=sum((weights[name] * v.reward for name, v in verdicts.items() if v.reward is not None), 0.0),
        extracted=next((verdict.extracted for verdict in verdicts.values() if verdict.extracted), ""),
        why="; ".join(f"{name}: {verdict.why}" for name, verdict in verdicts.items()),
        seconds=sum(verdict.seconds for verdict in verdicts.values()),
        components=components,
        missing=missing or any(verdict.failed and weights[name] != 0 for name, verdict in verdicts.items()),
        failed=tuple(name for name, verdict in verdicts.items() if verdict.failed),
    )


def _components(name: str, verdict: Verdict) -> dict[str, float]:
    components = {} if verdict.reward is None else {name: verdict.reward}
    if verdict.parts:
        components |= {f"{name}.{part}": value for part, value in verdict.parts.items()}
    return components


def with_length_penalty(score: Score, tokens: int, max_tokens: int, section: RewardSection) -> Score:
    """Subtract the overlong penalty, which is off by default. It is for training; an evaluation uses the score without
    it.

    The penalty, between 0 and 1, becomes one of the components. `tokens` is the response's length, at most
    `max_tokens`.
    """
    if not section.overlong_buffer_tokens:
        return score
    penalty = overlong(tokens, max_tokens, section.overlong_buffer_tokens)
    return replace(score, reward=score.reward - penalty, components={**score.components, OVERLONG: penalty})


def reward_before_penalty(reward: float, components: Mapping[str, float]) -> float:
    """The reward that a single function gave, without its weight and without the overlong penalty. `reward` itself if
    there is no penalty among the components, or if several functions scored the response."""
    verdicts = [value for name, value in components.items() if name != OVERLONG and "." not in name]
    return verdicts[0] if len(verdicts) == 1 and OVERLONG in components else reward


def overlong(tokens: int, max_tokens: int, buffer: int) -> float:
    """The overlong penalty: 0 up to `max_tokens - buffer` tokens, then linear up to 1 at `max_tokens`.

    Source: Yu et al. 2025 (DAPO), equation 13.
    """
    return min(1.0, max(0.0, (tokens - (max_tokens - buffer)) / buffer))


@dataclass(slots=True)
class VerdictCollector:
    """Combines the functions' verdicts on each response of a `submit` into its score. Thread-safe."""

    pending: Pending[Score]
    weights: Mapping[str, float]
    names: Sequence[Sequence[str]]
    """For each response, the functions that score it, in the recipe's order."""
    _verdicts: dict[int, dict[str, Verdict]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, name: str, index: int, verdict: Verdict) -> None:
        """Add the verdict of one function on one response. With the last verdict the response's score goes to
        `pending`."""
        names = self.names[index]
        if len(names) == 1:
            self.pending.put(index, combined({name: verdict}, self.weights))
            return
        with self._lock:
            verdicts = self._verdicts.setdefault(index, {})
            verdicts[name] = verdict
            if len(verdicts) < len(names):
                return
            del self._verdicts[index]
        self.pending.put(index, combined({name: verdicts[name] for name in names}, self.weights))


@dataclass(frozen=True, slots=True)
class _FunctionSink:
    collector: VerdictCollector
    name: str

    def put(self, index: int, verdict: Verdict) -> None:
        self.collector.put(self.name, index, verdict)

    def fail(self, error: Exception) -> None:
        self.collector.pending.fail(error)


class Verifier:
    """Scores responses; a context manager. Each reward function has its own workers, limits and count of failures.

    `submit` may be called from any thread.
    """

    def __init__(self, section: RewardSection) -> None:
        self._section = section
        self._weights = {name: function.weight for name, function in section.table.items()}
        self._dispatchers = {}
        for name, function in section.table.items():
            key = f"reward.functions.{name}" if section.functions else "reward.function"
            self._dispatchers[name] = Dispatcher(section.of_function(function, function.function), key)
        self._functions_by_source: dict[str, tuple[str, ...]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Verifier:
        """Start, and load users' functions, so that a wrong name is an error at once."""
        with ExitStack() as stack:
            for dispatcher in self._dispatchers.values():
                dispatcher.start()
                stack.callback(dispatcher.close)
            for dispatcher in self._dispatchers.values():
                dispatcher.wait_loaded()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def score(self, *arguments: Any, **known: Any) -> list[Score]:
        """Score responses and wait for all scores; returns them in order. The arguments are those of `submit`."""
        return self.submit(*arguments, **known).result()

    def submit(
        self,
        responses: Sequence[str],
        golds: Sequence[Any],
        rows: Sequence[Row] | None = None,
        prompts: Sequence[ChatOrText] | None = None,
        *,
        answers: Sequence[str] | None = None,
        sources: Sequence[str] | None = None,
        ids: Sequence[Sequence[int]] | None = None,
        openings: Sequence[str] | None = None,
    ) -> Pending[Score]:
        """Start scoring and return at once. Raises the error that has ended a function's workers, if one has, and
        UserError for a source that no function scores.

        Args:
            responses: the texts.
            golds: any JSON values.
            rows: the problems' rows in the data, for users' functions.
            prompts: texts or messages, for users' functions.
            answers: gold answers that `math` compares with; by default the golds, which are then texts.
            sources: the problems' `data_source`, which selects the functions.
            ids: the responses' token ids.
            openings: tags with which the prompts open a thought (`opening_of`); `math` and `code` put them in front of
                the responses.
        """
        count = len(responses)
        items = [
            ScoringInput(response, gold, answer, row, prompt, source, tokens, opening)
            for response, gold, answer, row, prompt, source, tokens, opening in zip(
                responses,
                golds,
                golds if answers is None else answers,
                [{}] * count if rows is None else rows,
                [""] * count if prompts is None else prompts,
                [""] * count if sources is None else sources,
                [()] * count if ids is None else ids,
                [""] * count if openings is None else openings,
                strict=True,
            )
        ]
        names = [self._functions_of(item.source) for item in items]
        pending = Pending[Score](count)
        collector = VerdictCollector(pending, self._weights, names)
        for name, dispatcher in self._dispatchers.items():
            indices = [index for index in range(count) if name in names[index]]
            dispatcher.submit(_FunctionSink(collector, name), indices, [items[index] for index in indices])
        return pending

    def _functions_of(self, source: str) -> tuple[str, ...]:
        if source not in self._functions_by_source:
            self._section.check_sources([source])
            self._functions_by_source[source] = self._section.functions_of(source)
        return self._functions_by_source[source]
