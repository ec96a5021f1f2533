"""Starts the programs of `rollout.agent`; one small process, forked for each, so a function is imported once.

A worker of episodes sends it a message and a socket for every session. The fork of the session waits for its program's
end, or for the worker to close the socket, then kills all that the program has started and answers with the exit code.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import resource
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, NoReturn

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import as_text
from mugrpo_megatron.recipe.functions import describe_exception, load_function
from mugrpo_megatron.recipe.objective import USER_FUNCTION
from mugrpo_megatron.rewards.guard import PR_SET_CHILD_SUBREAPER, kill_descendants

FILE_BYTES = 64 << 20
"""Size limit of each file that a program writes, its output included."""
ROW, OUTPUT, ERRORS, SCRATCH = "row.json", "stdout", "stderr", "scratch"
"""In a session's directory: the program's standard input, output and errors, and the directory it begins in."""


def serve(descriptor: int, text: str) -> None:
    """Load the program and start it for each message, until the worker is gone. `text`: the options as JSON."""
    options = json.loads(text)
    connection = Connection(descriptor)
    try:
        run = _program(options["name"])
    except UserError as error:
        connection.send_bytes(json.dumps({"refused": str(error)}).encode())
        return
    connection.send_bytes(b"{}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the sessions' guards
    while True:
        try:
            message = json.loads(connection.recv_bytes())
            session = socket.socket(fileno=recv_handle(connection))
        except (EOFError, OSError):
            return
        if os.fork() == 0:
            connection.close()
            _guard(session, message, run, options["memory_mb"] << 20)
        session.close()


def _program(name: str) -> Callable[[Path], Any]:
    """The program as a function of its row's file; a command does not return."""
    if USER_FUNCTION.fullmatch(name):
        function = load_function("rollout.agent", name)
        return lambda row: _call(function, row)
    # The program runs in a directory of its own, so files among the words are named from the root.
    words = [str(Path(word).resolve()) if Path(word).is_file() else word for word in shlex.split(name)]
    # Not resolved: the interpreter of a virtual environment is a link that finds its packages by its own path.
    words[0] = os.path.abspath(shlex.split(name)[0]) if "/" in words[0] else words[0]
    return lambda row: os.execvp(words[0], words)


def _call(function: Callable[..., Any], row: Path) -> None:
    """Call the function with the row, and write its result as the last line of the output."""
    try:
        result = function(json.loads(row.read_bytes()))
        result = asyncio.run(result) if inspect.iscoroutine(result) else result
        result = {"answer": result} if isinstance(result, str) else result
        result = {"reward": result} if isinstance(result, int | float) else result or {}
        print(f"\n{as_text(result)}", flush=True)
    except BaseException as error:
        print(describe_exception(error, __file__, asyncio.__file__), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # threads may hang in the function


def _guard(session: socket.socket, message: dict[str, Any], run: Callable[[Path], Any], memory: int) -> NoReturn:
    """Run the program in a child; returns its exit code through the socket once nothing is left of it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.setsid()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            session.close()
            _enter(Path(message["directory"]), message["environment"], memory)
            run(Path(message["directory"]) / ROW)
        os._exit(127)
    select.select([session.fileno(), os.pidfd_open(child)], [], [])
    ended, status = os.waitpid(child, os.WNOHANG)
    kill_descendants()
    if not ended:  # nobody reads what it has written
        remove_tree(message["directory"])
    with suppress(OSError):  # the worker has closed it
        session.send(str(os.waitstatus_to_exitcode(status) if ended else -signal.SIGKILL).encode())
    os._exit(0)


def remove_tree(directory: str | Path) -> None:
    """Remove a directory in which programs may have nested folders deeper than Python recurses."""
    with suppress(RecursionError):
        shutil.rmtree(directory, ignore_errors=True)
    if os.path.lexists(directory):
        subprocess.run(["rm", "-rf", "--", directory], stderr=subprocess.DEVNULL, check=False)


def _enter(directory: Path, environment: dict[str, str], memory: int) -> None:
    """Set this process's limits, files, directory and environment."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 1024),
    ):
        resource.setrlimit(limit, (most, most))
    write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for target, (name, flags) in enumerate(((ROW, os.O_RDONLY), (OUTPUT, write), (ERRORS, write))):
        os.dup2(os.open(directory / name, flags, 0o600), target)
    os.environ.update(environment)
    os.chdir(directory / SCRATCH)
