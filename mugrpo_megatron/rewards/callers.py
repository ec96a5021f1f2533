"""Calls a user's reward function in a worker, in the form that its parameters' names show, and converts its results."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

from mugrpo_megatron.rewards.items import Needs, ScoringInput, Verdict, fits_float32

LARGEST_CALL = 256
"""Most responses in one call of a function that takes lists: enough for a whole group, unless it is very large."""
GOLD_COLUMNS = ("answer", "solution", "ground_truth", "label")
"""Parameters in TRL's form that get the gold where the row has no column of that name."""
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
TRAINERS = ("trainer_state", "environments")
"""Parameters whose values only TRL's own trainer has."""

Getter = Callable[[ScoringInput], Any]
OF_ROW = ("row", "rows", "extra_info", "extra_infos", "sample", "samples")
OF_PROMPT = ("prompt", "prompts", "completions", "sample", "samples")
OF_IDS = ("completion_ids", "sample", "samples")
"""Parameters for which the worker needs the row (OF_ROW), the prompt (OF_PROMPT), or the response's token ids
(OF_IDS)."""


def _extra_info(item: ScoringInput) -> Any:
    """The value of verl's argument `extra_info`: the row's column of that name if it is a dictionary, else the row."""
    return item.row["extra_info"] if isinstance(item.row.get("extra_info"), dict) else dict(item.row)


def _sample(item: ScoringInput) -> SimpleNamespace:
    metadata = item.row.get("metadata")
    return SimpleNamespace(
        prompt=item.prompt,
        response=item.response,
        response_length=len(item.ids),
        label=item.gold,
        metadata=metadata if isinstance(metadata, dict) else dict(item.row),
    )


def _completion(item: ScoringInput) -> Any:
    """A response in TRL's form: text for a text prompt, a list with one message for a chat."""
    return item.response if isinstance(item.prompt, str) else [{"role": "assistant", "content": item.response}]


