"""Calls a user's reward function in a worker, and makes verdicts of what it returns."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any

from mugrpo_megatron.rewards.items import Needs, ScoringInput, Verdict

TOGETHER = 256
"""Most responses in one call of a function that takes several: a whole group, in all but the largest."""
GOLD_COLUMNS = ("answer", "solution", "ground_truth", "label")
"""Columns that are the gold where a row lacks them."""
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
TRAINERS = ("trainer_state", "environments")
"""What TRL's trainer alone can give."""

Get = Callable[[ScoringInput], Any]
OF_ROW = ("row", "rows", "extra_info", "extra_infos", "sample", "samples")
OF_PROMPT = ("prompt", "prompts", "completions", "sample", "samples")
OF_IDS = ("completion_ids", "sample", "samples")
"""Parameters for which a row, a prompt and token ids are sent to the worker."""


def _extra_info(item: ScoringInput) -> Any:
    """verl's column where the row has it, else the row."""
    return item.row["extra_info"] if isinstance(item.row.get("extra_info"), dict) else dict(item.row)


def _sample(item: ScoringInput) -> SimpleNamespace:
    """What slime's Sample says of a response."""
    metadata = item.row.get("metadata")
    return SimpleNamespace(
        prompt=item.prompt,
        response=item.response,
        response_length=len(item.ids),
        label=item.gold,
        metadata=metadata if isinstance(metadata, dict) else dict(item.row),
    )


def _completion(item: ScoringInput) -> Any:
    """As TRL has it: text after a text, and a message after messages."""
    return item.response if isinstance(item.prompt, str) else [{"role": "assistant", "content": item.response}]


ONE: dict[str, dict[str, Get]] = {
    "response": {
        "response": lambda item: item.response,
        "answer": lambda item: item.gold,
        "row": lambda item: dict(item.row),
        "prompt": lambda item: item.prompt,
    },
    "solution_str": {
        "solution_str": lambda item: item.response,
        "ground_truth": lambda item: item.gold,
        "data_source": lambda item: item.source,
        "extra_info": _extra_info,
    },
    "sample": {"sample": _sample, "args": lambda item: SimpleNamespace()},
}
"""By the parameter that names the form: what a function of one response is given."""
SEVERAL: dict[str, dict[str, Get]] = {
    "completions": {
        "completions": _completion,
        "prompts": lambda item: item.prompt,
        "completion_ids": lambda item: list(item.ids),
    },
    "responses": {f"{name}s": get for name, get in ONE["response"].items()},
    "solution_strs": {
        "solution_strs": lambda item: item.response,
        "ground_truths": lambda item: item.gold,
        "data_sources": lambda item: item.source,
        "extra_infos": _extra_info,
    },
    "samples": {"samples": _sample, "args": lambda item: None},
}
"""The same for functions of several responses, which are given lists."""
FORMS = (
    "(response, answer, row, prompt), verl's (data_source, solution_str, ground_truth, extra_info), TRL's (prompts, "
    "completions, ...) or slime's (args, sample)"
)


class Unsupported(Exception):
    """A function's parameters match no form; the message continues a sentence that begins with its name."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a function takes."""

    several: bool
    """Whether it takes lists, an entry a response, and returns one."""
    known: dict[str, Get]
    """The parameters that it is given, and what they are of each response."""
    columns: dict[str, bool] | None
    """TRL's: columns of the row that are given as well -> whether it can be called without; None for other forms."""
    all_columns: bool
    """Whether it takes every column."""

    @property
    def needs(self) -> Needs:
        """What has to be known of a response."""
        taken = set(self.known)
        return Needs(
            responses=TOGETHER if self.several else 1,
            row=self.columns is not None or not taken.isdisjoint(OF_ROW),
            prompt=not taken.isdisjoint(OF_PROMPT),
            ids=not taken.isdisjoint(OF_IDS),
        )


