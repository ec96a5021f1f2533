"""Asks several servers for responses to prompts from one queue, in a thread; the caller reads what happens as events.

A server gets further prompts as long as it answers. The prompts of one that is away, busy or slow go back to the queue,
and it is asked again after a pause. One that answers wrongly is not asked again.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from mugrpo_megatron.engine.wire import SampledGroup, Sampling
from mugrpo_megatron.extras.servers.connection import Connection, ServerBusy, ServerRefusal, ServerTrouble
from mugrpo_megatron.extras.servers.dialects import Served, ask_what_is_served, read_replies, request_of
from mugrpo_megatron.extras.servers.replies import Asked, responses_of
from mugrpo_megatron.samples import Prompt

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
JOIN_S = 5.0
"""Seconds between two calls of `Pool.urls`, which may name new servers."""
UNREAD, LEAST_UNREAD = 4, 128
"""Most answers of a server that may wait for the caller: a multiple of `StageRequest.concurrency`, or LEAST_UNREAD if
that is more. A server that answers a few prompts at a time goes on while the caller collects and checks a batch."""


@dataclass(eq=False)
class Server:
    """One server as the pool sees it."""

    url: str
    served: Served | None = None
    epoch: int = 0
    """Number of times that the server was found ready; its weights may have changed each time."""
    trouble: str = ""
    """Reason why the server gets no prompts at this moment; empty while it gets prompts."""
    dropped: bool = False
    """Whether the server gets no more prompts in this stage."""
    in_flight: int = 0
    unread: int = 0
    pauses: int = 0
    """Pauses in a row without an answer between them."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server's task should look again whether it can take prompts or has to stop."""

    @property
    def dialect(self) -> str:
        return self.served.dialect if self.served else ""


class Answered(NamedTuple):
    """A server has answered a prompt; the caller has to call `Pool.accept` once it has taken or dropped the answer."""

    server: Server
    epoch: int
    group: SampledGroup


class Troubled(NamedTuple):
    """A server is not asked for a while, because of `sentence`."""

    server: Server
    sentence: str


class Dropped(NamedTuple):
    """A server is not asked again, because of `sentence`."""

    server: Server
    sentence: str


class Crashed(NamedTuple):
    """The pool's thread has ended with an error of this program."""

    error: BaseException


Event = Answered | Troubled | Dropped | Crashed


@dataclass(frozen=True, slots=True)
class StageRequest:
    """What every server of a stage is asked for, besides the prompts."""

    model: str
    """Name under which a server has to serve the model."""
    sampling: Sampling
    asked: Asked
    longest_prompt: int
    """In tokens."""
    concurrency: int
    """Most prompts in flight at one server at a time."""
    timeout_s: float


