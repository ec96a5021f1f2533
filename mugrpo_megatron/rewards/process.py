"""One verifier process, seen from its parent: start, send, receive, kill."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mugrpo_megatron.recipe.scoring import RewardSection

ALARM_SHARE = 0.125
"""Processor time, as a share of the wall-clock limit, after which a worker gives up the comparison and goes on."""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A child that runs rewards/worker.py; killed and reaped in one call."""

    process: subprocess.Popen[bytes]
    connection: Connection

    def send(self, message: Any) -> None:
        """Raises OSError when the child is dead, or stopped and not reading."""
        self.connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> Any:
        """One message. Raises EOFError or OSError when the child is dead, or stopped in the middle of a message."""
        return json.loads(self.connection.recv_bytes())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


def start_worker(section: RewardSection) -> WorkerProcess:
    """Start a worker with `python -m`: no fork of a process with threads, no second import of its main module."""
    ours, theirs = socket.socketpair()
    limit = struct.pack("ll", int(section.timeout_s) + 1, 0)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    options = {
        "function": section.function,
        "policy": section.policy,
        "memory_mb": section.worker_memory_mb,
        "alarm_s": section.timeout_s * ALARM_SHARE,
    }
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "mugrpo_megatron.rewards.worker", str(theirs.fileno()), json.dumps(options)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    return WorkerProcess(process, Connection(ours.detach()))
