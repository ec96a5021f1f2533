"""Calls a user's reward function in a worker, and makes verdicts of what it returns."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mugrpo_megatron.rewards.forms import Form, arguments_of_one, arguments_of_several, form_of
from mugrpo_megatron.rewards.items import Item, Needs, Verdict

AT_ONCE = 64
"""Most responses that an `async` function of one response works on at the same time in one worker."""
SHOWN_CHARS = 80
MOST_PARTS = 16
"""Other numbers of one response that are kept; each is a metric of the run."""
PART_CHARS = 64
_SCORES = ("score", "reward")
"""Keys of a returned dictionary that hold the reward; the first that is there counts."""
_ANSWERS = ("pred", "extracted")
"""Keys that hold the answer that the function found."""


class GaveUp(Exception):
    """An `async` function took longer than a response may."""


@dataclass(slots=True)
class Caller:
    """A user's function; raises `forms.Unsupported` for one that cannot be called."""

    function: Callable[..., Any]
    name: str
    limit_s: float
    """Wall-clock seconds that an `async` function has for each response."""
    form: Form = field(init=False)
    is_async: bool = field(init=False)
    _runner: asyncio.Runner | None = None

    def __post_init__(self) -> None:
        self.form = form_of(self.function)
        self.is_async = any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))

    @property
    def needs(self) -> Needs:
        """What the function is given, and how many responses at once."""
        needs = self.form.needs
        return needs._replace(responses=AT_ONCE) if self.is_async and not self.form.several else needs

    def __call__(self, items: Sequence[Item]) -> list[Verdict | BaseException]:
        """A verdict on each item, or what the function raised for it; raises what it raised for all of them."""
        returned = self._of_several(items) if self.form.several else self._of_each(items)
        return [self._verdict(one) for one in returned]

    def _of_several(self, items: Sequence[Item]) -> list[Any]:
        metrics: dict[str, float] = {}
        returned = self.function(**arguments_of_several(self.form, items, metrics))
        if self.is_async:
            returned = self._run(self._limited(returned, self.limit_s * len(items)))
        try:
            rewards = list(returned)
        except TypeError:
            rewards = []
        if isinstance(returned, str | bytes | dict) or len(rewards) != len(items):
            raise TypeError(f"{self.name} returned {_shown(returned)} and not a list of {len(items)} rewards")
        # What TRL's functions log is of the whole call.
        return [one if one is None or not metrics else {"score": one, **metrics} for one in rewards]

    def _of_each(self, items: Sequence[Item]) -> list[Any]:
        if not self.is_async:
            return [self.function(**arguments_of_one(self.form, item)) for item in items]

        async def one(item: Item) -> Any:
            return await self._limited(self.function(**arguments_of_one(self.form, item)), self.limit_s)

        async def together() -> list[Any]:
            return await asyncio.gather(*map(one, items), return_exceptions=True)

        return list(self._run(together()))

    def _run(self, awaited: Coroutine[Any, Any, Any]) -> Any:
        """One event loop for all calls: a function may keep a session that belongs to it."""
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(awaited)

    async def _limited(self, awaited: Awaitable[Any], limit_s: float) -> Any:
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await awaited
        except TimeoutError:
            if limit.expired():
                raise GaveUp(f"gave up after {limit_s:g} s") from None
            raise

    def _verdict(self, returned: Any) -> Verdict | BaseException:
        if isinstance(returned, BaseException):
            return returned
        try:
            return verdict_of(returned, self.name, self.form.several)
        except (TypeError, ValueError) as error:
            return error


def verdict_of(returned: Any, name: str, may_skip: bool) -> Verdict:
    """The verdict in what a function returned: a number, or a dictionary with a `score` and other numbers.

    `may_skip` takes None for "does not apply". Raises TypeError or ValueError for anything but a finite number.
    """
    if returned is None and may_skip:
        return Verdict(None, "", f"{name} does not apply")
    if not isinstance(returned, dict):
        return Verdict(_number(returned, name), "", name)
    key = next((key for key in _SCORES if key in returned), None)
    if key is None:
        raise TypeError(
            f"{name} returned a dict without 'score'; it has {', '.join(map(repr, returned))[:SHOWN_CHARS]}"
        )
    parts = {
        re.sub(r"[^A-Za-z0-9_-]", "_", str(part)[:PART_CHARS]): float(value)
        for part, value in returned.items()
        if part != key and not isinstance(value, str | bytes) and hasattr(value, "__float__")
    }
    found = next((returned[part] for part in _ANSWERS if isinstance(returned.get(part), str)), "")
    finite = dict(islice(((part, value) for part, value in parts.items() if math.isfinite(value)), MOST_PARTS))
    return Verdict(_number(returned[key], name), found, name, parts=finite)


def _number(returned: Any, name: str) -> float:
    if isinstance(returned, str | bytes) or not hasattr(returned, "__float__"):
        raise TypeError(f"{name} returned {_shown(returned)}, a {type(returned).__name__} and not a number")
    reward = float(returned)
    if not math.isfinite(reward):
        raise ValueError(f"{name} returned {reward}")
    return reward


def _shown(value: Any) -> str:
    return repr(str(value)[:SHOWN_CHARS])
