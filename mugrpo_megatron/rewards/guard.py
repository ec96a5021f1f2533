"""The guard of a worker process: starts the worker, and kills what is left of it and its descendants when the worker or
the verifier ends.

`calls.start_guarded` starts one guard for each worker, as the leader of a session. Orphans of the worker become
children of the guard (prctl(2), PR_SET_CHILD_SUBREAPER), so that none escapes. The guard does nothing but wait for
signals, so a worker that hangs does not stop it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
END = signal.SIGUSR1
"""Signal on which the guard kills all its descendants and exits; the kernel sends it when the verifier's thread ends.
It is not SIGTERM, which a job scheduler sends to every process long before the run has to end."""
WAITED_FOR = (END, signal.SIGCHLD)


def main(worker: str) -> None:
    """Run `serve(SOCKET_FD, OPTIONS)` of the module `worker` in a child process, and exit with its exit code.

    sys.argv is [..., PARENT_PID, SOCKET_FD, OPTIONS]. Returns at once if the parent has ended already.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ignore)
    kernel = ctypes.CDLL(None)
    kernel.prctl(PR_SET_PDEATHSIG, END)
    kernel.prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != int(sys.argv[-3]):
        return
    child = os.fork()
    if child == 0:
        kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)
        # Imported in the child alone, so that the guard does not take the memory of the worker's modules.
        import_module(worker).serve(int(sys.argv[-2]), sys.argv[-1])
        return
    os.close(int(sys.argv[-2]))
    code = wait_for(child)
    kill_descendants()
    os._exit(code)


def default_signals(except_for: Collection[int] = ()) -> None:
    """Reset this process's handling of signals, since ignored and blocked ones are inherited through fork and exec.

    Python ignores SIGPIPE and SIGXFSZ; a program that inherited this would go on writing where it should end.
    """
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *except_for}:
        with suppress(OSError, ValueError):  # two of the real-time signals belong to glibc and cannot be set
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _ignore(_number: int, _frame: object) -> None:
    """Ignore a signal. Unlike SIG_IGN, this handler is not inherited by programs that a reward function runs."""


def wait_for(worker: int) -> int:
    """Wait until the worker has ended, or END comes. Returns its exit code, 128 + N after signal N, or 0 after END."""
    while signal.sigwaitinfo(WAITED_FOR).si_signo != END:
        for pid, status in _ended(os.WNOHANG):
            if pid == worker:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
    return 0


def _ended(options: int) -> Iterator[tuple[int, int]]:
    """Reap children that have ended; yields (process id, wait status) of each."""
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, options))[0]:
            yield child


def kill_descendants() -> None:
    """Kill children until there are none; when a process is killed, its own children become children of the guard."""
    _kill_children()
    for _ in _ended(0):
        _kill_children()


def _kill_children() -> None:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # In /proc/PID/stat the state and the parent's id follow the name, which is in parentheses (proc(5)).
        with suppress(OSError):  # the process has ended meanwhile
            _state, parent, *_ = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(parent) == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGKILL)
