"""The life of an engine's host process, seen from the learner rank that started it."""

from __future__ import annotations

import os
import pickle
import re
import select
import shutil
import signal
import site
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

import mugrpo_megatron
from mugrpo_megatron.engine.wire import Message
from mugrpo_megatron.errors import EngineFailure, EngineStopped, UserError

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
            rest = memoryview(HEADER.pack(len(content)) + content)
            while rest:
                try:
                    rest = rest[self._socket.send(rest[:CHUNK]) :]
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
        rest = memoryview(content)
        while rest:
            try:
                count = self._socket.recv_into(rest[:CHUNK])
            except BlockingIOError:
                self._wait(select.POLLIN, silence_s, while_waiting)
                continue
            if count == 0:
                raise EOFError
            rest = rest[count:]
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


def no_peer_failure() -> str:
    """Why a process of the engine on another node has ended, where there is none."""
    return ""


LOG_TAIL_LINES = 15
SHARED_MEMORY = "shared-memory"
"""File in the scratch folder: a line for each file in /dev/shm that SGLang made and does not remove when killed."""
STARTING = "start"
"""What the engine does until its model is loaded: the time in which SGLang makes these files."""
PROBE_BYTES = 1 << 16
"""What has to fit into the scratch folder: sockets and a few short texts."""
DEATH_SECONDS = 10.0
"""Killed processes are waited for this long; one that hangs in the kernel must not hang the run."""


