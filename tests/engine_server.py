"""Hosts of engines forked from a process that has imported SGLang: an engine starts in one CPU second, not in eight.

`forked_engines()` lets this process start its engines so. The forked host runs `engine.host.main` on the same socket,
with the same environment, in a process group of its own, and ends with the process that asked for it; only it is not
that process's child (`hosts_of` finds it). Tests of the host's own start and end start a real one.

    python -m tests.engine_server SOCKET     what `forked_engines` runs; it imports SGLang when first asked

It ends when its standard input closes.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from tests.cpu_seconds import cpu_seconds

ADDRESS = "ENGINE_SERVER_OF_TESTS"
"""Environment variable: the server's socket. Processes that this one forks find it there."""
MODULE = "mugrpo_megatron.engine.host"
TITLE = MODULE + " of {}"
"""What a forked host of a client's process id calls itself."""
LARGEST = 1 << 17
"""Bytes of a request: arguments and environment."""


class ForkedHost:
    """What `HostProcess` uses of `subprocess.Popen`."""

    def __init__(self, command: list[str], stdout: Any, env: dict[str, str], pass_fds: tuple[int, ...]) -> None:
        [end] = pass_fds
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(os.environ[ADDRESS])
        request = {
            "arguments": command[command.index(MODULE) + 1 :],
            "environment": env,
            "directory": os.getcwd(),
            "client": os.getpid(),
        }
        socket.send_fds(self._server, [json.dumps(request).encode()], [end, stdout.fileno()])
        self.returncode: int | None = None
        kind, value = self._answer()
        assert kind == "pid"
        self.pid = value

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(MODULE, timeout or 0.0)
            _, self.returncode = self._answer()
            self._server.close()
        return self.returncode

    def _answer(self) -> tuple[str, int]:
        message = self._server.recv(100)
        if not message:
            raise RuntimeError("the tests' engine server has ended")
        kind, value = json.loads(message)
        return kind, value


@contextmanager
def forked_engines() -> Iterator[None]:
    """Inside, this process's engines on CPU are forked from the server, which is started where there is none."""
    from mugrpo_megatron.engine import process

    real = process.subprocess
    start_server()

    def popen(command: list[str], **named: Any) -> Any:
        if MODULE in command and command[-2] == "cpu":
            return ForkedHost(command, named["stdout"], named["env"], named["pass_fds"])
        return real.Popen(command, **named)

    process.subprocess = SimpleNamespace(**{**vars(real), "Popen": popen})  # type: ignore[assignment]
    try:
        yield
    finally:
        process.subprocess = real  # type: ignore[assignment]


def hosts_of(client: int) -> list[psutil.Process]:
    """The running hosts of a process's engines, forked or not."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if " ".join(words).strip() == TITLE.format(client) or (MODULE in words and process.ppid() == client):
                found.append(process)
    return found


SERVERS: list[subprocess.Popen[bytes]] = []
"""Of this process: one or none."""


def server_seconds() -> float:
    """CPU seconds of the server that this process has started, and of its hosts."""
    return sum(cpu_seconds(psutil.Process(server.pid)) for server in SERVERS)


@functools.cache
def start_server() -> None:
    """Start the server, once for this process, those that it forks and pytest's workers."""
    if ADDRESS in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="engine-server-")
    address = os.path.join(folder.name, "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.engine_server", str(listening.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=(listening.fileno(),),
            start_new_session=True,
        )
    SERVERS.append(server)
    os.environ[ADDRESS] = address
    maker = os.getpid()

    def end() -> None:
        if os.getpid() == maker:
            server.kill()
            server.wait()
            folder.cleanup()

    atexit.register(end)


def serve(listening: socket.socket) -> None:
    """Fork a host for each request; tell its client when it has ended, and end it with its client."""
    from setproctitle import setproctitle

    setproctitle("engine server of tests")  # once before the environment changes, after which it would not find it
    hosts: dict[int, tuple[int, socket.socket]] = {}
    """A descriptor of the host's process: its id, its client's socket."""
    clients: dict[int, int] = {}
    """A descriptor of the client's process: the host's id."""
    while True:
        ready, _, _ = select.select([sys.stdin, listening, *hosts, *clients], [], [])
        for one in ready:
            if one is sys.stdin:
                return
            if one is listening:
                connection, _ = listening.accept()
                message, received, _, _ = socket.recv_fds(connection, LARGEST, 2)
                request = json.loads(message)
                try:
                    client = os.pidfd_open(request["client"])
                except ProcessLookupError:  # it has been killed meanwhile
                    connection.close()
                    for descriptor in received:
                        os.close(descriptor)
                    continue
                make = imported(request["environment"])
                if (pid := os.fork()) == 0:
                    for other in [listening, *hosts.values()]:
                        (other if isinstance(other, socket.socket) else other[1]).close()
                    os.setsid()
                    connection.send(json.dumps(["pid", os.getpid()]).encode())
                    connection.close()
                    host(request, received, make)
                for descriptor in received:
                    os.close(descriptor)
                hosts[os.pidfd_open(pid)] = (pid, connection)
                clients[client] = pid
            elif one in clients:
                with suppress(ProcessLookupError):
                    os.kill(clients.pop(one), signal.SIGKILL)
                os.close(one)
            elif one in hosts:
                pid, connection = hosts.pop(one)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(OSError):  # the client has ended before
                    connection.send(json.dumps(["exit", code]).encode())
                connection.close()
                os.close(one)
                for client in [client for client, host in clients.items() if host == pid]:
                    del clients[client]
                    os.close(client)


@functools.cache
def _import(path: str) -> Any:
    import gc

    from mugrpo_megatron.engine import sglang_compat

    make = sglang_compat.engine_type("cpu")
    gc.collect()
    gc.freeze()
    return make, path


def imported(environment: dict[str, str]) -> Any:
    """`sglang_compat.engine_type` of this process, imported in the environment of the first engine.

    None where the environment has another PATH, in which another compiler is, or none.
    """
    if "sglang" not in sys.modules:
        os.environ.update({name: value for name, value in environment.items() if name != "SGLANG_DISABLED_MODEL_ARCHS"})
        sys.modules["megatron"] = None  # type: ignore[assignment]  # as in the host
    make, path = _import(os.environ["PATH"])
    return make if path == environment["PATH"] else None


def host(request: dict[str, Any], received: list[int], make: Any) -> None:
    """Be the host that was asked for; does not return."""
    from setproctitle import setproctitle

    from mugrpo_megatron.engine import host as module
    from mugrpo_megatron.engine import sglang_compat

    setproctitle(TITLE.format(request["client"]))
    end, output = received
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    if counted := os.environ.get("ENGINE_STARTS_OF_TESTS"):
        with Path(counted).open("a", encoding="utf-8") as file:
            file.write("forked\n")
    _, _, device, scratch = request["arguments"]
    sys.argv = ["host", str(end), str(os.getppid()), device, scratch]
    if make is not None:
        sglang_compat.engine_type = lambda device: make  # type: ignore[misc]
    code = 0
    try:
        module.main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    for stream_ in (sys.stdout, sys.stderr):
        stream_.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
