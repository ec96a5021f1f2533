"""Runs a program in a jail and returns its output, or how it failed.

This runs in the verifier's worker, outside of the jail, and enforces the limits of time and output.
"""

from __future__ import annotations

import inspect
import json
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from types import ModuleType
from typing import Literal

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.sandbox import assert_runner, jail, program_server, value_codec
from mugrpo_megatron.extras.sandbox.limits import Limits
from mugrpo_megatron.extras.sandbox.row_tests import AssertTest
from mugrpo_megatron.extras.sandbox.value_codec import pack
from mugrpo_megatron.files.scratch import Scratch
from mugrpo_megatron.rewards import guard
from mugrpo_megatron.rewards.activity import LOOK_S, Overtime

Ending = Literal["ended", "time", "output"]
OUT_OF_TIME = "ran out of time"
"""Reason for the failure of a program whose time by the clock was over, such as one that sleeps."""
_PIECE = 1 << 16
_START = "import sys; sys.path.insert(0, sys.argv[1] or '/'); from {module} import main; main(*sys.argv[1:])"
_ERROR_CHARS = 160
"""Characters of a program's last words in a reason."""


@dataclass(frozen=True, slots=True)
class Outcome:
    ending: Ending
    """Whether it ended by itself, or was killed for its time or its output."""
    code: int
    """Exit code; 128 + N after signal N."""
    output: bytes
    errors: bytes
    answer: bytes = b""
    """Bytes that the last process wrote to its channel for answers, if it has one."""

    def why_failed(self) -> str:
        """Why the program failed; empty when it ended by itself with exit code 0."""
        if self.ending == "time":
            return OUT_OF_TIME
        if self.ending == "output":
            return "wrote too much"
        if self.code > 128:
            with suppress(ValueError):
                return f"ended by {signal.Signals(self.code - 128).name}"
        if self.code:
            words = self.errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return f"exit code {self.code}: {words[:_ERROR_CHARS]}" if words else f"exit code {self.code}"
        return ""


@dataclass(frozen=True, slots=True)
class JailedProcess:
    """What is started in one jail of an execution."""

    files: Mapping[str, str]
    """The files that the program sees: path below the jail's root -> text."""
    start: str
    """A script among the files, or the name of one of their modules."""
    arguments: Sequence[str]
    """Arguments of the module's `main` after the root's path."""
    channels: Mapping[int, FileIO]
    """The jail's descriptors -> files of this process, which are closed here once the jail has them."""


def run_program(program: str, stdin_text: str, limits: Limits) -> Outcome:
    """Execute the program with `stdin_text` on its stdin. Raises UserError when the jail cannot be made."""
    with _readable(stdin_text) as stdin:
        return execute([JailedProcess({"/main.py": program}, "/main.py", [], {0: stdin})], limits)


def call_function(program: str, name: str, arguments: Sequence[object], limits: Limits) -> Outcome:
    """Execute the program as a module and call its function `name`; `Outcome.answer` has the lines of JSON that
    `program_server` wrote, one about the function and one with the result."""
    requests = [
        {"do": "entry", "name": name},
        {"do": "call", "on": 0, "arguments": pack(list(arguments), _not_kept)},
    ]
    with _readable("".join(json.dumps(request) + "\n" for request in requests)) as requests_file:
        return execute([_served(program, {3: requests_file})], limits, answer_of=4)


def check_asserts(program: str, test: AssertTest, limits: Limits) -> Outcome:
    """Execute test code in one jail against the program in another; `Outcome.answer` is "passed" or empty."""
    files = _modules(assert_runner, value_codec) | {
        f"/{assert_runner.TESTS}": test.code,
        f"/{assert_runner.PROMPT}": test.prompt,
    }
    with ExitStack() as opened:
        requests, to_program = (opened.enter_context(end) for end in _pipe())
        answers, from_program = (opened.enter_context(end) for end in _pipe())
        arguments = ["3", "4", "5", test.entry, ",".join(test.names), json.dumps(test.library)]
        judge = JailedProcess(files, assert_runner.__name__, arguments, {3: answers, 4: to_program})
        return execute([_served(program, {3: requests, 4: from_program}), judge], limits, answer_of=5)


def _served(program: str, channels: Mapping[int, FileIO]) -> JailedProcess:
    files = _modules(program_server, value_codec) | {f"/{program_server.PROGRAM}": program}
    return JailedProcess(files, program_server.__name__, ["3", "4"], channels)


@cache
def _modules(*modules: ModuleType) -> dict[str, str]:
    """Source of each module, by the path at which a jail imports it."""
    return {f"/{module.__name__.replace('.', '/')}.py": inspect.getsource(module) for module in modules}


def _not_kept(value: object) -> object:
    raise TypeError(f"a value of type {type(value).__name__} cannot be an argument of the program")


