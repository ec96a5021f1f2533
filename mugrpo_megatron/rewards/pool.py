"""The verifier: scores responses with one reward function or several in worker processes, in order."""

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

    The components are the unweighted rewards by the functions' names, and `name.part` for what else one returned. The
    first answer that a function found is the one that is shown.
    """
    if len(verdicts) == 1:
        ((name, one),) = verdicts.items()
        return _alone(name, one, weights[name])
    applying = {name: one.reward for name, one in verdicts.items() if one.reward is not None}
    components: dict[str, float] = {}
    for name, one in verdicts.items():
        if one.reward is not None:
            components[name] = one.reward
        components |= {f"{name}.{part}": value for part, value in one.parts.items()}
    return Score(
        reward=sum((weights[name] * reward for name, reward in applying.items()), 0.0),
        extracted=next((one.extracted for one in verdicts.values() if one.extracted), ""),
        why="; ".join(f"{name}: {one.why}" for name, one in verdicts.items()),
        seconds=sum(one.seconds for one in verdicts.values()),
        components=components,
    )


def _alone(name: str, one: Verdict, weight: float) -> Score:
    """The score where one function speaks; a stage has up to millions of these."""
    reward = 0.0 if one.reward is None else weight * one.reward
    components = {} if one.reward is None else {name: one.reward}
    if one.parts:
        components |= {f"{name}.{part}": value for part, value in one.parts.items()}
    return Score(reward, one.extracted, one.why, one.seconds, components)


def with_length_penalty(score: Score, tokens: int, max_tokens: int, section: RewardSection) -> Score:
    """The score that training uses: less an overlong penalty, off by default. Reported accuracy uses the verdict alone.

    The penalty is one of the components, between 0 and 1. `tokens`: of the response, of at most `max_tokens`.
    """
    if not section.overlong_buffer_tokens:
        return score
    penalty = overlong(tokens, max_tokens, section.overlong_buffer_tokens)
    return replace(score, reward=score.reward - penalty, components={**score.components, OVERLONG: penalty})


def reward_before_penalty(reward: float, components: Mapping[str, float]) -> float:
    """The verdict in a shaped reward: what the reward function gave, where the penalty was taken from a single one."""
    verdicts = [value for name, value in components.items() if name != OVERLONG and "." not in name]
    return verdicts[0] if len(verdicts) == 1 and OVERLONG in components else reward


def overlong(tokens: int, max_tokens: int, buffer: int) -> float:
    """0 up to `max_tokens - buffer`, then linear up to 1 at `max_tokens` (Yu et al. 2025, DAPO, equation 13)."""
    return min(1.0, max(0.0, (tokens - (max_tokens - buffer)) / buffer))


@dataclass(slots=True)
class Collector:
    """Hands the score of each response of a submission to `pending` when its last verdict is in; any thread may."""

    pending: Pending
    weights: Mapping[str, float]
    names: Sequence[Sequence[str]]
    """The functions that each response is given to, in the recipe's order."""
    _found: dict[int, dict[str, Verdict]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, name: str, place: int, verdict: Verdict) -> None:
        """Called once for each function of each response."""
        names = self.names[place]
        if len(names) == 1:
            self.pending.put(place, combined({name: verdict}, self.weights))
            return
        with self._lock:
            verdicts = self._found.setdefault(place, {})
            verdicts[name] = verdict
            if len(verdicts) < len(names):
                return
            del self._found[place]
        self.pending.put(place, combined({one: verdicts[one] for one in names}, self.weights))

    def fail(self, error: Exception) -> None:
        """Called when the missing verdicts will never come."""
        self.pending.fail(error)


class Verifier:
    """Scores responses; a context manager. Every function has workers, limits and a count of failures of its own.

    `submit` may be called from any thread.
    """

    def __init__(self, section: RewardSection) -> None:
        self._section = section
        self._weights = {name: one.weight for name, one in section.table.items()}
        self._dispatchers = {}
        for name, one in section.table.items():
            own = {
                "function": one.function,
                "functions": {},
                "timeout_s": one.timeout_s or section.timeout_s,
                "worker_memory_mb": one.worker_memory_mb or section.worker_memory_mb,
            }
            key = f"reward.functions.{name}" if section.functions else "reward.function"
            self._dispatchers[name] = Dispatcher(section.model_copy(update=own), key)
        self._chosen: dict[str, tuple[str, ...]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Verifier:
        """Start; the users' functions are loaded at once, so that a wrong name is found at the start."""
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

    def score(
        self,
        responses: Sequence[str],
        golds: Sequence[Any],
        rows: Sequence[Row] | None = None,
        prompts: Sequence[ChatOrText] | None = None,
        **known: Any,
    ) -> list[Score]:
        """Scores of `responses` against `golds`, in order; blocks until all are done. Takes what `submit` takes."""
        return self.submit(responses, golds, rows, prompts, **known).result()

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
    ) -> Pending:
        """Start scoring and return at once; raises what ended a function's workers, when they have ended.

        Args:
            responses: the texts.
            golds: as the data has them, any JSON value.
            rows: the rows of the data that the problems are from, for the users' functions, as the next are.
            prompts: what the model was asked.
            answers: what `math` compares with; by default the golds, which are then texts.
            sources: the problems' `data_source`, by which the functions are chosen.
            ids: the responses' token ids.
        """
        count = len(responses)
        items = [
            ScoringInput(response, gold, answer, row, prompt, source, tokens)
            for response, gold, answer, row, prompt, source, tokens in zip(
                responses,
                golds,
                golds if answers is None else answers,
                [{}] * count if rows is None else rows,
                [""] * count if prompts is None else prompts,
                [""] * count if sources is None else sources,
                [()] * count if ids is None else ids,
                strict=True,
            )
        ]
        names = [self._functions_of(item.source) for item in items]
        pending = Pending(count)
        collector = Collector(pending, self._weights, names)
        for name, dispatcher in self._dispatchers.items():
            places = [place for place in range(count) if name in names[place]]
            dispatcher.submit(_Part(collector, name), places, [items[place] for place in places])
        return pending

    def _functions_of(self, source: str) -> tuple[str, ...]:
        if source not in self._chosen:
            self._section.check_sources([source])
            self._chosen[source] = self._section.functions_of(source)
        return self._chosen[source]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one function says of a submission."""

    collector: Collector
    name: str

    def put(self, place: int, verdict: Verdict) -> None:
        self.collector.put(self.name, place, verdict)

    def fail(self, error: Exception) -> None:
        self.collector.fail(error)
