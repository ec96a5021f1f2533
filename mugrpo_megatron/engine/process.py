"""An engine's host process, as the learner rank that starts it sees it: start, messages, failures and end."""

from __future__ import annotations

import errno
import os
import pickle
import re
import select
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
from mugrpo_megatron.engine.wire import Command, ReplyKind
from mugrpo_megatron.errors import REFUSALS, EngineFailure, EngineStopped, UserError
from mugrpo_megatron.files.durable import open_nofollow
from mugrpo_megatron.files.scratch import SHARED_MEMORY, SHORT_DIRECTORIES, SOCKET_PATH, Scratch

HEADER = struct.Struct("!Q")
"""Format of a message's header: the length of the pickled message that follows."""
CHUNK = 1 << 20
SLICE_S = 0.25
"""The longest time between two calls of `while_waiting`, in seconds."""
Message = tuple[str, Any]
"""(kind, value); the kinds are listed in wire.py."""


class Channel:
    """One end of a socket pair. Any thread may send, and waits for others that do; only one thread may receive."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._sending = threading.Lock()

    def send(
        self, message: Message, silence_s: float | None = None, while_waiting: Callable[[], None] = lambda: None
    ) -> None:
        """Send a message, and call `while_waiting`, which may raise, repeatedly while the other end does not read.

        Raises TimeoutError when the other end reads nothing for `silence_s`, OSError when it is closed. After either
        the channel is unusable. Without `silence_s` the wait has no limit, and `while_waiting` is not called.
        """
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            unsent = memoryview(HEADER.pack(len(content)) + content)
            while unsent:
                try:
                    unsent = unsent[self._socket.send(unsent[:CHUNK]) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, silence_s, while_waiting)

    def reply(self, kind: ReplyKind, value: Any = None) -> None:
        """Send a message of the host to its client."""
        self.send((kind, value))

    def receive(self, silence_s: float | None = None, while_waiting: Callable[[], None] = lambda: None) -> Message:
        """Return the next message, and call `while_waiting`, which may raise, repeatedly until it has come.

        Raises TimeoutError when the other end sends nothing for `silence_s`, even within a message; EOFError or OSError
        when it is closed. Without `silence_s` the wait has no limit, and `while_waiting` is not called.
        """
        (size,) = HEADER.unpack(self._read(HEADER.size, silence_s, while_waiting))
        message: Message = pickle.loads(self._read(size, silence_s, while_waiting))
        return message

    def fileno(self) -> int:
        """The file descriptor, which is readable when a message has arrived or the other end is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int, silence_s: float | None, while_waiting: Callable[[], None]) -> bytearray:
        content = bytearray(size)
        unread = memoryview(content)
        while unread:
            try:
                count = self._socket.recv_into(unread[:CHUNK])
            except BlockingIOError:
                self._wait(select.POLLIN, silence_s, while_waiting)
                continue
            if count == 0:
                raise EOFError
            unread = unread[count:]
        return content

    def _wait(self, event: int, silence_s: float | None, while_waiting: Callable[[], None]) -> None:
        """Wait until the socket is ready for `event` or its other end is closed.

        Raises TimeoutError after `silence_s`. If it is None, waits for ever and does not call `while_waiting`.
        """
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


LOG_TAIL_LINES = 15
STARTING = "start"
"""Name of the operation that ends when the engine has loaded its model. In it SGLang makes its files in /dev/shm."""
PROBE_BYTES = 1 << 16
"""Free space that the scratch folder needs: sockets and a few short texts."""
LONGEST_SOCKET = len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""Characters of the longest path that a socket has below the scratch folder: one of multiprocessing. SGLang's sockets
have shorter ones."""
DEATH_SECONDS = 10.0
"""The longest wait until killed processes are gone: one that hangs in the kernel must not stop the run."""


class ArgumentsRefused(EngineFailure):
    """Raised when SGLang refuses its arguments; `reason` is SGLang's error in one line."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = " ".join(reason.split())


