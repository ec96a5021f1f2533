"""A disk that is full, or a process that is killed, from its n-th file operation on."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from mugrpo_megatron.files import durable

Fault = Literal["full", "killed"]

TAKING_ROOM = ("fsync", "mkdir", "link", "write")
"""What a full disk refuses."""
CHANGING = (*TAKING_ROOM, "rename", "replace", "unlink", "rmdir", "ftruncate")
"""What a killed process does no more, its own cleaning up included."""


class Killed(BaseException):
    """Simulates SIGKILL: nothing catches it, and nothing after it has an effect."""


@dataclass
class Disk:
    """Counts the operations that the fault concerns; from number `last` on they fail."""

    fault: Fault
    last: int
    count: int = 0

    @property
    def failed(self) -> bool:
        return self.count > self.last

    def tick(self, operation: str) -> None:
        if operation not in (TAKING_ROOM if self.fault == "full" else CHANGING):
            return
        self.count += 1
        if self.failed and self.fault == "killed":
            raise Killed
        if self.failed:
            raise OSError(errno.ENOSPC, "No space left on device")


class Writes:
    """A file whose writes are counted."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> Any:
        self._disk.tick("write")
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Writes:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def failing(disk: Disk) -> Iterator[None]:
    """Every file operation of this process goes through `disk` while the block runs."""

    def instrument(original: Callable[..., Any], operation: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            disk.tick(operation)
            return original(*args, **kwargs)

        return wrapper

    opened = io.open

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        handle = opened(file, mode, *args, **kwargs)
        return Writes(handle, disk) if set(mode) & set("wax+") else handle

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "mkdir", "link", "rename", "replace", "unlink", "rmdir", "ftruncate"):
            patch.setattr(os, name, instrument(getattr(os, name), name))
        patch.setattr(durable, "_exchange_atomically", instrument(durable._exchange_atomically, "rename"))
        for module in (io, builtins):
            patch.setattr(module, "open", open_)
        yield
