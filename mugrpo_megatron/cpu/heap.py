"""Settings of glibc's heap for a process without CUDA, which keep freed memory in the process. Imports no torch."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""The numbers of three parameters of mallopt(3), from glibc's malloc.h."""
LARGEST_KEPT = 64 << 20
"""Bytes of the largest block that the heap keeps."""


def keep_freed_memory() -> None:
    """Let all threads use one heap that keeps freed blocks up to LARGEST_KEPT; does nothing without glibc.

    Call it before anything else: a heap that another thread already has, such as that of the thread that PyArrow starts
    when it is imported, stays in use.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    # Other C libraries, such as musl, have no mallopt.
    if not hasattr(library, "mallopt"):
        return
    library.mallopt(M_ARENA_MAX, 1)
    # Larger blocks are returned to the system. If the heap kept them, small blocks would be cut out of them, and the
    # next large block would not fit: the heap of a model with 135M parameters then grew from 6 to 11 GB. With this
    # limit it stays below 5 GB, at the cost of 4 % more CPU time.
    library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    library.mallopt(M_TRIM_THRESHOLD, -1)
