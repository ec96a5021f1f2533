"""Leaving on request: SIGTERM asks, the run answers at its next safe place, with everything on disk."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


class Stopped(Exception):
    """The run left because it was asked to; the same command continues it."""


@dataclass
class StopRequest:
    """Whether somebody asked this process to stop."""

    asked: bool = False


@contextmanager
def listening_for_sigterm() -> Iterator[StopRequest]:
    """Turn SIGTERM (pre-emption, a scheduler's time limit) into a request for as long as the block runs."""
    request = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:
        request.asked = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
