"""What a hostile tool returns: the model reads it, or one sentence about it, and the call counts as failed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mugrpo_megatron.extras.episodes.turns import MOST_BYTES, EpisodeModel
from mugrpo_megatron.samples import Problem


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raises_what(error: type[BaseException]) -> Callable[..., Any]:
    """A plain tool that raises it; an exception that an event loop takes for its own is the tool's all the same."""

    def tool() -> None:
        raise error("stop")

    return tool


def raises_later(error: type[BaseException]) -> Callable[..., Any]:
    async def tool() -> None:
        raise error("stop")

    return tool


def raises() -> None:
    raise KeyError("x" * 1000)


async def unasked(what: str, **arguments: Any) -> Any:
    raise AssertionError(what)


def answers(tool: Callable[..., Any], arguments: Any = None, name: str | None = None) -> tuple[list[str], int, int]:
    """What the model reads after a call of the tool; calls, and those that failed."""
    call = {"function": {"name": name or tool.__name__, "arguments": {} if arguments is None else arguments}}
    with ThreadPoolExecutor(1) as threads:
        model = EpisodeModel(Problem("p", "", ""), [1], "", [], {}, unasked, threads)
        messages = asyncio.run(model.answer({"tool_calls": [call]}, [tool]))
    return [message["content"] for message in messages], model.calls, model.failed_calls


def ten_megabytes() -> str:
    return "x" * 10_000_000


def unprintable() -> Unprintable:
    return Unprintable()


def bytes_of_it() -> bytes:
    return b"\xff"


def nested() -> dict[str, Any]:
    return {"value": float("nan"), "list": [1]}


@pytest.mark.parametrize(
    ("tool", "arguments", "why"),
    [
        (raises, {}, "KeyError: 'xxx"),
        (raises, {"unknown": 1}, "TypeError: raises() got an unexpected keyword argument 'unknown'"),
        (raises, "{not json", "TypeError: the arguments are '{not json', not an object"),
        (ten_megabytes, {}, f"ValueError: a text of 10,000,000 bytes; the model gets at most {MOST_BYTES:,}"),
        (unprintable, {}, "RuntimeError: no text"),
    ],
)
def test_a_tool_that_fails_is_a_sentence_for_the_model(tool: Callable[..., Any], arguments: Any, why: str) -> None:
    [text], calls, failed = answers(tool, arguments)
    error = json.loads(text)["error"]
    assert error.startswith(why)
    assert len(error) <= 300
    assert (calls, failed) == (1, 1)


LOOPS_OWN = (StopIteration, SystemExit, KeyboardInterrupt, asyncio.CancelledError, concurrent.futures.CancelledError)


@pytest.mark.parametrize("make", [raises_what, raises_later])
@pytest.mark.parametrize("error", LOOPS_OWN)
def test_the_model_reads_exceptions_that_an_event_loop_takes_for_its_own(
    make: Callable[..., Callable[..., Any]], error: type[BaseException]
) -> None:
    [text], calls, failed = answers(make(error))
    assert error.__name__ in json.loads(text)["error"]
    assert (calls, failed) == (1, 1)


def test_an_exception_without_text_is_read_by_its_type() -> None:
    [text], _, _ = answers(raises_what(Speechless))
    assert json.loads(text) == {"error": "Speechless: its text cannot be read (RuntimeError)"}


def test_an_episode_that_is_cancelled_in_a_tool_is_cancelled() -> None:
    async def cancelled() -> None:
        with ThreadPoolExecutor(1) as threads:
            model = EpisodeModel(Problem("p", "", ""), [1], "", [], {}, unasked, threads)
            task = asyncio.ensure_future(model.call(asyncio.Event().wait))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())


def test_a_tool_that_is_not_there_is_a_failed_call() -> None:
    [text], calls, failed = answers(raises, name="other")
    assert json.loads(text) == {"error": "LookupError: there is no tool 'other'"}
    assert (calls, failed) == (1, 1)


@pytest.mark.parametrize(("tool", "text"), [(bytes_of_it, "b'\\xff'"), (nested, '{"value": NaN, "list": [1]}')])
def test_what_is_no_text_is_read_as_json_or_as_python_prints_it(tool: Callable[..., Any], text: str) -> None:
    assert answers(tool) == ([text], 1, 0)
