"""Worker processes of a user's function, started, watched, killed and replaced by the engine's leader."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.episodes.trajectory import Trajectory
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.policy import EpisodesSection, ModelSection, RolloutSection
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.rewards.calls import WorkerProcess, start_guarded
from mugrpo_megatron.samples import Prompt, Response

START_TIMEOUT_S = 600.0
"""Seconds that a process has to load the user's function or program."""
SILENT_S = 60.0
"""Seconds without a message after which a process is killed, because something blocks its event loop. On a busy machine
an event loop that is not blocked may be silent for some seconds too."""
READ_S = 0.5
"""Longest seconds for which messages of one process are read, before the engine and other processes get their turn."""
ENDING_S = 1.0
"""Seconds that a cancelled episode has to end; if it does not, its process gets no new episodes."""


@dataclass(slots=True)
class Group:
    prompt: Prompt
    responses: list[list[Response]]
    """For each episode its responses, empty while it runs. The verifier scores the first, and all get this score."""
    failed: int = 0
    """Number of episodes that failed and are not begun again."""


@dataclass(slots=True)
class Attempt:
    """One attempt of an episode, whose outcome becomes one or more responses of a group.

    A failed episode is begun again as another attempt, `episodes.RETRIES` times at most.
    """

    key: int
    group: Group
    number: int
    """Index of the episode in its group."""
    retries: int = 0
    alone: bool = False
    """Whether the episode runs in a process of its own, because a process that ran it beside other episodes died: if
    this process dies too, the episode is the cause."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """The episode's responses so far; the model's latest answer is part of the last response."""
    asked: int = 0
    """Number of requests that it has made to the engine."""
    in_engine: int = 0
    """Number of its requests that the engine works on."""
    calls: int = 0
    """Number of tool calls in a program's chats."""
    limit: str = ""
    """Recipe key of the limit that has ended a program's session; the program may still write its result."""
    start: float = field(default_factory=time.monotonic)
    answered_at: float = field(default_factory=time.monotonic)
    """Monotonic time at which it last got an answer of the model."""
    waited_s: float = 0.0
    """Seconds spent waiting for the user's function, tools included."""


