"""Places where writing fails: full and read-only disks, folders without permission, a kill at any operation."""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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


MS_RDONLY, MS_REMOUNT = 1, 32
MNT_DETACH = 2
CAPABILITIES_3 = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2
"""Constants of mount(2), umount2(2) and capabilities(7)."""


@contextmanager
def disk(path: Path, size: int) -> Iterator[Path]:
    """A file system of `size` bytes, at least a page, at `path`; skips the test where mounting is not allowed."""
    path.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, f"size={size}".encode()):
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield path
    finally:
        libc.umount2(os.fsencode(path), MNT_DETACH)


def make_read_only(path: Path) -> None:
    """Remount a `disk`."""
    assert not ctypes.CDLL(None).mount(b"tmpfs", os.fsencode(path), b"tmpfs", MS_REMOUNT | MS_RDONLY, None)


@contextmanager
def permissions_count() -> Iterator[None]:
    """File permissions hold for this thread in the block, even when it is root's."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_3, 0)
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    assert not libc.capget(header, held)
    less = (ctypes.c_uint32 * 6)(*held)
    less[0] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
    assert not libc.capset(header, less)
    try:
        yield
    finally:
        assert not libc.capset(header, held)
