"""The engine's own process.

    python -m mugrpo_megatron.engine.host SOCKET_FD PARENT_PID cpu|cuda SCRATCH

It imports SGLang before it receives the engine's arguments, and then executes one command after the other (the table in
wire.py). While it generates, SGLang's event loop runs in the main thread and other threads read and write the socket,
so neither waits for the other. The process leads a process group of its own. A guard kills the whole group when this
process ends, for any reason, and this process ends with its parent: nothing outlives a killed learner.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

import numpy as np

from mugrpo_megatron.engine import sglang_compat
from mugrpo_megatron.engine.engine_group import Replicas
from mugrpo_megatron.engine.process import Channel, Message
from mugrpo_megatron.engine.wire import (
    FINISH_REASONS,
    Reply,
    Request,
    Sampling,
    logprob_ranges,
    logprob_request,
    pack,
    range_logprobs,
    sampling_seeds,
)
from mugrpo_megatron.files.durable import open_nofollow
from mugrpo_megatron.files.scratch import SHARED_MEMORY

# "__mp_main__" is the name of this module in a scheduler process that SGLang spawns, on CUDA.
if __name__ in ("__main__", "__mp_main__"):
    # SGLang imports Megatron if it is installed (debug_utils/dumper.py, which catches an ImportError). That takes
    # seconds, and memory that no engine needs.
    sys.modules["megatron"] = None  # type: ignore[assignment]

PR_SET_PDEATHSIG = 1
GATHER_SECONDS = 0.02
"""The longest time that a finished group waits, so that others can be sent together with it."""
PROGRESS_SECONDS = 5.0
"""Interval of progress messages while tokens are sampled; the client knows by them that the engine does not hang."""
MOST_ANSWERS = 3
"""How often one request may be answered with missing or non-finite log-probabilities before the generation fails."""


def redirect_output(log: Path) -> None:
    """Redirect stdout and stderr to the end of the file `log`, and move there what was printed before."""
    with open_nofollow(log, "ab", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        file.write(os.pread(1, os.fstat(1).st_size, 0))
        os.ftruncate(1, 0)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())


def watch_follower_node(connection: Channel) -> None:
    """On a follower node, wait until the client or one of SGLang's processes on this node ends.

    Raises RuntimeError if it is one of SGLang's.
    """
    # Nothing else would notice the end of a process here: on a follower node SGLang's constructor returns before it
    # starts its watchdog (entrypoints/engine.py).
    schedulers = multiprocessing.active_children()
    connection.reply("ready")
    ended = wait([connection.fileno(), *(scheduler.sentinel for scheduler in schedulers)])
    for scheduler in schedulers:
        if scheduler.sentinel in ended:
            scheduler.join()
            raise RuntimeError(
                f"SGLang's process {scheduler.pid} ended with exit code {scheduler.exitcode}; the engine's log says why"
            )


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; exit if the parent has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the engine ends, because the process that started it is gone")


def start_guard(scratch: str) -> IO[bytes]:
    """Start a shell that cleans up once every copy of the returned file is closed, as when this process ends.

    It removes the shared memory that a file in `scratch` lists, and `scratch`, and kills this process group. SGLang's
    children also end with their parent (`kill_itself_when_parent_died`, utils/common.py), but only from seconds after
    their start on. The guard is in the group itself: while it lives, no other group can get this group's number, so it
    cannot kill a wrong group.
    """
    clean_up = (
        'read -r _ <&3; [ -f "$1/$2" ] && while read -r name; do rm -f -- "$name"; done <"$1/$2"; '
        'rm -rf -- "$1"; kill -KILL 0'
    )
    # When SGLang ends by itself, it kills every child of this process (`kill_process_tree`, utils/common.py). So the
    # guard is not a child, but a background job of a shell that exits. It reads descriptor 3, since the stdin of such a
    # job is /dev/null.
    script = f'exec 3<&0; {{ trap "" INT TERM QUIT; {clean_up}; }} &'
    command = ["/bin/sh", "-c", script, "sh", scratch, SHARED_MEMORY]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE)
    shell.wait()
    assert shell.stdin
    return shell.stdin


class GenerateCommand:
    """Executes a `generate` command. Each request is a task, and groups that finish at about the same time are sent
    together."""

    def __init__(self, engines: Replicas, connection: Channel, sampling: Sampling, version: int) -> None:
        self._engines = engines
        self._connection = connection
        self._version = version
        self._parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_new_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_ids),
            "top_k": sampling.top_k or -1,
            "stop": list(sampling.stop),
        }
        self._sampling = sampling
        self._finished: list[tuple[int, list[dict[str, Any]]]] = []
        self._has_finished = asyncio.Event()
        """Set while finished groups wait to be sent."""
        self._unsent: dict[int, tuple[Request, int]] = {}
        """Key of a request whose group has not been sent -> (the request, how often it was answered)."""
        self._tasks: asyncio.TaskGroup | None = None
        """Tasks of the requests; None until `run` begins."""
        self._in_flight = 0
        self._tokens = 0
        """Number of tokens of finished requests."""
        self._closing = False
        # The channel's calls block. Two threads make them, so that a busy client blocks neither the event loop nor the
        # reading of requests. They are daemons, so that a dying host does not wait for them.
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._outbox: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()

    async def run(self) -> None:
        """Answer requests until the client sends `close`, then abort those in flight and wait for their end."""
        reader = threading.Thread(target=self._read, args=[asyncio.get_running_loop()], daemon=True)
        writer = threading.Thread(target=self._write, daemon=True)
        reader.start()
        writer.start()
        async with asyncio.TaskGroup() as senders:  # the first request or message that fails ends the whole command
            messages = [senders.create_task(self._report_progress()), senders.create_task(self._send_finished())]
            async with asyncio.TaskGroup() as self._tasks:
                while (message := await self._inbox.get())[0] != "close":
                    if message[0] == "abort":
                        self._abort(message[1])
                        continue
                    for request in message[1]:
                        self._ask(request)
                self._closing = True
                if self._in_flight:
                    self._engines.abort()
            for task in messages:
                task.cancel()
        self._flush()
        self._outbox.put(None)
        writer.join()

    def _ask(self, request: Request, answers: int = 0) -> None:
        assert self._tasks is not None
        self._unsent[request.key] = request, answers
        self._in_flight += 1
        self._tasks.create_task(self._answer(request))

    def _abort(self, keys: Sequence[int]) -> None:
        """Abort requests that the client waits for no longer."""
        for key in keys:
            request, _ = self._unsent.pop(key, (None, 0))
            if request is not None:
                self._engines.abort(_names(request))

    async def _answer(self, request: Request) -> None:
        # A request that was aborted before this task began is not sent: SGLang ignores an abort of a request that it
        # has not got, and would then sample it.
        if self._closing or request.key not in self._unsent:
            self._in_flight -= 1
            return
        outputs = await (self._prompt_logprobs(request) if request.logprob_tokens else self._sample(request))
        self._in_flight -= 1
        self._tokens += sum(len(output["output_ids"]) for output in outputs)
        # An aborted request ends with reason `abort`; the client does not wait for its group.
        if all(output["meta_info"]["finish_reason"]["type"] in FINISH_REASONS for output in outputs):
            self._finished.append((request.key, outputs))
            self._has_finished.set()
        if not self._in_flight:
            self._flush()

    async def _sample(self, request: Request) -> list[dict[str, Any]]:
        # SGLang gets n copies of the prompt and not a request for n samples, for which it would first run the prompt
        # alone to fill its prefix cache (`parallel_sample_num`, managers/tokenizer_manager.py).
        return await self._engines.generate(
            input_ids=[request.ids] * request.n,
            rid=_names(request),
            sampling_params=self._sampling_params(request),
            return_logprob=True,
            return_routed_experts=self._sampling.routers is not None,
            top_logprobs_num=self._sampling.top_k
            if self._sampling.support_ids and not self._sampling.sampling_masks
            else 0,
            masked=self._sampling.sampling_masks,
        )

    async def _prompt_logprobs(self, request: Request) -> list[dict[str, Any]]:
        """Compute the log-probabilities of the last `request.logprob_tokens` of `request.ids`.

        Returns one output, like SGLang's for a response that consists of these tokens.
        """
        ids, support_ids, logprobs = request.ids, request.support_ids, []
        first = len(ids) - request.logprob_tokens
        for tokens in logprob_ranges(len(ids), request.logprob_tokens, support_ids):
            (output,) = await self._engines.generate(**logprob_request(ids, tokens))
            if output["meta_info"]["finish_reason"]["type"] not in FINISH_REASONS:  # the request was aborted
                return [output]
            rows = None if support_ids is None else support_ids[tokens.start - first : tokens.end - first]
            logprobs.append(range_logprobs(output, tokens, rows))
        entries = [(value,) for value in np.concatenate(logprobs).tolist()]
        return [
            {
                "output_ids": ids[first:],
                "meta_info": {"output_token_logprobs": entries, "finish_reason": {"type": "length"}},
            }
        ]

    def _sampling_params(self, request: Request) -> dict[str, Any] | list[dict[str, Any]]:
        """SGLang's sampling parameters: one dictionary for all responses, or one for each if responses have seeds."""
        parameters = self._parameters
        if request.max_tokens is not None:
            stop = [*self._sampling.stop, *request.stop]
            parameters = {**parameters, "max_new_tokens": request.max_tokens, "stop": stop}
        if self._sampling.stream is None:
            return parameters
        seeds = sampling_seeds(self._sampling.stream, self._version, request)
        return [{**parameters, "sampling_seed": seed} for seed in seeds]

    async def _report_progress(self) -> None:
        """Every `PROGRESS_SECONDS`, send the engines' load if tokens were sampled in the meantime."""
        before = 0
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            tokens = self._tokens + sum(len(state.output_ids) for state in self._engines.states.values())
            if tokens != before:
                self._outbox.put(("progress", await self._engines.load(tokens)))
            before = tokens

    async def _send_finished(self) -> None:
        while True:
            await self._has_finished.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._has_finished.clear()
            self._flush()

    def _flush(self) -> None:
        """Send the finished groups. A group with a missing or non-finite log-probability is asked for again instead,
        unless the command is closing."""
        finished, self._finished = self._finished, []
        packed = pack(finished, self._version, self._sampling) if finished else None
        # A stage with a log-probability that is missing or not finite could not be trained on.
        if packed and (unsound := set() if self._closing else set(packed.unsound())):
            for key in unsound:
                self._ask_again(key)
            sound = [group for group in finished if group[0] not in unsound]
            packed = pack(sound, self._version, self._sampling) if sound else None
        if packed:
            for key in packed.keys:
                self._unsent.pop(key, None)
            self._outbox.put(("groups", packed))

    def _ask_again(self, key: int) -> None:
        """Ask the engine for the group of a request once more; ValueError if it has answered `MOST_ANSWERS` times."""
        if key not in self._unsent:  # the request was aborted meanwhile
            return
        request, answers = self._unsent[key]
        if answers + 1 == MOST_ANSWERS:
            raise ValueError(
                f"{MOST_ANSWERS} times in a row a prompt of {len(request.ids)} tokens got log-probabilities that are "
                "missing or not finite, so the engine's weights or its sampler are wrong; "
                'engine.check_weights = "every" compares the weights with the learner\'s after each sync'
            )
        self._ask(request, answers + 1)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        kind = "requests"
        while kind != "close":
            kind, value = self._connection.receive()
            loop.call_soon_threadsafe(self._inbox.put_nowait, (kind, value))

    def _write(self) -> None:
        while (reply := self._outbox.get()) is not None:
            self._connection.reply(*reply)


