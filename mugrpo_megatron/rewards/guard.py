"""The guard of a verifier worker: starts it, and kills all its descendants when the worker or the verifier ends.

`calls.start_guarded` starts one for each worker, as the leader of a session. Orphans become the guard's children
(prctl(2), PR_SET_CHILD_SUBREAPER), so none escapes. The guard only waits for signals, even while its worker hangs.
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
"""Signal that tells the guard to kill all its descendants and exit; the kernel sends it when the verifier's thread
ends. Not SIGTERM, which a job scheduler sends to every process long before the run has to end."""
WAITED_FOR = (END, signal.SIGCHLD)


def main(worker: str) -> None:
    """Run `serve(SOCKET_FD, OPTIONS)` of the module `worker` in a child, and exit with its exit code.

    sys.argv is [..., PARENT_PID, SOCKET_FD, OPTIONS].
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
        # Imported in the child only: the guard stays small.
        import_module(worker).serve(int(sys.argv[-2]), sys.argv[-1])
        return
    os.close(int(sys.argv[-2]))
    code = wait_for(child)
    kill_descendants()
    os._exit(code)


def default_signals(except_for: Collection[int] = ()) -> None:
    """Give this process the signals of a fresh one: an ignored or blocked signal is inherited through fork and exec.

    Python ignores SIGPIPE and SIGXFSZ; a program that inherited that would write on where it should end.
    """
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *except_for}:
        with suppress(OSError, ValueError):  # glibc reserves two of the real-time signals
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _ignore(_number: int, _frame: object) -> None:
    """Ignore a signal; unlike SIG_IGN, a handler is not inherited by programs that a reward function runs."""


def wait_for(worker: int) -> int:
    """Wait for the worker; returns its exit code, 128 + N after signal N, or 0 after END."""
    while signal.sigwaitinfo(WAITED_FOR).si_signo != END:
        for pid, status in _ended(os.WNOHANG):
            if pid == worker:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
    return 0


def _ended(options: int) -> Iterator[tuple[int, int]]:
    """Reap children that have ended; yields (process id, wait status)."""
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, options))[0]:
            yield child


def kill_descendants() -> None:
    """Kill children until none is left; the children of a killed process become the guard's."""
    _kill_children()
    for _ in _ended(0):
        _kill_children()


def _kill_children() -> None:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended meanwhile
            # The fields of /proc/PID/stat after the name, see proc(5).
            _state, parent, *_ = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(parent) == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGKILL)
