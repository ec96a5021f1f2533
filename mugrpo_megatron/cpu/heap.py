"""glibc's heap on a machine without CUDA: memory that is freed stays in the process. Torch is not imported here."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Parameters of mallopt(3), by the numbers in glibc's malloc.h."""


def keep_freed_memory() -> None:
    """From here on one heap serves all threads and keeps what they free; does nothing without glibc.

    Call it first of all: heaps that other threads have by then stay in use, as that of the thread which PyArrow starts
    when it is imported.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):  # another C library than glibc
        return
    library.mallopt(M_ARENA_MAX, 1)
    library.mallopt(M_MMAP_MAX, 0)
    library.mallopt(M_TRIM_THRESHOLD, -1)
