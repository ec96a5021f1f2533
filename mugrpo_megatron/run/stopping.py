"""Graceful shutdown: after SIGTERM the run saves at its next safe point and exits with 0."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


class Stopped(Exception):
    """The run stopped on request, with everything saved; the same command continues it."""


@dataclass
class StopRequest:
    """Whether this process was asked to stop."""

    asked: bool = False


@contextmanager
def listening_for_sigterm() -> Iterator[StopRequest]:
    """Turn SIGTERM (pre-emption, a scheduler's time limit) into a request while the block runs."""
    request = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:
        request.asked = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