SINGLE: dict[str, dict[str, Getter]] = {
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
"""Forms of functions of one response: the parameter by which the form is recognised -> all its parameters."""
LISTS: dict[str, dict[str, Getter]] = {
    "completions": {
        "completions": _completion,
        "prompts": lambda item: item.prompt,
        "completion_ids": lambda item: list(item.ids),
    },
    "responses": {f"{name}s": get for name, get in SINGLE["response"].items()},
    "solution_strs": {
        "solution_strs": lambda item: item.response,
        "ground_truths": lambda item: item.gold,
        "data_sources": lambda item: item.source,
        "extra_infos": _extra_info,
    },
    "samples": {"samples": _sample, "args": lambda item: None},
}
"""Forms of functions that take lists with an entry for each response: the parameter by which the form is recognised ->
all its parameters."""
FORMS = (
    "(response, answer, row, prompt), verl's (data_source, solution_str, ground_truth, extra_info), TRL's (prompts, "
    "completions, ...) or slime's (args, sample)"
)


class Unsupported(Exception):
    """Raised for a function whose parameters cannot be read or match no form. The message is the rest of a sentence
    that begins with the function's name."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a reward function: which arguments it takes, and whether for one response or for lists."""

    takes_lists: bool
    """Whether the function takes and returns lists with an entry for each response."""
    getters: dict[str, Getter]
    """Parameter -> the function that gets its value for one response."""
    columns: dict[str, bool] | None
    """Columns of the row that the function has as parameters, in TRL's form: name -> whether it is optional. None in
    other forms."""
    all_columns: bool
    """Whether the function takes all columns of the row, because it has `**kwargs`."""

    @property
    def needs(self) -> Needs:
        """The data that a worker needs to call the function."""
        parameters = set(self.getters)
        return Needs(
            responses=LARGEST_CALL if self.takes_lists else 1,
            row=self.columns is not None or not parameters.isdisjoint(OF_ROW),
            prompt=not parameters.isdisjoint(OF_PROMPT),
            ids=not parameters.isdisjoint(OF_IDS),
        )


def form_of(function: Callable[..., Any]) -> Form:
    """Recognise the form of a function by its parameters' names; raises Unsupported if it has no known form."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise Unsupported(f"has no signature that can be read ({error}): write it as a def") from None
    key = next((name for name in (*LISTS, *SINGLE) if name in parameters), None)
    if key is None:
        raise Unsupported(f"takes ({', '.join(parameters)}): name its parameters as in {FORMS}")
    known = LISTS[key] if key in LISTS else SINGLE[key]
    is_trl = key == "completions"
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    columns = {}
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise Unsupported(f"takes {name!r} by position alone: remove the / from its parameters")
        if name in known or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        needed = parameter.default is parameter.empty
        if is_trl and name not in TRAINERS:
            columns[name] = not needed
        elif needed:
            raise Unsupported(f"needs {name!r}, which is not a known parameter: name its parameters as in {FORMS}")
    getters = {name: get for name, get in known.items() if takes_all or name in parameters}
    return Form(key in LISTS, getters, columns if is_trl else None, takes_all)


def single_arguments(form: Form, item: ScoringInput) -> dict[str, Any]:
    return {name: get(item) for name, get in form.getters.items()}


def list_arguments(form: Form, items: Sequence[ScoringInput], metrics: dict[str, float]) -> dict[str, Any]:
    """The arguments of one call for all `items`: lists with an entry for each item.

    A function in TRL's form may also take `log_metric`, a function that writes a number to `metrics`. Raises
    LookupError if the function needs a column that no row has.
    """
    arguments: dict[str, Any] = {name: [get(item) for item in items] for name, get in form.getters.items()}
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
            raise LookupError(
                f"it needs the column {name!r}, and the row has {', '.join(rows[0])}; add the column, or give the "
                "parameter a default"
            )
        arguments[name] = [
            row.get(name, item.gold if name in GOLD_COLUMNS else None) for row, item in zip(rows, items, strict=True)
        ]
    return arguments


ASYNC_RESPONSES = 64
"""Most responses that an `async` function scores at the same time in one worker."""
EXCERPT_CHARS = 80
MOST_PARTS = 16
"""Most numbers besides the reward that a function may return for one response. Each becomes a metric of the run."""
PART_CHARS = 64
_SCORES = ("score", "reward")
"""Keys of the reward in a returned dictionary; the first one present counts."""
_ANSWERS = ("pred", "extracted")
"""Keys of the extracted answer in a returned dictionary."""
_WHY = "why"
"""Key of a sentence about the reward in a returned dictionary."""


class GaveUp(Exception):
    """Raised when an `async` function has taken longer than its limit, for a response or for a call with lists."""


@dataclass(slots=True)
class Caller:
    """A user's function with the form in which it is called. Raises Unsupported for a function in no known form."""

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
        """The data that a worker needs to call the function, with the most responses of one call."""
        needs = self.form.needs
        return needs._replace(responses=ASYNC_RESPONSES) if self.is_async and not self.form.takes_lists else needs

    def __call__(self, items: Sequence[ScoringInput]) -> list[Verdict | BaseException]:
        """Returns a verdict on each item, or in its place an exception.

        There is an exception if the function's result for the item cannot be used, or if the function is `async`, takes
        one response, and raised. What a function of another kind raises is raised here. Raises TypeError if a function
        that takes lists does not return a list with a reward for each item.
        """
        # Each item gets copies: a function may change its arguments, and the responses of a group share one row.
        items = [
            replace(item, row=deepcopy(item.row), prompt=deepcopy(item.prompt), gold=deepcopy(item.gold))
            for item in items
        ]
        results = self._call_with_lists(items) if self.form.takes_lists else self._call_each(items)
        return [self._verdict(result) for result in results]

    def _call_with_lists(self, items: Sequence[ScoringInput]) -> list[Any]:
        metrics: dict[str, float] = {}
        returned = self.function(**list_arguments(self.form, items, metrics))
        if self.is_async:
            returned = self._run(self._with_timeout(returned, self.limit_s * len(items)))
        try:
            rewards = list(returned)
        except TypeError:
            rewards = []
        if isinstance(returned, str | bytes | dict) or len(rewards) != len(items):
            raise TypeError(f"{self.name} returned {_excerpt(returned)} and not a list of {len(items)} rewards")
        # A metric that a TRL function logs belongs to the whole call, so each response of the call gets it. A metric
        # called `score` or `reward` gets another name, since `verdict_of` would take it for the response's reward.
        logged = {f"logged_{name}" if name in _SCORES else name: value for name, value in metrics.items()}
        return [reward if reward is None or not logged else {**logged, "score": reward} for reward in rewards]

    def _call_each(self, items: Sequence[ScoringInput]) -> list[Any]:
        if not self.is_async:
            return [self.function(**single_arguments(self.form, item)) for item in items]

        async def call(item: ScoringInput) -> Any:
            return await self._with_timeout(self.function(**single_arguments(self.form, item)), self.limit_s)

        async def gather() -> list[Any]:
            return await asyncio.gather(*map(call, items), return_exceptions=True)

        return list(self._run(gather()))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        # All calls share one event loop, since a function may keep an HTTP session that belongs to the loop.
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(coroutine)

    async def _with_timeout(self, awaitable: Awaitable[Any], limit_s: float) -> Any:
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await awaitable
        except TimeoutError:
            if limit.expired():
                raise GaveUp(
                    f"{self.name} was cancelled after {limit_s:g} s: make it faster, or raise its timeout_s"
                ) from None
            raise

    def _verdict(self, returned: Any) -> Verdict | BaseException:
        if isinstance(returned, BaseException):
            return returned
        try:
            return verdict_of(returned, self.name, self.form.takes_lists)
        except Exception as error:  # the result's `__float__` or `__str__` may be the user's code, and may raise
            return error


def verdict_of(returned: Any, name: str, may_skip: bool) -> Verdict:
    """Convert what a function returned for a response: a number, or a dictionary with the reward as `score` or
    `reward`, other numbers, the extracted answer and a `why`.

    With `may_skip` None is allowed too, and means that the function does not apply to the response. Raises TypeError or
    ValueError unless the reward is a number that is finite as float32.
    """
    if returned is None and may_skip:
        return Verdict(None, "", f"{name} does not apply")
    if not isinstance(returned, dict):
        return Verdict(_number(returned, name), "", name)
    key = next((key for key in _SCORES if key in returned), None)
    if key is None:
        raise TypeError(
            f"{name} returned a dict without 'score', the key of the reward; it has "
            f"{', '.join(map(repr, returned))[:EXCERPT_CHARS]}"
        )
    parts = {
        re.sub(r"[^A-Za-z0-9_-]", "_", str(entry)[:PART_CHARS]): _as_float(value)
        for entry, value in returned.items()
        if entry != key and not isinstance(value, str | bytes) and hasattr(value, "__float__")
    }
    answer = next((returned[entry] for entry in _ANSWERS if isinstance(returned.get(entry), str)), "")
    why = returned[_WHY] if isinstance(returned.get(_WHY), str) else name
    finite = dict(islice((item for item in parts.items() if math.isfinite(item[1])), MOST_PARTS))
    return Verdict(_number(returned[key], name), answer, why, parts=finite)


def _number(returned: Any, name: str) -> float:
    if isinstance(returned, str | bytes) or not hasattr(returned, "__float__"):
        none = (
            "; only a function that takes lists may return None, for a response that it does not score"
            if returned is None
            else ""
        )
        raise TypeError(f"{name} returned {_excerpt(returned)}, a {type(returned).__name__} and not a number{none}")
    try:
        reward = float(returned)
    except OverflowError:  # an integer of more than 308 digits
        reward = math.inf
    if not fits_float32(reward):
        raise ValueError(f"{name} returned {reward}; a reward must be a number that is finite as float32")
    return reward


def _as_float(value: Any) -> float:
    """A value as float; NaN if it cannot be converted, such as an array or an integer of 400 digits."""
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        return math.nan


def _excerpt(value: Any) -> str:
    return repr(str(value)[:EXCERPT_CHARS])
