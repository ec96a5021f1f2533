"""Messages over a socket pair, with a time limit on every wait: for the first byte, and for each one after it."""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from mugrpo_megatron.engine.wire import Message

HEADER = struct.Struct("!Q")
"""Length of the pickled message that follows."""
CHUNK = 1 << 20
SLICE_S = 0.25
"""A wait with a limit looks this often at `while_waiting`."""


def nothing() -> None:
    """Do nothing while waiting."""


class Channel:
    """One end of a socket pair. Any thread may send, one at a time; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._sending = threading.Lock()

    def send(
        self, message: Message, silence_s: float | None = None, while_waiting: Callable[[], None] = nothing
    ) -> None:
        """Send a message; `while_waiting` is called repeatedly and may raise.

        Raises TimeoutError when the other end reads nothing for `silence_s`, OSError when it is closed. The channel
        cannot be used after either.
        """
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            left = memoryview(HEADER.pack(len(content)) + content)
            while left:
                try:
                    left = left[self._socket.send(left[:CHUNK]) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, silence_s, while_waiting)

    def receive(self, silence_s: float | None = None, while_waiting: Callable[[], None] = nothing) -> Message:
        """The next message; `while_waiting` is called repeatedly and may raise.

        Raises TimeoutError when the other end sends nothing for `silence_s`, in the middle of a message too. Raises
        EOFError or OSError when it is closed.
        """
        (size,) = HEADER.unpack(self._read(HEADER.size, silence_s, while_waiting))
        message: Message = pickle.loads(self._read(size, silence_s, while_waiting))
        return message

    def fileno(self) -> int:
        """Readable when a message has come, or the other end is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the other one sees the end of the file."""
        self._socket.close()

    def _read(self, size: int, silence_s: float | None, while_waiting: Callable[[], None]) -> bytearray:
        content = bytearray(size)
        left = memoryview(content)
        while left:
            try:
                count = self._socket.recv_into(left[:CHUNK])
            except BlockingIOError:
                self._wait(select.POLLIN, silence_s, while_waiting)
                continue
            if count == 0:
                raise EOFError
            left = left[count:]
        return content

    def _wait(self, event: int, silence_s: float | None, while_waiting: Callable[[], None]) -> None:
        """Wait until the socket is ready, or its other end is closed."""
        poll = select.poll()
        poll.register(self._socket, event)
        if silence_s is None:
            poll.poll()
            return
        deadline = time.monotonic() + silence_s
        while not poll.poll(1000 * max(0.0, min(SLICE_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise TimeoutError
            while_waiting()
