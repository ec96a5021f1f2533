"""One verifier process, seen from its parent: start, send, receive, kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.guard import END

ALARM_SHARE = 0.125
"""Processor time, as a share of the wall-clock limit, after which a worker gives up the comparison and goes on."""
DEATH_SECONDS = 10.0
"""Killed processes are waited for this long; one that hangs in the kernel must not hang the run."""
_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import mugrpo_megatron; del sys.path[0]; "
    "from mugrpo_megatron.rewards.guard import main; main()"
)
"""Finds this package where the parent has found it, and everything else without the current directory (`-P`)."""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker and the guard around it; killed and reaped, with all that it has started, in one call."""

    process: subprocess.Popen[bytes]
    """The guard; it ends when the worker does, with the worker's exit code."""
    connection: Connection

    def send(self, message: bytes) -> None:
        """Raises OSError when the worker is dead, or stopped and not reading."""
        self.connection.send_bytes(message)

    def receive(self) -> Any:
        """One message. Raises EOFError or OSError when the worker is dead, or stopped in the middle of a message."""
        return json.loads(self.connection.recv_bytes())

    def end(self) -> None:
        """Ask the guard to kill the worker and all that it has started, and return at once."""
        self.process.send_signal(END)

    def kill(self) -> None:
        """`end`, and wait until they are gone, at most DEATH_SECONDS."""
        self.end()
        try:
            self.process.wait(DEATH_SECONDS)
        except subprocess.TimeoutExpired:  # the guard waits for a process that hangs in the kernel, or is stopped
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()

    def ending(self) -> str:
        """How a worker that has closed its connection ended: `exit code 3`, `SIGKILL`."""
        try:
            code = self.process.wait(DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            return "without exiting"
        return signal.Signals(code - 128).name if code > 128 else f"exit code {code}"


def start_worker(section: RewardSection, key: str) -> WorkerProcess:
    """Start a worker of `section.function`, which the recipe has at `key`, and its guard.

    No fork of a process with threads, no second import of its main module.
    """
    ours, theirs = socket.socketpair()
    limit = struct.pack("ll", int(section.timeout_s) + 1, 0)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    options = {
        "key": key,
        "function": section.function,
        "policy": section.policy,
        "memory_mb": section.worker_memory_mb,
        "timeout_s": section.timeout_s,
        "alarm_s": section.timeout_s * ALARM_SHARE,
        "code": {
            "mode": section.code_sandbox,
            "share": section.code_reward == "share",
            "test_s": section.code_test_s,
            "memory_mb": section.code_memory_mb,
            "tests": section.code_tests,
        },
        "format_pattern": section.format_pattern if section.format_weight else None,
    }
    root = str(Path(__file__).parents[2])
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, root, str(os.getpid()), str(theirs.fileno()), json.dumps(options)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return WorkerProcess(process, Connection(ours.detach()))