class EngineRefused(EngineFailure):
    """SGLang raised an error for the arguments that it was to start with; `reason` is that error in one line."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = " ".join(reason.split())


class HostProcess:
    """A running host and the socket to it.

    Every failure kills its whole process group before EngineFailure is raised, so nothing is left behind. The kernel
    kills it as well when the thread that made it ends: make it in one that outlives it.
    """

    def __init__(self, environment: dict[str, str], cuda: bool, alone: bool = True) -> None:
        """Start it in `environment`; returns at once. It imports SGLang, then waits for `load`.

        Raises UserError when there is no room for its temporary files.

        alone: the engine has no other node.
        """
        self.cuda = cuda
        self._broken: Callable[[], str] = no_peer_failure
        self._scratch = _scratch_folder()
        self._log, self._cancelled = self._scratch / "engine.log", _never
        # No name on disk, so that what it prints before it has a log outlives it, whatever ends it.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in `end`
        ours, theirs = socket.socketpair()
        # -P: a file in the current directory that is named like a package is not imported.
        command, device = [sys.executable, "-P", "-m", "mugrpo_megatron.engine.host"], "cuda" if cuda else "cpu"
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), device, str(self._scratch)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=_same_package(environment) | _places(self._scratch, alone),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._channel = Channel(ours)
        self._ended = False

    def load(
        self,
        arguments: Sequence[dict[str, Any]],
        log: Path,
        cancelled: Callable[[], bool],
        broken: Callable[[], str] = no_peer_failure,
    ) -> None:
        """Have it make an `sglang.Engine` of each of `arguments`, and append their output to `log`; returns at once.

        `cancelled` is called repeatedly during every wait; once it returns True, the wait ends with EngineStopped.
        So is `broken`; once it says why the engine's process on another node has ended, the wait ends with
        EngineFailure.
        """
        self._log, self._cancelled, self._broken = log, cancelled, broken
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        with suppress(OSError):  # it is gone; the next message that is waited for says why
            self._channel.send(("start", (list(arguments), str(log))))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process exists; says nothing about whether it answers."""
        return self._process.returncode is None and self._process.poll() is None

    def send(self, message: Message, timeout_s: float, doing: str) -> None:
        """Send a message; EngineFailure when the process is gone, or reads nothing for `timeout_s`."""
        try:
            self._channel.send(message, timeout_s, lambda: self._while_waiting(doing))
        except TimeoutError:
            raise self._hung("read nothing", timeout_s, doing) from None
        except OSError:
            raise self._gone(doing) from None

    def receive(self, timeout_s: float, doing: str) -> Message:
        """The next message; EngineFailure when the process is gone, reports an error, or is silent for `timeout_s`."""
        try:
            kind, value = self._channel.receive(timeout_s, lambda: self._while_waiting(doing))
        except TimeoutError:
            raise self._hung("was silent", timeout_s, doing) from None
        except (EOFError, OSError):
            raise self._gone(doing) from None
        if doing == STARTING:
            self._note_shared_memory()
        if kind in ("error", "refused"):
            failure = self._failed(f"the engine failed during {doing}: {value}")
            raise failure if kind == "error" else EngineRefused(str(failure), value)
        return kind, value

    def wait(self, others: Sequence[Any], timeout_s: float, doing: str) -> bool:
        """Whether a message has come; False once one of `others` (with a `fileno`) is readable, or after `timeout_s`.

        Waits at most SLICE_S.
        """
        own = self._channel.fileno()
        ready = wait([own, *others], min(timeout_s, SLICE_S))
        self._while_waiting(doing)
        return own in ready

    def _while_waiting(self, doing: str) -> None:
        if doing == STARTING:
            self._note_shared_memory()
        if self._cancelled():
            self.end()
            raise EngineStopped(f"the run was asked to stop during the engine's {doing}; the engine was ended")
        if cause := self._broken():
            raise self._failed(f"a process of the engine ended during {doing}, {cause}")

    def _note_shared_memory(self) -> None:
        """Write down what SGLang has in /dev/shm, for this process and the engine's guard."""
        names = "".join(f"{name}\n" for name in sorted(_shared_memory(self._process.pid)))
        if names:
            with suppress(OSError):  # the disk is full by now: they stay in /dev/shm if the engine is killed
                (self._scratch / SHARED_MEMORY).write_text(names, encoding="utf-8")

    def end(self, patience_s: float = 0.0) -> None:
        """Kill the process group, after `patience_s` for it to leave by itself, and remove what it left on disk.

        Returns once the group is gone: only then is its memory free. Another call does nothing: the group's number may
        be that of others by then.
        """
        if self._ended:
            return
        self._ended = True
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with suppress(ProcessLookupError):  # raised when no process of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        deadline = time.monotonic() + DEATH_SECONDS
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(DEATH_SECONDS)
        while any(_group_states(self._process.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._channel.close()
        self._log_early_output()
        with suppress(FileNotFoundError):  # it failed before SGLang made any, or the guard was here first
            for name in (self._scratch / SHARED_MEMORY).read_text(encoding="utf-8").splitlines():
                Path(name).unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _log_early_output(self) -> None:
        """Append to the log what a process printed that ended before it heard of the log."""
        self._output.seek(0)
        if self._log.exists() and (output := self._output.read()):
            with self._log.open("ab") as file:
                file.write(output)
        self._output.close()

    def _hung(self, how: str, timeout_s: float, doing: str) -> EngineFailure:
        states = "; ".join(_group_states(self._process.pid))
        return self._failed(f"the engine {how} for {timeout_s:g} s during {doing}; its processes: {states}")

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


def _never() -> bool:
    return False


def _scratch_folder() -> Path:
    """A new folder for temporary files that can be written; UserError where the disk is full or none is there."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="mugrpo-engine-"))
        try:
            probe = folder / "probe"
            probe.write_bytes(bytes(PROBE_BYTES))  # a folder can be made where no file fits
            probe.unlink()
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        where = f" to {tempfile.tempdir}" if tempfile.tempdir else ""
        raise UserError(
            f"the engine's temporary files cannot be written{where} ({error.strerror}); free some space, or name "
            "another directory with the variable TMPDIR"
        ) from None
    return folder


def _same_package(environment: dict[str, str]) -> dict[str, str]:
    """The environment in which the host imports the same package, which need not be the installed one."""
    root = str(Path(mugrpo_megatron.__file__).parents[1])
    if root in site.getsitepackages():
        return environment
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))}


def _places(scratch: Path, alone: bool) -> dict[str, str]:
    """Where SGLang puts its sockets: files that can be removed when it is killed, and no port beyond loopback.

    Without the override torch's rendezvous listens on every interface, which an engine of several nodes needs.
    """
    override = {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous"} if alone else {}
    return {"TMPDIR": str(scratch)} | override


def _group_states(group: int) -> Iterator[str]:
    """`name (pid) state` of every process in a process group that has not ended."""
    for process in psutil.process_iter(["name", "status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                yield f"{process.info['name']} ({process.pid}) {process.info['status']}"


def _shared_memory(group: int) -> set[str]:
    """The files in /dev/shm that processes of the group map and SGLang made: not the learner's weights."""
    files: set[str] = set()
    for process in psutil.pids():
        with suppress(OSError):
            if os.getpgid(process) == group:
                maps = Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace")
                files.update(re.findall(r"/dev/shm/(?:sgl_shm|sglang)_\S+", maps))
    return files