def execute(processes: Sequence[JailedProcess], limits: Limits, answer_of: int | None = None) -> Outcome:
    """Run the processes, each in its own jail, until the last one ends; then end the others.

    stdin is empty unless a process has a channel 0. The last process's stdout and stderr are returned, those of the
    other processes are dropped. answer_of: the last process's descriptor whose content is `Outcome.answer`.
    """
    with ExitStack() as opened:
        nothing = opened.enter_context(open(os.devnull, "r+b", buffering=0))
        reads: dict[int, bytearray] = {}
        for index, process in enumerate(processes):
            theirs = dict(process.channels)
            if index == len(processes) - 1:
                for name in [1, 2, *([] if answer_of is None else [answer_of])]:
                    ours, theirs[name] = (opened.enter_context(end) for end in _pipe())
                    os.set_blocking(ours.fileno(), False)
                    reads[ours.fileno()] = bytearray()
            root, files = opened.enter_context(_files(process.files, limits))
            script = [root + process.start]
            if not process.start.startswith("/"):
                script = ["-c", _START.format(module=process.start), root]
            channels = {name: file.fileno() for name, file in ({0: nothing, 1: nothing, 2: nothing} | theirs).items()}
            keeper, errors = jail.start([*script, *process.arguments], files, channels, limits)
            opened.callback(_end, keeper)
            for file in theirs.values():
                file.close()
            with open(errors, "rb") as message_file:
                if problem := message_file.read():
                    raise UserError(f"a program's jail could not be made: {problem.decode('utf-8', 'replace')}")
        ending, code = _watch(keeper, reads, limits)
        output, words, *answer = (bytes(buffer) for buffer in reads.values())
        return Outcome(ending, code, output, words, *answer)


def _watch(keeper: int, reads: dict[int, bytearray], limits: Limits) -> tuple[Ending, int]:
    """Read the program's output until its keeper ends or a limit is broken; when this returns, all its processes have
    ended."""
    deadline = time.monotonic() + limits.wall_s
    overtime: Overtime | None = None
    ended = os.pidfd_open(keeper)
    poll = select.poll()
    for descriptor in (ended, *reads):
        poll.register(descriptor, select.POLLIN)
    ending: Ending = "ended"
    try:
        while ending == "ended":
            left = deadline - time.monotonic()
            events = dict(poll.poll(max(0.0, left) * 1000))
            for descriptor in events.keys() & reads.keys():
                if not _read(descriptor, reads[descriptor]):
                    poll.unregister(descriptor)
            if ended in events:
                break
            if max(map(len, reads.values())) > limits.output_bytes:
                ending = "output"
            elif left <= 0:
                if overtime is None:
                    overtime = Overtime(os.getpid(), limits.wall_s)
                elif overtime.is_over():
                    ending = "time"
                deadline = time.monotonic() + LOOK_S
    finally:
        os.close(ended)
    code = _end(keeper)
    for descriptor, buffer in reads.items():
        while len(buffer) <= limits.output_bytes and _read(descriptor, buffer):
            pass
        if len(buffer) > limits.output_bytes:
            ending = "output"
    return ending, code


def _read(descriptor: int, buffer: bytearray) -> bool:
    """Read what is available; returns whether there may be more."""
    try:
        piece = os.read(descriptor, _PIECE)
    except BlockingIOError:
        return False
    buffer += piece
    return bool(piece)


def _end(keeper: int) -> int:
    """End the keeper and all its descendants, wait for them, and return the keeper's exit code.

    Returns 0 if an earlier call has done that.
    """
    with suppress(ChildProcessError):
        # Raises if the keeper has been waited for; if not, its process id cannot have been reused.
        os.waitid(os.P_PID, keeper, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.kill(keeper, guard.END)
        return os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])
    return 0


def _pipe() -> tuple[FileIO, FileIO]:
    """(read end, write end) of a pipe, as files: unlike a descriptor, a file may be closed twice."""
    read, write = os.pipe()
    return FileIO(read, "rb"), FileIO(write, "wb")


def _readable(text: str) -> FileIO:
    """A file of that text, to read only and without a place in the file system."""
    memory = os.memfd_create("input")
    with open(memory, "wb") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.flush()
        return open(f"/proc/self/fd/{memory}", "rb", buffering=0)


@contextmanager
def _files(files: Mapping[str, str], limits: Limits) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield (root, files) for `jail.start`: "" if the jail has a root of its own, or a directory that is removed
    afterwards."""
    if limits.mode == "namespaces":
        yield "", files
        return
    # Old folders are not removed here, since this runs for each program; each start of an engine removes them.
    with Scratch("program", sweep=False) as path:
        directory = str(path)
        jail.write_files(directory, files)
        jail.write_environment(directory)
        yield directory, {directory: ""}
