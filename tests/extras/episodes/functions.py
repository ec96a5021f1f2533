"""Functions of users, good ones and hostile ones."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any


def add(terms: str) -> int:
    """Add numbers.

    Args:
        terms: numbers with + between them.
    """
    return sum(int(term) for term in terms.split("+"))


async def calculator(problem: Any, model: Any) -> None:
    """The model writes a sum and "=", the tool continues."""
    ids = model.prompt_ids
    while True:
        turn = await model.generate(ids, stop=["="])
        if not turn.text.endswith("="):
            return
        result = await model.call(add, terms=turn.text[:-1].split(" ")[-1])
        ids = [*model.ids, *await model.encode(f"{result} ")]


async def chat(problem: Any, model: Any) -> dict[str, float]:
    messages = list(model.messages)
    while True:
        message = await model.chat(messages, tools=[add])
        messages.append(message)
        if not message.get("tool_calls"):
            return {"score": float(message["content"].strip() == problem.answer), "words": 1.0}
        messages += await model.answer(message, [add])


async def one_turn(problem: Any, model: Any) -> float:
    await model.generate(model.prompt_ids)
    return 1.0


async def tokenizes_again(problem: Any, model: Any) -> None:
    await model.generate(model.prompt_ids)
    await model.generate([*model.ids[:-3], 5, *model.ids[-2:]])


async def edits_messages(problem: Any, model: Any) -> None:
    message = await model.chat(model.messages)
    await model.chat([*model.messages, {**message, "content": "else"}, {"role": "user", "content": "go on"}])


async def sleeps(problem: Any, model: Any) -> float:
    await model.generate(model.prompt_ids)
    await asyncio.sleep(float(problem.row["seconds"]))
    await model.generate([*model.ids, 7])
    return 1.0


async def sleeps_in_a_thread(problem: Any, model: Any) -> float:
    await model.generate(model.prompt_ids)
    await model.call(_sleep, seconds=float(problem.row["seconds"]))
    await model.generate([*model.ids, 7])
    return 1.0


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


async def asks_nothing(problem: Any, model: Any) -> float:
    return 1.0


async def asks_twice_at_once(problem: Any, model: Any) -> None:
    await asyncio.gather(model.generate(model.prompt_ids), model.generate(model.prompt_ids))


async def never_ends(problem: Any, model: Any) -> None:
    ids = model.prompt_ids
    while True:
        await model.generate(ids, max_tokens=2)
        ids = [*model.ids, 7]


async def raises_after_text(problem: Any, model: Any) -> float:
    turn = await model.generate(model.prompt_ids)
    if turn.text:
        raise RuntimeError("a text")
    return 1.0


async def hostile(problem: Any, model: Any) -> Any:
    """What `question` names, after one turn, where there is anything to name."""
    await model.generate(model.prompt_ids)
    kind = problem.question
    if kind == "raises":
        await model.call(add, terms="x")
    elif kind == "hangs":
        await model.call(_sleep, seconds=3600.0)
    elif kind == "hangs_the_loop":
        time.sleep(3600)
    elif kind == "ten_megabytes":
        await model.generate([*model.ids, *await model.encode("x" * 10_000_000)])
    elif kind == "wrong_type":
        await model.generate(object())
    elif kind == "forks":
        await model.call(_fork)
    elif kind == "exits":
        os._exit(3)
    elif kind == "returns_text":
        return "well done"
    return 1.0


def _fork() -> int:
    """A child that goes on as if it were the process."""
    return os.fork()


def plain(problem: Any, model: Any) -> float:
    return 1.0


async def unknown(task: Any, policy: Any) -> float:
    return 1.0


async def slow_calls(problem: Any, model: Any) -> float:
    """Two turns with a tool of a second between them."""
    await model.generate(model.prompt_ids, max_tokens=4)
    await model.call(_sleep, seconds=1.0)
    turn = await model.generate([*model.ids, *await model.encode(" 7 ")])
    return float(sum(turn.ids) % 2)
