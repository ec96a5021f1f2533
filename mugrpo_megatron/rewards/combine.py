"""Combines the scores of several reward functions into one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mugrpo_megatron.rewards.items import Verdict
from mugrpo_megatron.rewards.scores import Pending, Score


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
        well_formed=next((one.well_formed for one in verdicts.values() if one.well_formed is not None), None),
        components=components,
    )


def _alone(name: str, one: Verdict, weight: float) -> Score:
    """The score where one function speaks; a stage has up to millions of these."""
    reward = 0.0 if one.reward is None else weight * one.reward
    components = {} if one.reward is None else {name: one.reward}
    if one.parts:
        components |= {f"{name}.{part}": value for part, value in one.parts.items()}
    return Score(reward, one.extracted, one.why, one.seconds, one.well_formed, components)


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
        wanted = self.names[place]
        if len(wanted) == 1:
            self.pending.put(place, combined({name: verdict}, self.weights))
            return
        with self._lock:
            found = self._found.setdefault(place, {})
            found[name] = verdict
            if len(found) < len(wanted):
                return
            del self._found[place]
        self.pending.put(place, combined({one: found[one] for one in wanted}, self.weights))

    def fail(self, error: Exception) -> None:
        """Called when the missing verdicts will never come."""
        self.pending.fail(error)