def form_of(function: Callable[..., Any]) -> Form:
    """What a function takes, by the names of its parameters; raises Unsupported."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise Unsupported(f"has no signature that could be read ({error})") from None
    key = next((name for name in (*SEVERAL, *ONE) if name in parameters), None)
    if key is None:
        raise Unsupported(f"takes ({', '.join(parameters)}): name its parameters as in {FORMS}")
    known = SEVERAL[key] if key in SEVERAL else ONE[key]
    is_trl = key == "completions"
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    columns = {}
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise Unsupported(f"takes {name!r} by position alone: drop the /")
        if name in known or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        needed = parameter.default is parameter.empty
        if is_trl and name not in TRAINERS:
            columns[name] = not needed
        elif needed:
            raise Unsupported(f"needs {name!r}, which nothing here gives: the parameters are those of {FORMS}")
    chosen = {name: get for name, get in known.items() if takes_all or name in parameters}
    return Form(key in SEVERAL, chosen, columns if is_trl else None, takes_all)


def arguments_of_one(form: Form, item: ScoringInput) -> dict[str, Any]:
    """The arguments for one response."""
    return {name: get(item) for name, get in form.known.items()}


def arguments_of_several(form: Form, items: Sequence[ScoringInput], metrics: dict[str, float]) -> dict[str, Any]:
    """The arguments for several responses; what TRL's `log_metric` is given goes to `metrics`.

    Raises LookupError for a column that the function cannot do without.
    """
    arguments: dict[str, Any] = {name: [get(item) for item in items] for name, get in form.known.items()}
    if "samples" in arguments:
        arguments["args"] = SimpleNamespace()
    if form.columns is None:
        return arguments
    tools = {"log_metric": metrics.__setitem__, "log_extra": lambda name, values: None}
    arguments |= {name: tool for name, tool in tools.items() if form.all_columns or name in form.columns}
    rows = [item.row or {"answer": item.gold} for item in items]
    columns = dict.fromkeys(name for row in rows for name in row) if form.all_columns else {}
    for name in [*form.columns, *columns]:
        if name in arguments or name in NOT_COLUMNS:
            continue
        if name not in GOLD_COLUMNS and not any(name in row for row in rows):
            if form.columns.get(name):
                continue
            raise LookupError(f"it needs the column {name!r}, and the row has {', '.join(rows[0])}")
        arguments[name] = [
            row.get(name, item.gold if name in GOLD_COLUMNS else None) for row, item in zip(rows, items, strict=True)
        ]
    return arguments


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
_WHY = "why"
"""The key that holds a sentence about the reward."""


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

    def __call__(self, items: Sequence[ScoringInput]) -> list[Verdict | BaseException]:
        """A verdict on each item, or what the function raised for it; raises what it raised for all of them."""
        returned = self._of_several(items) if self.form.several else self._of_each(items)
        return [self._verdict(one) for one in returned]

    def _of_several(self, items: Sequence[ScoringInput]) -> list[Any]:
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

    def _of_each(self, items: Sequence[ScoringInput]) -> list[Any]:
        if not self.is_async:
            return [self.function(**arguments_of_one(self.form, item)) for item in items]

        async def one(item: ScoringInput) -> Any:
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
    """The verdict in what a function returned: a number, or a dictionary with a `score`, other numbers and a `why`.

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
    answer = next((returned[part] for part in _ANSWERS if isinstance(returned.get(part), str)), "")
    why = returned[_WHY] if isinstance(returned.get(_WHY), str) else name
    finite = dict(islice(((part, value) for part, value in parts.items() if math.isfinite(value)), MOST_PARTS))
    return Verdict(_number(returned[key], name), answer, why, parts=finite)


def _number(returned: Any, name: str) -> float:
    if isinstance(returned, str | bytes) or not hasattr(returned, "__float__"):
        raise TypeError(f"{name} returned {_shown(returned)}, a {type(returned).__name__} and not a number")
    reward = float(returned)
    if not math.isfinite(reward):
        raise ValueError(f"{name} returned {reward}")
    return reward


def _shown(value: Any) -> str:
    return repr(str(value)[:SHOWN_CHARS])
