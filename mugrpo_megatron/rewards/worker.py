"""A verifier worker: reads batches of comparisons from a socket, grades them one by one, answers after each.

Started by rewards/guard.py. It limits its own address space, gives up on a comparison when its alarm rings, retires
when it has grown, and may be killed at any time.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

ALARM_AGAIN_S = 0.25
"""Processor seconds. The alarm repeats: the first may ring where an exception is swallowed, as in a finalizer."""
GROWN = 0.75
"""Share of the memory limit at which a worker retires, so that one answer's leftovers do not fail another."""
MAX_WHY = 300

Grade = Callable[[str, str], tuple[float, str]]


class TooLate(BaseException):
    """The alarm rang. Not an Exception, so that no `except Exception` of a library swallows it."""


class Graded(NamedTuple):
    """A worker's answer to one comparison, as it goes over the socket."""

    reward: float
    why: str
    seconds: float
    failed: bool
    """Whether the function raised, returned no finite number, or ran into the alarm."""
    well_formed: bool | None
    """Whether the response matches `reward.format_pattern` once; None where nothing is to be matched."""
    retires: bool
    """Whether the worker ends after this answer."""


def load_function(name: str, policy: str) -> Grade:
    """`math`, or `module:function` (response, answer) -> float; raises whatever importing it raises.

    Only a user's function is looked up in the current directory, after all other places.
    """
    if name == "math":
        return partial(import_module("mugrpo_megatron.rewards.math").grade, policy=policy)
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] != "mugrpo_megatron":
        sys.path.append(os.getcwd())
    function = getattr(import_module(module), attribute)
    return partial(_grade_with, function, name)


def _grade_with(function: Callable[[str, str], float], name: str, response: str, answer: str) -> tuple[float, str]:
    returned = function(response, answer)
    if isinstance(returned, str | bytes) or not hasattr(returned, "__float__"):
        raise TypeError(f"{name} returned {str(returned)[:80]!r}, a {type(returned).__name__} and not a number")
    reward = float(returned)
    if not math.isfinite(reward):
        raise ValueError(f"{name} returned {reward}")
    return reward, name


def graded(grade: Grade, answer: str, gold: str, alarm_s: float) -> Graded:
    """The verdict on one comparison. MemoryError ends the process; anything else that goes wrong scores 0."""
    start = time.perf_counter()
    failed = True
    try:
        signal.setitimer(signal.ITIMER_PROF, alarm_s, ALARM_AGAIN_S)
        reward, why = grade(answer, gold)
        signal.setitimer(signal.ITIMER_PROF, 0)
        failed = False
    except TooLate:
        signal.setitimer(signal.ITIMER_PROF, 0)
        reward, why = 0.0, f"gave up after {alarm_s:g} s"
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # an answer may break a parser in any way; it scores 0 and the run goes on
        signal.setitimer(signal.ITIMER_PROF, 0)
        reward, why = 0.0, f"failed: {_told(error)}"
    return Graded(reward, why, time.perf_counter() - start, failed, None, False)


def well_formed(response: str, pattern: str, alarm_s: float) -> bool:
    """Whether the pattern occurs exactly once; False when the search takes longer than `alarm_s` of processor time."""
    try:
        signal.setitimer(signal.ITIMER_PROF, alarm_s, ALARM_AGAIN_S)
        once = sum(1 for _ in islice(re.finditer(pattern, response), 2)) == 1
        signal.setitimer(signal.ITIMER_PROF, 0)
    except TooLate:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return False
    return once


def serve(socket: int, given: str) -> None:
    """Limit this process, load the function and grade until the parent is gone. `given`: the options as JSON."""
    options = json.loads(given)
    memory = options["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _on_alarm)
    connection = Connection(socket)
    try:
        grade = load_function(options["function"], options["policy"])
    except (Exception, SystemExit) as error:  # a user's module may fail in any way when it is imported
        connection.send_bytes(json.dumps({"failed": _told(error)}).encode())
        return
    connection.send_bytes(b"{}")
    try:
        _serve(connection, grade, options["alarm_s"], options["format_pattern"], GROWN * memory)
    except (MemoryError, TooLate, OSError):  # the parent says what became of the response, or is gone
        os._exit(1)


def _serve(connection: Connection, grade: Grade, alarm_s: float, pattern: str | None, max_bytes: float) -> None:
    """Grade batches until the parent is gone or `max_bytes` are in use."""
    while True:
        try:
            batch = json.loads(connection.recv_bytes())
        except EOFError:
            return
        for answer, gold, response in batch:
            # Without an answer the verdict is known, and only the response's form is asked for.
            found = Graded(0.0, "", 0.0, False, None, False) if answer is None else graded(grade, answer, gold, alarm_s)
            formed = None if response is None or pattern is None else well_formed(response, pattern, alarm_s)
            found = found._replace(well_formed=formed, retires=_address_space() > max_bytes)
            connection.send_bytes(json.dumps(found).encode())
            if found.retires:
                return


def _told(error: BaseException) -> str:
    """An exception's type, text and place; no place when this module itself raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:MAX_WHY] + place


def _on_alarm(_number: int, _frame: Any) -> None:
    raise TooLate


def _address_space() -> int:
    """Bytes, as RLIMIT_AS counts them."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()
