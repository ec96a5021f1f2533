"""The engine's own process.

    python -m mugrpo_megatron.engine.host SOCKET_FD PARENT_PID cpu|cuda SCRATCH

It imports SGLang before it is told what to load. Its main thread then waits for a command, carries it out with SGLang's
public calls, answers, and waits again. While it generates, SGLang's event loop runs and reads the socket as one more
event source, so prompts arrive and groups leave without a pause. It leads a process group of its own. A guard kills the
whole group when this process ends, for any reason, and this process ends with its parent: nothing outlives a killed
learner.
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
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

import numpy as np

from mugrpo_megatron.engine import sglang_compat
from mugrpo_megatron.engine.engine_group import EngineGroup
from mugrpo_megatron.engine.process import SHARED_MEMORY, Channel
from mugrpo_megatron.engine.wire import FINISH_REASONS, Message, Request, Sampling, answer, pack, pieces, request, seeds
from mugrpo_megatron.files.tensors import TensorChecksums


def log_to(log: Path) -> None:
    """Append this process's output to `log`, first what has gone to the file that it was started with."""
    with log.open("ab", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        file.write(os.pread(1, os.fstat(1).st_size, 0))
        os.ftruncate(1, 0)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())


def stay(connection: Channel) -> None:
    """Where the engine's leader is on another node: wait until one of SGLang's processes here ends, or the client.

    They answer to the leader's over SGLang's process group. SGLang watches them on the leader's node alone.
    """
    schedulers = multiprocessing.active_children()
    connection.send(("ready", None))
    ended = wait([connection.fileno(), *(scheduler.sentinel for scheduler in schedulers)])
    for scheduler in schedulers:
        if scheduler.sentinel in ended:
            scheduler.join()
            raise RuntimeError(f"SGLang's process {scheduler.pid} ended with exit code {scheduler.exitcode}")


if __name__ in ("__main__", "__mp_main__"):  # the latter is this module in a scheduler that SGLang spawns, on CUDA
    # SGLang's dumper of tensors imports Megatron where it finds it: seconds, and memory that no engine needs.
    sys.modules["megatron"] = None  # type: ignore[assignment]  # an import raises ImportError, which the dumper expects

PR_SET_PDEATHSIG = 1
GATHER_SECONDS = 0.02
"""Finished groups are sent together, at most this long after the first of them."""
PROGRESS_SECONDS = 5.0
"""While tokens come, the client hears of them this often, so that it can tell long responses from a hung engine."""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; exit if the parent has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this engine is gone")


def start_guard(scratch: str) -> IO[bytes]:
    """A shell that waits for this process to end, then removes the folder `scratch` and kills its process group.

    SGLang's children ask to die with this process too, but only seconds into their start; the guard has no such gap.
    The guard is in the group itself, so it cannot kill a reused process id. It is not a child of this process, because
    SGLang kills all children when it ends by itself. It acts when every copy of the returned file is closed.
    """
    act = (
        'read -r _ <&3; [ -f "$1/$2" ] && while read -r name; do rm -f -- "$name"; done <"$1/$2"; '
        'rm -rf -- "$1"; kill -KILL 0'
    )
    script = f'exec 3<&0; {{ trap "" INT TERM QUIT; {act}; }} &'  # without 3, the shell would give it /dev/null
    command = ["/bin/sh", "-c", script, "sh", scratch, SHARED_MEMORY]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE)
    shell.wait()
    assert shell.stdin
    return shell.stdin