@dataclass
class Pool:
    """The servers of a stage, the queue of their prompts, and the thread that asks them.

    A context manager: its thread and its connections end with the block, and requests in flight are dropped.
    """

    urls: Callable[[], Iterable[str]]
    """The servers' URLs at this moment; called every JOIN_S seconds, so that servers may join."""
    request: StageRequest
    servers: list[Server] = field(init=False)

    def __post_init__(self) -> None:
        self.servers = [Server(url) for url in self.urls()]
        self._waiting: deque[Prompt] = deque()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="servers", daemon=True)
        self._random = random.Random()

    def __enter__(self) -> Pool:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._call(self._main.cancel)
        self._thread.join()

    def put(self, prompts: Iterable[Prompt]) -> None:
        """Add prompts to the queue: new ones, or those whose answer the caller did not take."""
        prompts = list(prompts)

        def add() -> None:
            self._waiting.extend(prompts)
            self._wake()

        self._call(add)

    def events(self, timeout_s: float) -> list[Event]:
        """What has happened since the last call; waits at most `timeout_s` for the first event."""
        found: list[Event] = []
        try:
            found.append(self._events.get(timeout=timeout_s))
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            return found

    def accept(self, server: Server) -> None:
        """Tell the pool that the caller has taken or dropped an answer of this server, so that it may give another."""

        def read() -> None:
            server.unread -= 1
            server.changed.set()

        self._call(read)

    def drop(self, server: Server) -> None:
        """Send this server no more prompts; those that it has not answered go to other servers."""

        def drop() -> None:
            server.dropped = True
            server.changed.set()

        self._call(drop)

    def _call(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # raised when the event loop is closed: its thread has ended
            self._loop.call_soon_threadsafe(function)

    def _wake(self) -> None:
        # Each server has its own event: one server's task could clear a shared event before another task has seen it.
        for server in self.servers:
            server.changed.set()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve_all())
        except asyncio.CancelledError:
            return
        except BaseException as error:
            self._events.put(Crashed(error))
        finally:
            self._loop.close()

    async def _serve_all(self) -> None:
        task = asyncio.current_task()
        assert task
        self._main = task
        self._started.set()
        async with asyncio.TaskGroup() as group:
            for server in self.servers:
                group.create_task(self._serve(server))
            while True:  # until the pool's `with` block ends
                await asyncio.sleep(JOIN_S)
                known = {server.url for server in self.servers}
                for joined in [Server(url) for url in self.urls() if url not in known]:
                    self.servers.append(joined)
                    group.create_task(self._serve(joined))

    async def _serve(self, server: Server) -> None:
        """Ask one server until it is dropped."""
        connection = Connection(server.url, self.request.timeout_s, self.request.concurrency)
        try:
            while not server.dropped:
                try:
                    server.served = await self._ready(connection)
                    server.epoch, server.trouble = server.epoch + 1, ""
                    await self._answer(server, server.served, connection)
                except ServerTrouble as trouble:
                    if not server.trouble:
                        self._events.put(Troubled(server, str(trouble)))
                    server.trouble = str(trouble)
                    self._wake()  # wakes the other servers, which take its remaining prompts
                    await self._pause(server)
        except ServerRefusal as refusal:
            server.dropped, server.trouble = True, str(refusal)
            self._events.put(Dropped(server, f"{server.url}: {str(refusal).removeprefix(server.url).lstrip(': ')}"))
        finally:
            await connection.close()

    async def _ready(self, connection: Connection) -> Served:
        """Ask what the server serves, and return it.

        Raises ServerTrouble while that is not the model of the request, and ServerRefusal if its context is too short.
        """
        served = await ask_what_is_served(connection)
        if self.request.model not in served.names:
            raise ServerTrouble(
                f"{connection.url} serves {', '.join(served.names) or 'no model'}, and the stage needs the weights "
                f"named {self.request.model}"
            )
        tokens = self.request.longest_prompt + self.request.sampling.max_tokens
        if served.context is not None and served.context < tokens:
            raise ServerRefusal(
                f"its context holds {served.context} tokens of prompt and response, and the recipe needs {tokens}; "
                "raise it (vLLM: --max-model-len, SGLang: --context-length)"
            )
        return served

    async def _answer(self, server: Server, served: Served, connection: Connection) -> None:
        """Have the server answer prompts until it is dropped.

        After a ServerBusy it goes on with fewer requests at a time. Raises any other ServerTrouble of a failed request
        once no other request to the server is in flight, and a ServerRefusal at once.
        """
        tasks: dict[asyncio.Task[SampledGroup], Prompt] = {}
        limit, trouble = self.request.concurrency, None
        most_unread = max(LEAST_UNREAD, UNREAD * self.request.concurrency)
        try:
            while not server.dropped:
                server.changed.clear()
                room = min(limit - len(tasks), most_unread - server.unread, self._share())
                while room > 0 and self._waiting and not trouble:
                    prompt = self._waiting.popleft()
                    tasks[asyncio.ensure_future(self._ask(prompt, served, connection))] = prompt
                    room -= 1
                server.in_flight = len(tasks)
                if trouble and not tasks:
                    raise trouble
                changed = asyncio.ensure_future(server.changed.wait())
                await asyncio.wait({*tasks, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                for task in [task for task in tasks if task.done()]:
                    try:
                        group = task.result()
                    except ServerBusy:
                        limit = max(1, limit // 2)
                        await self._pause(server)
                    except ServerTrouble as error:
                        trouble = error
                    else:
                        limit, server.pauses = min(limit + 1, self.request.concurrency), 0
                        server.unread += 1
                        del tasks[task]
                        self._events.put(Answered(server, server.epoch, group))
                        continue
                    self._waiting.appendleft(tasks.pop(task))
                    self._wake()
        finally:
            for task in tasks:
                task.cancel()
            self._waiting.extendleft(tasks.values())
            server.in_flight = 0
            self._wake()

    def _share(self) -> int:
        """Most prompts that one server may take now: an equal share of those that wait, so that at the end no server
        queues what another could answer at once."""
        usable = sum(not server.dropped and not server.trouble for server in self.servers)
        return -(-len(self._waiting) // max(1, usable))

    async def _ask(self, prompt: Prompt, served: Served, connection: Connection) -> SampledGroup:
        request = self.request
        path, body = request_of(served.dialect, request.model, prompt, request.asked.n, request.sampling)
        answer = await connection.post(path, body, request.asked.most_bytes(prompt))
        replies = read_replies(served.dialect, answer, request.model)
        return SampledGroup(prompt, responses_of(replies, prompt, request.asked))

    async def _pause(self, server: Server) -> None:
        """Wait between a fifth and the whole of a time that doubles with each pause in a row, up to LONGEST_PAUSE_S."""
        # Without the jitter, several runs that share a server would ask it again at the same moment.
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(server.pauses, 10))
        server.pauses += 1
        await asyncio.sleep(longest * self._random.uniform(0.2, 1.0))
