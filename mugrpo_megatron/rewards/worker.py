"""A verifier process: reads batches of (answer, gold) from a socket, grades them one by one, answers after each.

`python -m mugrpo_megatron.rewards.worker SOCKET_FD JSON`, started by rewards/process.py. It limits its own address
space, gives up on an item when its alarm rings, retires when it has grown, ends when its parent does, and may be killed
at any time.
"""

from __future__ import annotations

import ctypes
import json
import math
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

PR_SET_PDEATHSIG = 1
ALARM_AGAIN_S = 0.25
"""Processor seconds. The alarm repeats: the first may ring where an exception is swallowed, as in a finalizer."""
FAILED = "failed"
GROWN = 0.75
"""Share of the memory limit at which a worker retires, so that one answer's leftovers do not fail another."""

Grade = Callable[[str, str], tuple[float, str]]


class TooLate(BaseException):
    """The alarm rang. Not an Exception, so that no `except Exception` of a library swallows it."""


def load_function(name: str, policy: str) -> Grade:
    """`math`, or the user's `module:function` (response, answer) -> float; raises whatever importing it raises."""
    if name == "math":
        return partial(import_module("mugrpo_megatron.rewards.math").grade, policy=policy)
    module, _, attribute = name.partition(":")
    function = getattr(import_module(module), attribute)
    return partial(_grade_with, function, name)


def _grade_with(function: Callable[[str, str], float], name: str, response: str, answer: str) -> tuple[float, str]:
    reward = float(function(response, answer))
    if not math.isfinite(reward):
        raise ValueError(f"{name} returned {reward}")
    return reward, name


def graded(grade: Grade, answer: str, gold: str, alarm_s: float) -> tuple[float, str, float]:
    """(reward, why, seconds) of one item. MemoryError ends the process; anything else that goes wrong scores 0."""
    start = time.perf_counter()
    try:
        signal.setitimer(signal.ITIMER_PROF, alarm_s, ALARM_AGAIN_S)
        reward, why = grade(answer, gold)
        signal.setitimer(signal.ITIMER_PROF, 0)
    except TooLate:
        signal.setitimer(signal.ITIMER_PROF, 0)
        reward, why = 0.0, f"gave up after {alarm_s:g} s"
    except MemoryError:
        raise
    except Exception as error:  # an answer may break a parser in any way; it scores 0 and the run goes on
        signal.setitimer(signal.ITIMER_PROF, 0)
        reward, why = 0.0, f"{FAILED}: {type(error).__name__}: {error}"[:200]
    return reward, why, time.perf_counter() - start


def main() -> None:
    options = json.loads(sys.argv[2])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    memory = options["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _on_alarm)
    connection = Connection(int(sys.argv[1]))
    try:
        grade = load_function(options["function"], options["policy"])
    except Exception as error:  # a user's module may fail in any way when it is imported
        connection.send_bytes(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return
    connection.send_bytes(b"{}")
    _serve(connection, grade, options["alarm_s"], GROWN * memory, warns=options["function"] != "math")


def _serve(connection: Connection, grade: Grade, alarm_s: float, max_bytes: float, warns: bool) -> None:
    """Grade batches until the parent is gone or `max_bytes` are in use; `warns` once when a function fails."""
    while True:
        try:
            batch = json.loads(connection.recv_bytes())
        except EOFError:
            return
        for answer, gold in batch:
            reward, why, seconds = graded(grade, answer, gold, alarm_s)
            if warns and why.startswith(FAILED):
                warns = False
                print(f"mugrpo: the reward function scores 0 when it fails: {why}", file=sys.stderr)
            retires = _address_space() > max_bytes
            connection.send_bytes(json.dumps([reward, why, seconds, retires]).encode())
            if retires:
                return


def _on_alarm(_number: int, _frame: object) -> None:
    raise TooLate


def _address_space() -> int:
    """Bytes, as RLIMIT_AS counts them."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()


if __name__ == "__main__":
    main()
