"""The model and the tools as a user's function sees them; runs in a worker, whose parent holds the engine."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mugrpo_megatron.extras.episodes.request_size import MOST_BYTES, utf8_bytes
from mugrpo_megatron.recipe.functions import exception_text
from mugrpo_megatron.samples import Problem

if TYPE_CHECKING:
    from mugrpo_megatron.engine.wire import Sampling  # for the type alone: a worker does not import that module

SHOWN_CHARS = 300
PROGRAM = "program"
"""Kind of a request that a program makes at its endpoint."""

Ask = Callable[..., Awaitable[Any]]
"""(request, **arguments) -> the parent's answer."""


class ProgramFailure(Exception):
    """A program failed; the text is one sentence."""


class Over(ValueError):
    """Raised where an episode asks the model although the episode has finished or a limit has ended it."""

    def __init__(self, why: str, limit: str | None = None) -> None:
        """`limit` is the recipe key of the limit that was reached; None if the episode has finished."""
        super().__init__(why)
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the model to one request."""

    ids: list[int]
    logprobs: list[float]
    text: str
    """The response as text, without special tokens."""
    finish_reason: str
    """Reason for the end of the turn: `stop`, or `length` if a limit cut it."""


@dataclass(slots=True)
class EpisodeModel:
    """The model, as one episode asks it. `generate` continues the tokens so far; a limit that is reached ends the
    episode."""

    problem: Problem
    """The problem of the episode."""
    prompt_ids: list[int]
    """Token ids of the problem as the recipe renders it."""
    prompt: str
    """The problem as the recipe renders it, as text with special tokens."""
    messages: list[dict[str, Any]]
    """The problem as a chat."""
    sampling: Mapping[str, Any]
    """Sampling settings by SGLang's names."""
    ask: Ask
    """Sends a request to the run. Call the methods below instead."""
    threads: ThreadPoolExecutor
    """Threads in which plain functions run."""
    calls: int = 0
    """Number of tool calls so far."""
    failed_calls: int = 0
    """Number of tool calls so far that raised an exception."""
    open: int = 0
    """Number of plain functions that have not returned."""
    ids: list[int] = field(default_factory=list)
    """All tokens so far, sampled ones included; `generate` continues them."""

    async def generate(self, ids: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        """Sample from a prompt of token ids, which begins with `self.ids` after the first turn.

        Args:
            max_tokens: maximum number of tokens of the turn; None allows all that the episode has left.
            stop: texts that end the turn, as those of `rollout.stop` do; the turn includes them.
        """
        most = None if max_tokens is None else int(max_tokens)
        turn = Turn(**await self.ask("generate", ids=list(map(int, ids)), max_tokens=most, stop=list(map(str, stop))))
        self.ids = [*ids, *turn.ids]
        return turn

    async def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> dict[str, Any]:
        """Sample the assistant's next message, with `tool_calls` if the model calls tools.

        After the first turn, `messages` begin with those of the last request and the answer to it. `tools` are
        functions with docstrings, or JSON schemas.
        """
        schemas = [tool if isinstance(tool, dict) else schema_of(tool) for tool in tools]
        answer = await self.ask("chat", messages=[dict(message) for message in messages], tools=schemas)
        self.ids = answer["ids"]
        return dict(answer["message"])

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""
        return list(await self.ask("encode", text=_short_enough(text)))

    async def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, without special tokens."""
        return str(await self.ask("decode", ids=list(map(int, ids))))

    async def call(self, tool: Callable[..., Any], /, **arguments: Any) -> Any:
        """Run a tool and count the call; a plain function runs in a thread, so that it delays no other episode.

        Raises the tool's own exception, or RuntimeError for one that `apart` turns into it.
        """
        self.calls += 1
        try:
            return await self.apart(tool, **arguments)
        except BaseException:
            self.failed_calls += 1
            raise

    async def apart(self, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """Run a function that the model did not call, such as a check: in a thread as `call` does, but uncounted.

        StopIteration, SystemExit, KeyboardInterrupt and CancelledError of the function become a RuntimeError.
        """

        def run() -> Any:
            try:
                return context.run(function, **arguments)
            except StopIteration as error:  # a future cannot hold StopIteration and would never end
                raise RuntimeError(exception_text(error)) from error
            finally:
                self.open -= 1

        try:
            if inspect.iscoroutinefunction(function):
                return await function(**arguments)
            context = copy_context()
            self.open += 1
            result = await asyncio.get_running_loop().run_in_executor(self.threads, run)
            return await result if inspect.isawaitable(result) else result
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            raise RuntimeError(exception_text(error)) from error

    async def answer(self, message: Mapping[str, Any], tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
        """Run the tools that the assistant's message calls; returns one message for each call, also for a call that
        fails, as TRL does."""
        by_name = {tool.__name__: tool for tool in tools}
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return [
            {"role": "tool", "name": call["name"], "content": await self._said(by_name.get(call["name"]), call)}
            for call in calls
        ]

    async def _said(self, tool: Callable[..., Any] | None, call: Mapping[str, Any]) -> str:
        try:
            if tool is None or not isinstance(call["arguments"], dict):
                self.calls += 1
                self.failed_calls += 1
            if tool is None:
                raise LookupError(f"there is no tool {call['name']!r}")
            if not isinstance(call["arguments"], dict):
                raise TypeError(f"the arguments are {str(call['arguments'])[:SHOWN_CHARS]!r}, not an object")
            result = await self.call(tool, **call["arguments"])
            try:
                return _short_enough(text_of(result))
            except Exception:
                self.failed_calls += 1
                raise
        except Exception as error:  # a tool may fail in any way, and the model reads how
            return json.dumps({"error": exception_text(error)})


current: ContextVar[EpisodeModel] = ContextVar("current")
"""The model of the episode that the current task runs."""


def text_of(result: Any) -> str:
    """A tool's result as text for the model: strings unchanged, other values as JSON or, if that fails, by `str`."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def _short_enough(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"expected a text, got a value of type {type(text).__name__}")
    if (size := utf8_bytes(text)) > MOST_BYTES:
        raise ValueError(f"a text of {size:,} bytes; the model gets at most {MOST_BYTES:,}, so shorten it")
    return text


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """A tool's JSON schema, made from its signature and its Google-style docstring."""
    # Not at the top: it takes a second (but imports no torch).
    from transformers.utils.chat_template_utils import get_json_schema

    return dict(get_json_schema(tool))


def sampling_settings(sampling: Sampling) -> dict[str, Any]:
    """The sampling parameters by SGLang's names."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "max_new_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
