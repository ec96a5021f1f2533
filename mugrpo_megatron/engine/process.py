"""The life of an engine's host process, seen from the learner rank that started it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from mugrpo_megatron.engine.wire import Message
from mugrpo_megatron.errors import EngineFailure

LOG_TAIL_LINES = 15
DEATH_SECONDS = 10.0
"""Killed processes are waited for this long; one that hangs in the kernel must not hang the run."""


class HostProcess:
    """A running host and the socket to it.

    Every failure kills its whole process group before EngineFailure is raised, so nothing is left behind. The kernel
    kills it as well when the thread that made it ends: make it in one that outlives it.
    """

    def __init__(self, arguments: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        """Start it on `sglang.Engine(**arguments)`, output appended to `log`; returns before anything is loaded."""
        self._log = log
        self._scratch = Path(tempfile.mkdtemp(prefix="mugrpo-engine-"))
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mugrpo_megatron.engine.host", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment | _places(self._scratch),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self.send(("start", arguments))

    @property
    def alive(self) -> bool:
        """Whether the process exists; says nothing about whether it answers."""
        return self._process.returncode is None and self._process.poll() is None

    def send(self, message: Message) -> None:
        """Send a message; EngineFailure when the process is gone."""
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._gone(message[0]) from None

    def receive(self, timeout_s: float, doing: str) -> Message:
        """The next message; EngineFailure when the process is gone, reports an error, or is silent for `timeout_s`."""
        try:
            if not self._connection.poll(timeout_s):
                states = "; ".join(_group_states(self._process.pid))
                raise self._failed(f"the engine was silent for {timeout_s:g} s during {doing}; its processes: {states}")
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._gone(doing) from None
        if kind == "error":
            raise self._failed(f"the engine failed during {doing}: {value}")
        return kind, value

    def end(self, patience_s: float = 0.0) -> None:
        """Kill the process group, after `patience_s` for it to leave by itself, and remove what it left on disk.

        Returns once the group is gone: only then is its memory free.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with suppress(ProcessLookupError):  # raised when no process of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + DEATH_SECONDS
        while any(_group_states(self._process.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._connection.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _gone(self, doing: str) -> EngineFailure:
        # Its end of the socket is closed, so it is ending; what it ends with is the cause.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        how = "without exiting" if code is None else signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return self._failed(f"the engine's host process is gone ({how}) during {doing}")

    def _failed(self, cause: str) -> EngineFailure:
        self.end()
        tail = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return EngineFailure("\n".join([cause, f"end of {self._log}:", *tail]))


def _places(scratch: Path) -> dict[str, str]:
    """Where SGLang puts its sockets: files that can be removed when it is killed, and no port beyond loopback.

    Without the override torch's rendezvous listens on every interface.
    """
    return {"TMPDIR": str(scratch), "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous"}


def _group_states(group: int) -> Iterator[str]:
    """`name (pid) state` of every process in a process group that has not ended."""
    for process in psutil.process_iter(["name", "status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                yield f"{process.info['name']} ({process.pid}) {process.info['status']}"
