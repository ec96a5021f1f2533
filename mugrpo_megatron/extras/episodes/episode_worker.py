"""The worker process of a user's function: hundreds of episodes in one event loop, plain (not async) tools in threads.

It is started by rewards/guard.py, which kills with it whatever its tools have started. Messages are JSON. `key` is the
number of an episode, `request` the number of a request to the model:

From the parent:  `start` key, problem, ... · `answer` key, request, value, or error and limit · `cancel` key
To the parent:    `ready` · `refused` text · `alive` · `ask` key, request, what · `done` key, ...
                  · `failed` key, why, open
                  · `drop` key, request: nobody waits for its answer any more
                  · `ended` key, open: a cancelled episode has ended
`open` is the number of plain functions of the episode that still run.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from mugrpo_megatron.call_guard import refuse_exits
from mugrpo_megatron.extras.episodes import turns
from mugrpo_megatron.extras.episodes.conventions import EpisodeFunction, load_episode_function
from mugrpo_megatron.extras.episodes.request_size import MOST_IDS, check_size
from mugrpo_megatron.extras.episodes.turns import PROGRAM, EpisodeModel, Over, ProgramFailure, current
from mugrpo_megatron.files.json_text import as_text
from mugrpo_megatron.recipe.functions import describe_exception
from mugrpo_megatron.samples import Problem

ALIVE_S = 1.0
"""Seconds between two messages that tell the parent that the event loop still runs."""
THREADS = 1024
"""Most plain (not `async`) functions that run at the same time."""
STACK_BYTES = 1 << 20
MOST_SENT = 16 << 20
"""Most bytes of the texts of one request; a larger one is not even sent to the parent, whose own limit is lower."""
ENDED = "the episode has ended"


def serve(socket: int, text: str) -> None:
    """Limit this process, load the function and run episodes until the parent is gone. `text`: the options as JSON."""
    from mugrpo_megatron.errors import UserError

    options = json.loads(text)
    memory = options["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)  # a small stack, since there may be a thousand threads
    connection = Connection(socket)
    leave = refuse_exits()["_exit"]  # a tool that exits must not end the other episodes
    # A process that a tool forks must not write to this worker's connection.
    os.register_at_fork(after_in_child=connection.close)
    try:
        if options["key"] == "rollout.agent":
            # Imported only for programs, since it imports a web server.
            from mugrpo_megatron.extras.episodes.agent import Agent

            function: EpisodeFunction = Agent(options).episode
        else:
            function = load_episode_function(options["name"], options)
    except UserError as error:
        connection.send_bytes(json.dumps({"refused": str(error)}).encode())
        return
    connection.send_bytes(b'{"ready": true}')
    asyncio.run(_Worker(connection, function, leave).run())


class _Worker:
    def __init__(
        self, connection: Connection, function: EpisodeFunction, leave: Callable[[int], NoReturn] = os._exit
    ) -> None:
        self._connection, self._function, self._leave = connection, function, leave
        self._threads = ThreadPoolExecutor(THREADS)
        self._episodes: dict[int, tuple[asyncio.Task[None], EpisodeModel]] = {}
        self._pending: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        """Number of a request -> the key of its episode, and the future of its answer."""
        self._asking: set[int] = set()
        """Keys of episodes whose function waits for an answer."""
        self._numbers = count()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection.fileno(), self._receive)
        while True:
            await asyncio.sleep(ALIVE_S)
            self._send({"alive": True})

    def _receive(self) -> None:
        try:
            message = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._leave(0)  # at once, since threads may hang in a user's function
        if "start" in message:
            key = message["start"]
            model = self._model(key, message)
            self._episodes[key] = asyncio.ensure_future(self._run(key, model)), model
        elif "answer" in message:
            _, future = self._pending.pop(message["request"], (0, None))
            if future and not future.done():
                if "limit" in message:
                    future.set_exception(Over(message["error"], message["limit"]))
                elif "error" in message:
                    future.set_exception(ValueError(message["error"]))
                else:
                    future.set_result(message["value"])
        elif message["cancel"] in self._episodes:
            self._episodes[message["cancel"]][0].cancel()

    def _model(self, key: int, message: dict[str, Any]) -> EpisodeModel:
        async def ask(what: str, **arguments: Any) -> Any:
            if key in self._asking:
                raise RuntimeError(
                    "an episode may have one request to the model at a time, and this one made two; await the first"
                )
            if key not in self._episodes:
                raise Over(ENDED)
            check_size(arguments, MOST_IDS, MOST_SENT)
            number = next(self._numbers)
            text = as_text({"ask": key, "request": number, "what": what, **arguments}).encode()
            future = asyncio.get_running_loop().create_future()
            self._pending[number] = key, future
            # A program may have several requests open at a time, a function only one.
            self._asking |= {key} if what != PROGRAM else set()
            try:
                self._write(text)
                return await future
            except asyncio.CancelledError:  # a program has closed its connection, or the episode is cancelled
                if self._pending.pop(number, None) and key in self._episodes:
                    self._send({"drop": key, "request": number})
                raise
            finally:
                self._pending.pop(number, None)
                self._asking.discard(key)

        fields = message["problem"]
        problem = Problem(**{**fields, "messages": tuple(fields["messages"])})
        rest = {name: message[name] for name in ("prompt_ids", "prompt", "messages", "sampling")}
        return EpisodeModel(problem, ask=ask, threads=self._threads, **rest)

    async def _run(self, key: int, model: EpisodeModel) -> None:
        current.set(model)
        try:
            result = await self._function(model.problem, model)
            text = {"done": key, **result, "calls": model.calls, "failed_calls": model.failed_calls}
            self._send(text)
        except BaseException as error:  # SystemExit too: it would end the other episodes
            task = asyncio.current_task()
            if task and task.cancelling():
                self._send({"ended": key, "open": model.open})
                return
            internal = (__file__, turns.__file__, asyncio.__file__)
            why = str(error) if isinstance(error, ProgramFailure) else describe_exception(error, *internal)
            self._send({"failed": key, "why": why, "open": model.open})
        finally:
            self._episodes.pop(key, None)
            # Answer the open requests of programs, whose connections would otherwise stay open for ever.
            for number in [number for number, (owner, _) in self._pending.items() if owner == key]:
                _, future = self._pending.pop(number)
                if not future.done():
                    future.set_exception(Over(ENDED))

    def _send(self, message: dict[str, Any]) -> None:
        self._write(as_text(message).encode())

    def _write(self, text: bytes) -> None:
        try:
            self._connection.send_bytes(text)
        except OSError:  # the parent is gone, or this process was forked by a tool
            self._leave(1)
