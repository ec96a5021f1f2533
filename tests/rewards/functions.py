"""Reward functions that fail in all the ways that a user's can."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

NOTES = "HANGS_OF_TESTS"
"""Environment variable: the directory in which a function that is about to hang leaves its guard's process id."""


def behave(response: str, answer: str) -> float:
    """The reward is the number in `response`; any other text is an order to misbehave."""
    if response == "":
        return 0.0
    if response == "die":
        ctypes.CDLL(None)._exit(3)
    if response == "leave":
        os._exit(0)
    if response == "hang in C":
        note_hang()
        _wait()
    if response == "wait":
        _wait()
    if response == "hang in Python":
        while True:
            pass
    if response == "swallow the alarm":
        note_hang()
        while True:
            try:
                time.sleep(0)
            except BaseException:
                continue
    if response == "eat memory":
        return float(len(bytearray(4 << 30)))
    if response.startswith("start "):
        return float(started(response.removeprefix("start ")))
    if response == "raise":
        raise RuntimeError("no")
    if response == "nan":
        return float("nan")
    if response == "text":
        return "0.5"  # type: ignore[return-value]
    if response == "nothing":
        return None  # type: ignore[return-value]
    if response == "exit":
        sys.exit("no more")
    if response == "interrupt":
        raise KeyboardInterrupt("mine")
    if response == "cancel":
        raise asyncio.CancelledError("mine")
    if response == "end":
        raise GeneratorExit("mine")
    if response == "pid":
        return float(os.getpid())
    return float(response) + float(answer or 0)


def note_hang() -> None:
    """For `tests.rewards.patience`."""
    if NOTES in os.environ:
        Path(os.environ[NOTES], str(os.getppid())).touch()


def _wait() -> int:
    return ctypes.CDLL(None).usleep(2_000_000_000)  # type: ignore[no-any-return]


def started(how: str) -> int:
    """The id of a process that would outlive its worker, as those of rewards that run code may."""
    if how == "fork":
        return os.fork() or _wait()  # it keeps all of the worker's descriptors
    detached = how == "detached"
    sleep = ["sh", "-c", "sleep 977 & echo $!"] if detached else ["sleep", "977"]
    with_output = subprocess.Popen(sleep, start_new_session=detached, stdout=subprocess.PIPE)
    return int(with_output.stdout.readline()) if detached and with_output.stdout else with_output.pid


def grow(response: str, answer: str) -> float:
    """Leaves memory behind with every call."""
    _left_behind.append(bytearray(80 << 20))
    return float(os.getpid())


_left_behind: list[bytearray] = []


def half_scored(completions: list[str], **columns: object) -> list[float | None]:
    """No reward for a text of odd length; else whether its length is a multiple of 4."""
    return [None if len(text) % 2 else float(len(text) % 4 == 0) for text in completions]


def parity(response: str, answer: str) -> float:
    """A coin flip that depends on the response: random answers are rewarded half of the time."""
    return float(sum(map(ord, response)) % 2)


def gold_is_in_row(response: str, answer: object, row: dict[str, object]) -> float:
    """1 when the gold and the row arrived as they were sent."""
    return float(row == {"gold": answer, "other": [1, {"a": None}]})


def behave_together(responses: list[str], answers: list[str]) -> list[float]:
    """`behave` for a whole group; the reward is the group's size."""
    for response in responses:
        behave(response, "0")
    return [float(len(responses))] * len(responses)


async def judge(response: str, answer: str) -> float:
    """The reward is the number in `response`; others wait or spin for ever."""
    if response == "wait":
        await asyncio.Event().wait()
    while response == "spin":
        pass
    if response in ("interrupt", "cancel"):
        behave(response, answer)
    return float(response)


NUMBER = 7
"""No function."""


def prompt_length(response: str, prompt: str) -> float:
    return float(len(prompt))