@dataclass(slots=True)
class EpisodeProcess:
    worker: WorkerProcess
    last_message: float = field(default_factory=time.monotonic)
    ready: bool = False
    episodes: dict[int, Attempt] = field(default_factory=dict)
    cancelled: dict[int, float] = field(default_factory=dict)
    """Keys of cancelled episodes that have not ended -> the monotonic time by which they have to."""
    retiring: bool = False
    outbox: queue.SimpleQueue[bytes] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        # A thread writes, because both sides send at any time: if each waited until the other reads, neither would go
        # on.
        threading.Thread(target=self._write, daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message and return at once; a dead process is noticed when the next message from it is read."""
        self.outbox.put(json.dumps(message).encode())

    def _write(self) -> None:
        with suppress(OSError):  # the worker is dead, or has not read for so long that it is about to be killed
            while text := self.outbox.get():
                self.worker.send(text)

    def kill(self) -> None:
        """End the process and everything that it has started."""
        self.outbox.put(b"")
        self.worker.kill()


class Asked(NamedTuple):
    """A request that the engine works on."""

    attempt: Attempt
    trajectory: Trajectory
    message: dict[str, Any]
    """The request, as the episode's process sent it."""
    ids: list[int]


class Pool:
    """Worker processes: at most `limit`, not counting those that get no new episodes (`retiring`) and those that run a
    single episode (`Attempt.alone`)."""

    def __init__(
        self, options: Mapping[str, Any], section: EpisodesSection, limit: int, most_episodes: float = math.inf
    ) -> None:
        """`options` say what the processes run; at most `most_episodes` episodes run at a time."""
        self._options = {**options, "memory_mb": section.memory_mb}
        self._section, self._limit, self._most_episodes = section, limit, most_episodes
        self._silent_s = min(SILENT_S, section.seconds)
        self.processes: list[EpisodeProcess] = []
        self.waiting: deque[Attempt] = deque()
        """Episodes that no process has yet."""

    def close(self) -> None:
        """End every process and all that it has started."""
        for process in self.processes:
            process.worker.end()
        for process in self.processes:
            process.kill()
        self.processes.clear()

    def place(self, start: Any) -> None:
        """Assign waiting episodes to processes; `start` makes an episode's first message."""
        for _ in range(len(self.waiting)):
            episode = self.waiting.popleft()
            process = self._process_for(episode)
            if process is None:
                self.waiting.append(episode)
                continue
            process.episodes[episode.key] = episode
            episode.start = episode.answered_at = time.monotonic()
            process.send(start(episode))

    def _process_for(self, episode: Attempt) -> EpisodeProcess | None:
        if sum(len(process.episodes) for process in self.processes) >= self._most_episodes:
            return None
        open_ = [process for process in self.processes if not process.retiring]
        shared = [process for process in open_ if not any(attempt.alone for attempt in process.episodes.values())]
        if episode.alone:
            idle = [process for process in open_ if process.ready and not process.episodes]
            if not idle and len(open_) <= self._limit:
                self._start()
            return idle[0] if idle else None
        if len(shared) < self._limit:
            self._start()
            shared.append(self.processes[-1])
        ready = [process for process in shared if process.ready]
        return min(ready, key=lambda process: len(process.episodes)) if ready else None

    def _start(self) -> None:
        # By default glibc reserves 64 MB of address space for each thread, which would use up episodes.memory_mb.
        environment = {"MALLOC_ARENA_MAX": "2"}
        worker = start_guarded("mugrpo_megatron.extras.episodes.episode_worker", self._options, SILENT_S, environment)
        self.processes.append(EpisodeProcess(worker))

    @property
    def connections(self) -> list[Any]:
        return [process.worker.connection for process in self.processes]

    def messages(self) -> Iterator[tuple[EpisodeProcess, dict[str, Any]]]:
        """Yield the processes' messages about episodes, and `died` for a process that died or sent what cannot be read.

        Raises UserError when the function cannot be loaded.
        """
        for process in list(self.processes):
            begin = time.monotonic()
            try:
                # Limited in time: a process that sends without end would keep the engine's answers waiting.
                while process.worker.connection.poll() and time.monotonic() - begin < READ_S:
                    message = process.worker.receive()
                    process.last_message = time.monotonic()
                    if "refused" in message:
                        raise UserError(message["refused"])
                    if "ready" in message:
                        process.ready = True
                    elif "ended" in message:
                        process.cancelled.pop(message["ended"], None)
                        process.retiring |= message["open"] > 0
                    elif "alive" not in message:
                        process.retiring |= bool(message.get("failed") is not None and message["open"])
                        yield process, message
            except (EOFError, OSError):
                if not process.ready:
                    raise UserError(
                        f"a process of {self._options['key']} died while it started ({process.worker.exit_status()}); "
                        "import its module by itself to see whether it exits, or raise episodes.memory_mb"
                    ) from None
                yield process, {"died": f"its process died ({process.worker.exit_status()})"}
            except (ValueError, RecursionError) as error:
                yield process, {"died": f"a message of its process cannot be read ({error})"}

    def late(self, now: float) -> Iterator[tuple[EpisodeProcess, Attempt | None, str]]:
        """Yield what has taken too long: process, episode (None if it is the whole process), and a phrase that says so.

        Processes that get no new episodes and have none left are killed here.
        """
        for process in list(self.processes):
            silent = self._silent_s if process.ready else START_TIMEOUT_S
            if now - process.last_message > silent and (process.episodes or not process.ready):
                blocked = f"it blocked its process for {silent:g} s: await, or make its tools plain functions"
                unloaded = f"it took more than {silent:g} s to load; import its module by itself to see why"
                yield process, None, blocked if process.ready else unloaded
                continue
            for episode in list(process.episodes.values()):
                if now - episode.start > self._section.seconds:
                    yield process, episode, f"it took longer than {self._section.seconds:g} s"
            process.retiring |= any(now > until for until in process.cancelled.values())
            if process.retiring and not process.episodes:
                self.discard(process)

    def cancel(self, process: EpisodeProcess, episode: Attempt) -> None:
        """Tell a process to end an episode; if it does not within ENDING_S, it gets no new episodes."""
        process.episodes.pop(episode.key, None)
        process.cancelled[episode.key] = time.monotonic() + ENDING_S
        process.send({"cancel": episode.key})

    def discard(self, process: EpisodeProcess) -> list[Attempt]:
        """Kill a process; returns its episodes."""
        self.processes.remove(process)
        process.kill()
        return list(process.episodes.values())


def worker_options(recipe: Recipe, directory: str) -> dict[str, Any]:
    """Options of a worker: the recipe's function or program, slime's `args`, the names of secrets that programs get,
    and the directory of the programs' files."""
    agent = recipe.rollout.agent
    return {
        "key": "rollout.agent" if agent else "rollout.function",
        "name": agent or recipe.rollout.function,
        "args": slime_args(recipe.model, recipe.data, recipe.rollout),
        "directory": directory,
        "secrets": recipe.episodes.secrets,
    }


def slime_args(model: ModelSection, data: DataSection, rollout: RolloutSection) -> dict[str, Any]:
    """The attributes of the object `args` that slime passes to a function."""
    return {
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 0,
        "hf_checkpoint": str(model.directory),
        "partial_rollout": False,
        "n_samples_per_prompt": rollout.responses_per_prompt,
        "rollout_temperature": rollout.temperature,
        "rollout_top_p": rollout.top_p,
        "rollout_max_response_len": rollout.max_response_tokens,
        "rollout_max_prompt_len": data.max_prompt_tokens,
        "rollout_max_context_len": data.max_prompt_tokens + rollout.max_response_tokens,
    }
