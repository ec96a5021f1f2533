"""glibc's heap on a machine without CUDA: freed memory stays in the process. Torch is not imported here."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3), by the numbers in glibc's malloc.h."""
LARGEST_KEPT = 64 << 20
"""Bytes of the largest block that the heap keeps."""


def keep_freed_memory() -> None:
    """Use one heap for all threads, which keeps freed blocks up to LARGEST_KEPT; does nothing without glibc.

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
    # Larger blocks return to the system. If the heap kept them, small blocks would split them, and no large one would
    # fit again: the heap of a model with 135M parameters grew from 6 to 11 GB. So it stays below 5, for 4 % CPU time.
    library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    library.mallopt(M_TRIM_THRESHOLD, -1)
