"""glibc's heap on a machine without CUDA: memory that is freed stays in the process. Torch is not imported here."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Parameters of mallopt(3), by the numbers in glibc's malloc.h."""


def keep_freed_memory() -> None:
    """Use one heap for all threads, which keeps freed memory; does nothing without glibc.

    Call it first: heaps that other threads already have stay in use, such as the heap of the thread that PyArrow
    starts when it is imported.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    # Other C libraries, such as musl, have no mallopt.
    if not hasattr(library, "mallopt"):
        return
    library.mallopt(M_ARENA_MAX, 1)
    library.mallopt(M_MMAP_MAX, 0)
    library.mallopt(M_TRIM_THRESHOLD, -1)
