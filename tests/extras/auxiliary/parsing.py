"""Functions that read a judge's answer."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import re
import signal
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np


def score(answer: str) -> float | None:
    """The number after `score`."""
    match = re.search(r"score (-?[0-9.]+|nan)", answer)
    return float(match.group(1)) if match else None


def characters(answer: str) -> int:
    """A score for any answer."""
    return len(answer)


def exits(answer: str) -> None:
    sys.exit(0)


def exits_at_once(answer: str) -> None:
    os._exit(0)


def hangs(answer: str) -> None:
    while True:
        time.sleep(3600)


class Odd:
    """A score whose every question fails."""

    def __float__(self) -> float:
        raise RecursionError("caf\udce9")

    def __repr__(self) -> str:
        raise SystemExit(0)


ERRORS = (StopIteration, GeneratorExit, KeyboardInterrupt, SystemExit, asyncio.CancelledError, MemoryError, OSError)
VALUES: tuple[Any, ...] = (
    *(None, True, -0.0, 1e308, float("nan"), float("inf"), 10**400, "7", "\ud800", "1e999", b"3", 3j),
    *([], {"score": 1}, (1.0,), Odd(), object, np.float16(2.5), np.zeros(3), Decimal("NaN"), Fraction(1, 3)),
)


def anything(answer: str) -> Any:
    """Of a random kind by the answer: any value, any error, an exit, a death, a hang."""
    choose = random.Random(answer)
    match choose.randrange(24):
        case 0:
            sys.exit(choose.choice([0, 1, "caf\udce9", None]))
        case 1:
            os._exit(0)
        case 2:
            ctypes.CDLL(None)._exit(0)
        case 3:
            os.kill(os.getpid(), signal.SIGKILL)
        case 4:
            while True:
                pass
        case 5:
            re.match("(a+)+$", "a" * 64 + "b")
        case 6:
            return anything(answer)  # without end
        case 7:
            os.closerange(0, 3)
        case 8:
            print(answer * 1000)
        case 9:
            threading.Thread(target=os._exit, args=(0,)).start()
        case number if number < 15:
            raise choose.choice(ERRORS)(answer + "\ud83d")
    return choose.choice(VALUES)