class HostProcess:
    """An engine's host process and the socket to it.

    After every failure the process's whole group is killed before EngineFailure is raised. Create the object in a
    thread that outlives the process: the kernel kills the process when that *thread* ends (PR_SET_PDEATHSIG in
    prctl(2)).
    """

    def __init__(self, environment: dict[str, str], cuda: bool, single_node: bool = True) -> None:
        """Start the process in `environment` and return at once; it imports SGLang, then waits for `load`.

        Raises UserError when its temporary files cannot be written.
        """
        self.cuda = cuda
        self._peer_failure: Callable[[], str] = lambda: ""
        self._folder = _scratch_folder()
        self._scratch = self._folder.path
        self._log = self._scratch / "engine.log"
        self._cancelled: Callable[[], bool] = lambda: False
        # This unlinked file keeps what the process prints before it has a log, however the process ends.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in `end`
        ours, theirs = socket.socketpair()
        # -P keeps the current directory out of the import path: a file there may have the name of a package.
        command, device = [sys.executable, "-P", "-m", "mugrpo_megatron.engine.host"], "cuda" if cuda else "cpu"
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), device, str(self._scratch)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=_with_this_package(environment) | _local_paths(self._scratch, single_node),
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
        peer_failure: Callable[[], str] = lambda: "",
    ) -> None:
        """Tell the process to start an `sglang.Engine` from each of `arguments`, with its output in `log`.

        Returns at once. From now on every wait for the process calls `cancelled` and `peer_failure` repeatedly. The
        wait ends with EngineStopped once `cancelled` returns True, and with EngineFailure once `peer_failure` returns
        the failure of another node.
        """
        self._log, self._cancelled, self._peer_failure = log, cancelled, peer_failure
        log.parent.mkdir(parents=True, exist_ok=True)
        open_nofollow(log, "ab").close()
        with suppress(OSError):  # the process is gone; the next `receive` reports the cause
            self._channel.send(("start", (list(arguments), str(log))))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process exists; it may hang."""
        return self._process.returncode is None and self._process.poll() is None

    def send(self, message: Command, timeout_s: float, operation: str) -> None:
        """Send a command; EngineFailure when the process is gone, or reads nothing for `timeout_s`."""
        try:
            self._channel.send(message, timeout_s, lambda: self._while_waiting(operation))
        except TimeoutError:
            raise self._hung("read nothing", timeout_s, operation) from None
        except OSError:
            raise self._gone(operation) from None

    def receive(self, timeout_s: float, operation: str) -> Message:
        """Return the next reply; EngineFailure when the process is gone, fails, or is silent for `timeout_s`."""
        try:
            kind, value = self._channel.receive(timeout_s, lambda: self._while_waiting(operation))
        except TimeoutError:
            raise self._hung("was silent", timeout_s, operation) from None
        except (EOFError, OSError):
            raise self._gone(operation) from None
        if operation == STARTING:
            self._note_shared_memory()
        if kind in ("error", "refused"):
            failure = self._failed(f"the engine failed during {operation}: {value}")
            raise failure if kind == "error" else ArgumentsRefused(str(failure), value)
        return kind, value

    def wait(self, others: Sequence[Any], timeout_s: float, operation: str) -> bool:
        """Wait until a message has arrived or one of `others` is readable; returns whether a message has arrived.

        The wait ends after `timeout_s`, and after `SLICE_S` at the latest.
        """
        descriptor = self._channel.fileno()
        ready = wait([descriptor, *others], min(timeout_s, SLICE_S))
        self._while_waiting(operation)
        return descriptor in ready

    def _while_waiting(self, operation: str) -> None:
        if operation == STARTING:
            self._note_shared_memory()
        if self._cancelled():
            self.end()
            raise EngineStopped(f"the run was asked to stop during the engine's {operation}; the engine was ended")
        if cause := self._peer_failure():
            raise self._failed(f"a process of the engine ended during {operation}, {cause}")

    def _note_shared_memory(self) -> None:
        """Write the names of SGLang's files in /dev/shm into the scratch folder, for `end` or the guard to remove them.

        SGLang does not remove them if it is killed.
        """
        names = "".join(f"{name}\n" for name in sorted(_shared_memory(self._process.pid)))
        if names:
            with suppress(OSError):  # the disk is full; if the engine is killed now, its files stay in /dev/shm
                (self._scratch / SHARED_MEMORY).write_text(names, encoding="utf-8")

    def end(self, patience_s: float = 0.0) -> None:
        """Wait up to `patience_s` for the process to exit, kill what is left of its process group, remove its files.

        Returns when all processes of the group are gone, because their memory is free only then; at the latest
        `DEATH_SECONDS` after the kill.
        """
        if self._ended:  # the process has been reaped, so the id of its process group may belong to others by now
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
        self._folder.remove()

    def _log_early_output(self) -> None:
        """Append to the log the output of a process that ended before it redirected its output to the log."""
        self._output.seek(0)
        if self._log.exists() and (output := self._output.read()):
            with open_nofollow(self._log, "ab") as file:
                file.write(output)
        self._output.close()

    def _hung(self, how: str, timeout_s: float, operation: str) -> EngineFailure:
        states = "; ".join(_group_states(self._process.pid))
        return self._failed(f"the engine {how} for {timeout_s:g} s during {operation}; its processes: {states}")

    def _gone(self, operation: str) -> EngineFailure:
        # The process has closed its end of the socket, so it is about to exit, and its exit code tells the cause.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        how = "no exit code yet" if code is None else signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return self._failed(f"the engine's host process is gone ({how}) during {operation}")

    def _failed(self, cause: str) -> EngineFailure:
        self.end()
        tail = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return EngineFailure("\n".join([cause, f"end of {self._log}:", *tail]))


def _scratch_folder() -> Scratch:
    """Create a folder for sockets and short texts, in the directory of TMPDIR.

    If that path is too long for a socket, the folder is in another directory with a short path. Raises UserError when
    TMPDIR cannot be written to, and when no directory that can be written to has a short path.
    """
    errors: list[str] = []
    for parent in (None, *SHORT_DIRECTORIES):
        folder = _writable_folder(parent, errors)
        if folder is None and parent is None:
            # No other directory is tried: the user may have chosen this one with TMPDIR, and should learn why it cannot
            # be written to.
            break
        if folder is not None and len(os.fsencode(folder.path)) + LONGEST_SOCKET <= SOCKET_PATH:
            return folder
        if folder is not None:
            errors.append(f"{folder.path.parent}: a path of a socket has at most {SOCKET_PATH} bytes")
            folder.remove()
    where = f" to {tempfile.tempdir}" if tempfile.tempdir else ""
    raise UserError(
        f"the engine's temporary files cannot be written{where} ({'; '.join(errors)}); free some space if a disk is "
        "full, or set the variable TMPDIR to a directory with a short path that can be written"
    )


def _writable_folder(parent: str | None, errors: list[str]) -> Scratch | None:
    """Create a folder in `parent`, by default the directory of TMPDIR, and try to write to it.

    If that fails, as on a full disk, adds the reason to `errors` and returns None. Raises UserError if this process's
    limit of file sizes is the reason, because then no other directory helps.
    """
    try:
        folder = Scratch("engine", parent=parent)
        try:
            probe = folder.path / "probe"
            probe.write_bytes(bytes(PROBE_BYTES))  # write some bytes: on a full disk making a directory still succeeds
            probe.unlink()
        except OSError:
            folder.remove()
            raise
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise UserError(
                f"the engine's temporary files cannot be written ({error.strerror}); {REFUSALS[error.errno]}"
            ) from None
        errors.append(str(error.strerror))
        return None
    return folder


def _with_this_package(environment: dict[str, str]) -> dict[str, str]:
    """The environment, changed so that the host imports this copy of the package even if another is installed."""
    root = str(Path(mugrpo_megatron.__file__).parents[1])
    if root in site.getsitepackages():
        return environment
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))}


def _local_paths(scratch: Path, single_node: bool) -> dict[str, str]:
    """The variables that put SGLang's sockets into the scratch folder, which is removed even if SGLang is killed."""
    # On a single node a file replaces torch's TCP rendezvous, which listens on every interface
    # (model_executor/model_runner.py).
    override = {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous"} if single_node else {}
    return {"TMPDIR": str(scratch)} | override


def _group_states(group: int) -> Iterator[str]:
    """Yield `name (pid) state` of every living process of a process group."""
    # The group is compared first: a machine has many processes, and psutil reads several files for each one's name.
    for number in psutil.pids():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(number) == group and (status := psutil.Process(number).status()) != psutil.STATUS_ZOMBIE:
                yield f"{psutil.Process(number).name()} ({number}) {status}"


def _shared_memory(group: int) -> set[str]:
    """Find SGLang's files in /dev/shm that processes of the group have mapped, by their names.

    The names are those of utils/stale_shm_cleanup.py; the learner's buffers of weights have others.
    """
    files: set[str] = set()
    for process in psutil.pids():
        with suppress(OSError):
            if os.getpgid(process) == group:
                maps = Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace")
                files.update(re.findall(r"/dev/shm/(?:(?:sgl_shm|sglang|psm)_|sem\.mp-)\S+", maps))
    return files
