"""Places where writing fails: full and read-only disks, directories without permission."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