def _names(request: Request) -> list[str]:
    """SGLang's request id (`rid`) of each response, KEY:NUMBER.

    SGLang aborts every request whose id begins with a given id. Without the colon, aborting key 1 would abort key 10.
    """
    return [f"{request.key}:{number}" for number in range(request.n)]


class Host:
    def __init__(self, engines: Replicas, connection: Channel) -> None:
        self._engines = engines
        self._connection = connection
        self._version = 0

    def serve(self) -> None:
        while (message := self._connection.receive())[0] != "stop":
            self._connection.reply(*self.execute(*message))

    def execute(self, kind: str, value: Any) -> Reply:
        """Execute one command (the table in wire.py lists them); returns the reply."""
        match kind:
            case "generate":
                self._engines.run(GenerateCommand(self._engines, self._connection, value, self._version).run())
                return "done", None
            case "load_bucket":
                self._engines.update_weights(value)
            case "set_version":
                self._engines.end_update()
                # Keys and values in the prefix cache belong to the old weights.
                self._engines.flush_cache()
                self._version = value
            case "sleep":
                self._engines.flush_cache()
                self._engines.release(value)
            case "wake":
                self._engines.resume(value)
            case "checksums":
                return "result", self._engines.checksums()
            case _:
                raise ValueError(f"unknown command {kind!r}")
        return "result", None


