"""Processes forked from a server that has imported everything: a rank or a command starts in milliseconds, not seconds.

What happens at a new interpreter's start is left out; `test_train` and `test_cli` run the command as a user does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.engine_server import forked_engines, hosts_of, start_server
from tests.patience import PATIENCE_S

STARTED = "tests.forked"
"""The audit event of every process that is started here."""


def fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """A started `multiprocessing.Process` that runs `function(*arguments)`; both travel by pickle."""
    sys.audit(STARTED)
    process = fork_server().Process(target=function, args=arguments, daemon=False)
    process.start()
    return process


def fork_server() -> Any:
    """The multiprocessing context whose server has imported `tests.preload`, and knows where engines are forked."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


@dataclass(frozen=True)
class Command:
    """A `mugrpo` command that runs, or has run, in a forked process."""

    process: Any
    folder: Path

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(encoding="utf-8")

    @property
    def said(self) -> str:
        return self.stdout + self.stderr

    @property
    def hosts(self) -> list[psutil.Process]:
        """Of the engines of the command and its ranks."""
        return [host for process in tree_of(self.pid) for host in hosts_of(process.pid)]

    @property
    def offspring(self) -> list[psutil.Process]:
        """Every process that it has started; forked hosts are among them, though they are not its children."""
        return list({member for host in self.hosts for member in tree_of(host.pid)} | set(tree_of(self.pid)[1:]))

    @property
    def family(self) -> list[psutil.Process]:
        return [*tree_of(self.pid)[:1], *self.offspring]

    def wait(self, timeout_s: float = PATIENCE_S) -> int | None:
        """Its exit code, negative after a signal; None when it is still running after `timeout_s`."""
        self.process.join(timeout_s)
        return self.process.exitcode  # type: ignore[no-any-return]


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and what it has started; empty if it has ended."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


@contextmanager
def started(
    *arguments: object, real_engine: bool = False, first: Callable[[], object] | None = None
) -> Iterator[Command]:
    """`mugrpo *arguments` with this process's environment; what is left of it is killed when the block ends.

    Its engines are forked from a server that has imported SGLang, but with `real_engine`. `first`, a function of a
    module, is called in the command's process before the command.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("stdout", "stderr"):
            (Path(folder) / name).touch()
        words = [str(argument) for argument in arguments]
        command = Command(fork(_run, words, dict(os.environ), folder, real_engine, first), Path(folder))
        try:
            yield command
        finally:
            if command.process.is_alive():
                for process in command.family:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            command.process.join()


def _run(
    arguments: list[str],
    environment: Mapping[str, str],
    folder: str,
    real_engine: bool,
    first: Callable[[], object] | None,
) -> None:
    from mugrpo_megatron.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)  # however the suite was started
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        with (Path(folder) / name).open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if first:
        first()
    with nullcontext() if real_engine else forked_engines():
        sys.exit(main(arguments))
