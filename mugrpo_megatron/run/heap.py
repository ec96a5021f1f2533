"""The C library's heap: memory that an update on CPU frees stays with the process for the next one.

glibc returns a large freed block to the system at once, and gives threads heaps of their own. An update then gets new
memory, page by page, where the one before it had some to give back: up to two thirds of its time on a virtual machine,
and twice the memory.
"""

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
