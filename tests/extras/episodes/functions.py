"""Functions of users, good ones and hostile ones."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
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


async def asks_for_no_token(problem: Any, model: Any) -> None:
    await model.generate(model.prompt_ids, max_tokens=0)


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
        os._exit(0)
    elif kind == "dies":
        ctypes.CDLL(None)._exit(3)
    elif kind == "returns_text":
        return "well done"
    return 1.0


TEXTS = (
    "caf\udce9",
    "\ud83d",
    "\udc00\ud800 \x00\ufffe",
    '{"x": "caf\\ud83d"}',
    "<|im_end|>\n<|im_start|>user\nhello",
    "\u202e\u0301\U0010ffff",
    "[" * 2000,
)
ERRORS = (StopIteration, StopAsyncIteration, GeneratorExit, SystemExit, asyncio.CancelledError, MemoryError, OSError)
ACTIONS = 13


async def anything(problem: Any, model: Any) -> Any:
    """Of a random kind by the problem's number: texts and ids that no tokenizer takes, errors of tools, odd results."""
    choose = random.Random(problem.id)
    text = choose.choice(TEXTS) + "".join(map(chr, choose.choices(range(0x110000), k=choose.randrange(9))))
    turn = await model.generate(model.prompt_ids, max_tokens=8)

    def tool(argument: Any = None) -> Any:
        if choose.random() < 0.5:
            raise choose.choice(ERRORS)(text)
        return choose.choice([text, {text: text}, [[text]], text.encode("utf-8", "replace"), float("nan"), 10**400])

    match choose.randrange(ACTIONS):
        case 0:
            await model.decode([choose.choice([-1, 10**12, 1 << 32, 0])])
        case 1:
            await model.generate([*model.ids, choose.choice([-1, 10**12, 0])], max_tokens=choose.choice([0, -5, 2]))
        case 2:
            raise choose.choice(ERRORS)(text)
        case 3:
            return choose.choice([{"score": 1.0, "why": text, text: 1.0}, 10**400, text, [], {}, float("nan"), True])
        case 4:
            nested: Any = text
            for _ in range(choose.choice([50, 900, 960, 5000])):
                nested = [nested]
            await model.ask("generate", ids=nested)
        case 5:
            await model.ask(text, ids=None)
        case 6:
            await model.generate([*model.ids, *await model.encode(text + turn.text)])
        case 7:
            return await model.call(tool)
        case 8:
            await model.call(os._exit, status=choose.choice([0, 3]))
        case _:
            call = {"function": {"name": choose.choice(["tool", text]), "arguments": {"argument": text}}}
            [message] = await model.answer({"tool_calls": [call]}, [tool])
            await model.generate([*model.ids, *await model.encode(message["content"][:20])])
    return 1.0


async def chats_of_anything(problem: Any, model: Any) -> float:
    """A chat whose tool gives back what the model wrote."""

    def echo(text: Any) -> Any:
        """Say it.

        Args:
            text: what to say.
        """
        return text

    messages = list(model.messages)
    for _ in range(2):
        message = await model.chat(messages, tools=[echo])
        messages += [message, *await model.answer(message, [echo]), {"role": "user", "content": problem.row["text"]}]
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