def first_cause(error: Exception) -> Exception:
    """The error itself or, for an exception group, the first error inside."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> None:
    descriptor, parent, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    # The guard comes first, so that it cleans up even if the parent is gone already. The scratch folder is an argument,
    # because `tempfile` would name another one if the disk of TMPDIR is full.
    guard = start_guard(sys.argv[4])
    die_with_parent(parent)
    connection = Channel(socket.socket(fileno=descriptor))
    # Forked children must close these two: client and guard learn that this process has ended when no copy is open.
    os.register_at_fork(after_in_child=connection.close)
    os.register_at_fork(after_in_child=guard.close)
    try:
        make_engine = sglang_compat.engine_type(device)
        kind, (arguments, log) = connection.receive()
        assert kind == "start"
        redirect_output(Path(log))
        try:
            engines = Replicas([make_engine(**replica) for replica in arguments])
        except (AssertionError, TypeError, ValueError) as error:  # SGLang's errors for arguments that it refuses
            traceback.print_exc()
            connection.reply("refused", f"{type(error).__name__}: {error}")
            sys.exit(1)
        if arguments[0].get("node_rank"):
            watch_follower_node(connection)
            return
        engines.freeze_gc()
        connection.reply("ready")
        Host(engines, connection).serve()
    except Exception as error:
        traceback.print_exc()  # print before sending: the client kills this process when it reads the error
        cause = first_cause(error)
        connection.reply("error", f"{type(cause).__name__}: {cause}")
        sys.exit(1)


if __name__ == "__main__":
    main()
