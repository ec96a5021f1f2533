"""Runs torchrun with more time for the ranks to stop, and without a port that other machines can reach.

    python -P run_scripts/cluster/launch.py GRACE [torchrun's options] PROGRAM [ARGUMENTS]

run_scripts/torchrun.sh starts this with the torch of the environment that it finds. The differences from torchrun:

- Ranks get GRACE seconds between the signal that asks them to stop and SIGKILL, also when they are stopped because
  another rank failed. torchrun gives them 30. `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` changes this only since torch 2.12
  (CUDA machines have 2.11), and never after a failure. A second Ctrl-C kills them at once.
- The exit code is 0 if a signal stopped torchrun and every rank ended with 0. torchrun's own is 1, with which
  `srun --kill-on-bad-exit` would kill the nodes that are still saving. After Ctrl-C it is 130, as for one process. If
  a rank failed, it is that rank's exit code, without a traceback.
- A signal that is ignored stays ignored, such as SIGHUP under nohup. torchrun would pass it on to the ranks.
- `--rdzv-backend loopback` is a rendezvous for one machine; its store listens on 127.0.0.1 alone. The store of
  `torchrun --standalone` listens on every interface, and nothing authenticates its clients.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore, run
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT = timedelta(minutes=10)
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that torchrun handles and passes on to its ranks."""
VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended."""


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of a single node: it waits for nobody, and its store is on a free port of 127.0.0.1."""

    def __init__(self, run_id: str) -> None:
        listening = socket.create_server((LOOPBACK, 0))
        self._run_id, self._port = run_id, listening.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK, self._port, is_master=True, timeout=STORE_TIMEOUT, master_listen_fd=listening.detach()
        )

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this node as the only one. After a restart too: ranks put the number of restarts in front of their
        keys."""
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def loopback(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous, for torch's registry of handlers."""
    return LoopbackRendezvous(parameters.run_id)


@contextmanager
def patient(grace_s: float) -> Iterator[list[int]]:
    """Make torchrun wait `grace_s` seconds for ranks that stop; yields a list, which has their exit codes at the end.

    Every version of torch ends its ranks through `PContext.close`, and no option or variable reaches all of its calls.
    """
    close, codes = PContext.close, list[int]()

    def waiting(self: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        deadline = time.monotonic() + grace_s  # `timeout`, which torchrun passes, is not used
        while True:
            try:
                close(self, death_sig, max(0, round(deadline - time.monotonic())))
                break
            except SignalException as again:  # another signal while waiting: Slurm repeats SIGTERM, a user Ctrl-C
                if again.sigval == signal.SIGINT:
                    death_sig = signal.SIGKILL
        if isinstance(self, SubprocessContext):
            codes[:] = [handler.proc.returncode for handler in self.subprocess_handlers.values()]

    PContext.close = waiting  # type: ignore[method-assign]
    try:
        yield codes
    finally:
        PContext.close = close  # type: ignore[method-assign]


def reason(code: int) -> str:
    """A hint at where to read why a rank ended with this exit code."""
    if code == -signal.SIGKILL:
        return "it could not say why: usually memory ran out, and `dmesg` names the process"
    return "its log says why"


def ended(code: int) -> str:
    """The exit code of a process in words."""
    return f"exit code {code}" if code >= 0 else f"{signal.Signals(-code).name}"


def exit_code(stopped_by: signal.Signals, codes: Sequence[int]) -> int:
    """The launcher's exit code after a signal has stopped its ranks, which ended with `codes`."""
    if stopped_by == signal.SIGINT and not any(code > 0 and code != INTERRUPTED for code in codes):
        return INTERRUPTED
    return 0 if codes and not any(codes) else 1


def heeding(options: Sequence[str]) -> list[str]:
    """torchrun's options, with the signals that it may handle: those that are not ignored in this process.

    Older versions of torch read the signals from a variable alone; newer ones have an option, which wins over it.
    """
    names = ",".join(number.name for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN)
    os.environ[VARIABLE] = names
    return [f"--signals-to-handle={names}", *options] if hasattr(LaunchConfig, "signals_to_handle") else list(options)


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with `arguments`, of which the first is the grace in seconds.

    Returns 0, the exit code of the first rank that failed, or the one for a signal (`exit_code`).
    """
    rendezvous_handler_registry.register("loopback", loopback)
    grace, *options = arguments
    with patient(float(grace)) as codes:
        try:
            run.main(heeding(options))
        except SignalException as stopped:
            ranks = ", ".join(ended(code) for code in codes) or "none had started"
            print(f"torchrun: stopped by {stopped.sigval.name}; ranks: {ranks}", file=sys.stderr)
            return exit_code(stopped.sigval, codes)
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            how = f"{ended(failure.exitcode)}; {reason(failure.exitcode)}"
            print(f"torchrun: rank {rank} failed first, with {how}", file=sys.stderr)
            return failure.exitcode if failure.exitcode > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