class Generation:
    """One generate command: every prompt is a task, and finished groups are sent together."""

    def __init__(self, engines: EngineGroup, connection: Channel, sampling: Sampling, version: int) -> None:
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
        self._gathering = asyncio.Event()
        """Set while finished groups wait to be sent."""
        self._in_flight = 0
        self._tokens = 0
        """Of finished requests."""
        self._closing = False
        # Two threads for the blocking socket: a client that is busy scoring must not block the event loop or the
        # reading of prompts. Daemons, so that a dying host does not wait for them.
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    async def run(self) -> None:
        """Answer prompts until the client closes the command; abort what is in flight then."""
        reader = threading.Thread(target=self._read, args=[asyncio.get_running_loop()], daemon=True)
        writer = threading.Thread(target=self._write, daemon=True)
        reader.start()
        writer.start()
        async with asyncio.TaskGroup() as meanwhile:  # the first request or message that raises ends the command
            messages = [meanwhile.create_task(self._report()), meanwhile.create_task(self._send_gathered())]
            async with asyncio.TaskGroup() as tasks:
                while (message := await self._inbox.get())[0] == "prompts":
                    for work in message[1]:
                        self._in_flight += 1
                        tasks.create_task(self._answer(work))
                self._closing = True
                if self._in_flight:
                    self._engines.abort()
            for task in messages:
                task.cancel()
        self._flush()  # what came with the last of them
        self._outbox.put(None)
        writer.join()

    async def _answer(self, work: Request) -> None:
        if self._closing:  # before it has begun: SGLang aborts what it knows of
            self._in_flight -= 1
            return
        outputs = await (self._score(work) if work.logprob_tokens else self._sample(work))
        self._in_flight -= 1
        self._tokens += sum(len(output["output_ids"]) for output in outputs)
        # An aborted request ends with reason `abort`; the client does not wait for its group.
        if all(output["meta_info"]["finish_reason"]["type"] in FINISH_REASONS for output in outputs):
            self._finished.append((work.key, outputs))
            self._gathering.set()
        if not self._in_flight:
            self._flush()

    async def _sample(self, work: Request) -> list[dict[str, Any]]:
        # n copies of the prompt, not n samples of one: SGLang would run the prompt again to fill its prefix cache.
        return await self._engines.generate(
            input_ids=[work.ids] * work.n,
            sampling_params=self._parameters_of(work),
            return_logprob=True,
            return_routed_experts=self._sampling.routed is not None,
            top_logprobs_num=self._sampling.top_k
            if self._sampling.support_ids and not self._sampling.sampling_masks
            else 0,
            masked=self._sampling.sampling_masks,
        )

    async def _score(self, work: Request) -> list[dict[str, Any]]:
        """The response at the end of `work.ids`, as if it had been sampled."""
        first, parts, reason = len(work.ids) - work.logprob_tokens, [], {"type": "length"}
        for piece in pieces(len(work.ids), work.logprob_tokens, work.support_ids):
            (output,) = await self._engines.generate(**request(work.ids, piece))
            if output["meta_info"]["finish_reason"]["type"] not in FINISH_REASONS:  # aborted
                return [output]
            support_ids = (
                None if work.support_ids is None else work.support_ids[piece.start - first : piece.end - first]
            )
            parts.append(answer(output, piece, support_ids))
        logprobs = [(value,) for value in np.concatenate(parts).tolist()]
        meta = {"output_token_logprobs": logprobs, "finish_reason": reason}
        return [{"output_ids": work.ids[first:], "meta_info": meta}]

    def _parameters_of(self, work: Request) -> dict[str, Any] | list[dict[str, Any]]:
        """The parameters of all responses, or of each its own."""
        parameters = self._parameters
        if work.max_tokens is not None:
            parameters = {**parameters, "max_new_tokens": work.max_tokens, "stop": [*self._sampling.stop, *work.stop]}
        if self._sampling.stream is None:
            return parameters
        own = seeds(self._sampling.stream, self._version, work)
        return [{**parameters, "sampling_seed": seed} for seed in own]

    async def _report(self) -> None:
        """Tell the client whenever there are more tokens than before; SGLang reports unfinished requests in steps."""
        before = 0
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            tokens = self._tokens + sum(len(state.output_ids) for state in self._engines.states.values())
            if tokens != before:
                self._outbox.put(("progress", await self._engines.load(tokens)))
            before = tokens

    async def _send_gathered(self) -> None:
        """Send finished groups, a moment after the first of them."""
        while True:
            await self._gathering.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._gathering.clear()
            self._flush()

    def _flush(self) -> None:
        if self._finished:
            self._outbox.put(("groups", pack(self._finished, self._version, self._sampling)))
            self._finished = []

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        kind = "prompts"
        while kind == "prompts":
            kind, value = self._connection.receive()
            loop.call_soon_threadsafe(self._inbox.put_nowait, (kind, value))

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            self._connection.send(message)


class Host:
    """Executes the client's commands, one after another."""

    def __init__(self, engines: EngineGroup, connection: Channel) -> None:
        self._engines = engines
        self._connection = connection
        self._version = 0

    def serve(self) -> None:
        """Answer commands until `stop`."""
        while (message := self._connection.receive())[0] != "stop":
            kind, value = message
            if kind == "generate":
                self._engines.run(Generation(self._engines, self._connection, value, self._version).run())
                self._connection.send(("done", None))
            else:
                name, arguments = value
                self._connection.send(("result", getattr(self, name)(*arguments)))

    def load_bucket(self, serialized: list[bytes]) -> None:
        self._engines.update_weights(serialized)

    def set_version(self, version: int) -> None:
        self._engines.end_update()
        # Keys and values in the prefix cache belong to the old weights.
        self._engines.flush_cache()
        self._version = version

    def sleep(self, tags: list[str]) -> None:
        self._engines.flush_cache()
        self._engines.release(tags)

    def wake(self, tags: list[str]) -> None:
        self._engines.resume(tags)

    def checksums(self) -> list[TensorChecksums]:
        return self._engines.checksums()


def first_cause(error: Exception) -> Exception:
    """The error itself, or the first of the group that a generation's tasks raise."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> None:
    descriptor, parent, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    # First: it cleans up even if the parent is gone already. Not what `tempfile` names: that is /tmp, or the current
    # directory, where the disk of the scratch folder is full.
    guard = start_guard(sys.argv[4])
    die_with_parent(parent)
    connection = Channel(socket.socket(fileno=descriptor))
    # Forked children must not keep these open: client and guard see by their closing that this process has ended.
    os.register_at_fork(after_in_child=connection.close)
    os.register_at_fork(after_in_child=guard.close)
    try:
        make = sglang_compat.engine_type(device)
        kind, (arguments, log) = connection.receive()
        assert kind == "start"
        log_to(Path(log))
        try:
            engines = EngineGroup([make(**one) for one in arguments])
        except (
            AssertionError,
            TypeError,
            ValueError,
        ) as error:  # what SGLang raises for arguments that it does not take
            traceback.print_exc()
            connection.send(("refused", f"{type(error).__name__}: {error}"))
            sys.exit(1)
        if arguments[0].get("node_rank"):
            stay(connection)
            return
        engines.freeze_gc()
        connection.send(("ready", None))
        Host(engines, connection).serve()
    except Exception as error:
        traceback.print_exc()  # to the log, before the client hears of it, because that ends this process
        cause = first_cause(error)
        connection.send(("error", f"{type(cause).__name__}: {cause}"))
        sys.exit(1)


if __name__ == "__main__":
    main()
