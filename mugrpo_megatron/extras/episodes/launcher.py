"""Starts the programs of `rollout.agent`: a small process that forks for each, so that a function is imported once.

A worker of episodes sends it a message and a socket for every session. The process forked for the session waits until
its program ends or the worker closes the socket. Then it kills all that the program has started, and answers with the
exit code, or with a sentence if the program could not be started.
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
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, NoReturn

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.episodes.environment import program_path, secrets_in
from mugrpo_megatron.files.json_text import as_text
from mugrpo_megatron.files.scratch import remove_tree
from mugrpo_megatron.recipe.functions import describe_exception, exception_text, load_function
from mugrpo_megatron.recipe.objective import USER_FUNCTION
from mugrpo_megatron.rewards.guard import PR_SET_CHILD_SUBREAPER, default_signals, kill_descendants

FILE_BYTES = 64 << 20
"""Size limit of each file that a program writes, its output included."""
OPEN_FILES = 1024
ROW, OUTPUT, ERRORS, SCRATCH = "row.json", "stdout", "stderr", "scratch"
"""Names in a session's directory: the files for the program's standard input, output and errors, and its working
directory."""
NOT_STARTED = 127
"""Exit code of a program that could not be started; shells use the same."""


def serve(descriptor: int, text: str) -> None:
    """Load the program and start it for each message, until the worker is gone. `text`: the options as JSON."""
    options = json.loads(text)
    connection = Connection(descriptor)
    # Before the function is imported: its module may read the environment too.
    for name in secrets_in(os.environ, options["secrets"]):
        del os.environ[name]
    os.environ["PATH"] = program_path(os.environ)
    is_command = not USER_FUNCTION.fullmatch(options["name"])
    try:
        run = _command(options["name"]) if is_command else _function(options["name"])
    except UserError as error:
        connection.send_bytes(json.dumps({"refused": str(error)}).encode())
        return
    connection.send_bytes(b"{}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end are reaped by the kernel
    while True:
        try:
            message = json.loads(connection.recv_bytes())
            session = socket.socket(fileno=recv_handle(connection))
        except (EOFError, OSError):
            return
        try:
            if os.fork() == 0:
                connection.close()
                _guard(session, message, run, options["memory_mb"] << 20, is_command)
        except OSError as error:  # no process or no memory is left for now
            _say(session, f"the program could not be started ({error.strerror})")
        session.close()


def _command(name: str) -> Callable[[Path], Any]:
    """Returns a function that replaces the process by the command; the row is already on standard input."""
    # The program runs in a directory of its own, so words that name files become absolute paths.
    words = [str(Path(word).resolve()) if Path(word).is_file() else word for word in shlex.split(name)]
    # Not resolved: the interpreter of a virtual environment is a link that finds its packages by its own path.
    words[0] = os.path.abspath(shlex.split(name)[0]) if "/" in words[0] else words[0]

    def become(_row: Path) -> NoReturn:
        try:
            os.execvp(words[0], words)
        except OSError as error:
            raise OSError(f"{words[0]} cannot be started ({error.strerror})") from None

    return become


def _function(name: str) -> Callable[[Path], Any]:
    """Returns a function that calls `module:function` with the row that a file holds."""
    function = load_function("rollout.agent", name)
    return lambda row: _call(function, row)


def _call(function: Callable[..., Any], row: Path) -> None:
    """Call the function with the row, write its result as the last line of the output, and end this process.

    The exit code is 1 if the function fails; its error is then written to stderr.
    """
    try:
        result = function(json.loads(row.read_bytes()))
        result = asyncio.run(result) if inspect.iscoroutine(result) else result
        print(f"\n{as_text(_as_object(result))}", flush=True)
    except BaseException as error:
        print(describe_exception(error, __file__, asyncio.__file__), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # threads may hang in the function


def _as_object(result: Any) -> dict[str, Any]:
    """The result of a user's function as the JSON object that a program would write in its last line.

    Raises TypeError for a result of any other type.
    """
    if result is None or isinstance(result, dict):
        return result or {}
    if isinstance(result, str):
        return {"answer": result}
    if hasattr(result, "__float__"):
        return {"reward": float(result)}
    raise TypeError(f"it returned a {type(result).__name__}: return a number, a text, or a dict with reward or answer")


def _say(session: socket.socket, text: str) -> None:
    """Send the worker an exit code, or a sentence about a failure."""
    with suppress(OSError):  # the worker has closed the session
        session.send(text.encode())


def _guard(
    session: socket.socket, message: dict[str, Any], run: Callable[[Path], Any], memory: int, is_command: bool
) -> NoReturn:
    """Run the program in a child; send its exit code through the socket once no process of the program is left."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        os.setsid()
        child = os.fork()
        if child == 0:
            _become(session, message, run, memory, is_command)
        poll = select.poll()  # poll, because select cannot take descriptors above 1,023
        for descriptor in (session.fileno(), os.pidfd_open(child)):
            poll.register(descriptor, select.POLLIN)
        poll.poll()
        ended, status = os.waitpid(child, os.WNOHANG)
        kill_descendants()
        if not ended:  # the worker has closed the session, so nobody will read what the program has written
            remove_tree(message["directory"])
        _say(session, str(os.waitstatus_to_exitcode(status) if ended else -signal.SIGKILL))
    except Exception as error:
        _say(session, f"the program could not be started ({exception_text(error)})")
    finally:
        os._exit(0)


def _become(
    session: socket.socket, message: dict[str, Any], run: Callable[[Path], Any], memory: int, is_command: bool
) -> NoReturn:
    """Set the files, limits and signals of this process, then run the program in it."""
    try:
        directory = Path(message["directory"])
        try:
            _open_files(directory)
        except OSError as error:
            _say(session, f"the program's files cannot be opened ({exception_text(error)})")
            raise
        session.close()
        _enter(directory, message["environment"], memory, is_command)
        run(directory / ROW)
    except BaseException as error:
        print(exception_text(error), file=sys.stderr, flush=True)
    finally:
        os._exit(NOT_STARTED)


def _open_files(directory: Path) -> None:
    """Make the session's files this process's standard input, output and errors; what it prints later goes there."""
    write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for target, (name, flags) in enumerate(((ROW, os.O_RDONLY), (OUTPUT, write), (ERRORS, write))):
        opened = os.open(directory / name, flags, 0o600)
        os.dup2(opened, target)
        os.close(opened)


def _enter(directory: Path, environment: dict[str, str], memory: int, is_command: bool) -> None:
    """Set this process's limits, signals, directory and environment."""
    os.setsid()
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
    ):
        hardest = resource.getrlimit(limit)[1]  # the hard limit, above which only root may set one
        most = most if hardest == resource.RLIM_INFINITY else min(most, hardest)
        resource.setrlimit(limit, (most, most))
    # Python ignores SIGPIPE and SIGXFSZ, so a function gets an OSError instead; a command begins as from a shell.
    default_signals(except_for=() if is_command else (signal.SIGPIPE, signal.SIGXFSZ))
    os.environ.update(environment)
    os.chdir(directory / SCRATCH)
