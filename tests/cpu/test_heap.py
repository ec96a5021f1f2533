"""Freed blocks are used again without a page fault, and very large ones are given back."""

from __future__ import annotations

import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from mmap import PAGESIZE

import pytest

from mugrpo_megatron.cpu.heap import LARGEST_KEPT, keep_freed_memory

BLOCK = 48 * 2**20
"""Bytes of a block that glibc returns to the system when it is freed: more than any threshold that it learns."""


def faults(size: int) -> list[int]:
    """Page faults of writing a block, of writing it again after it was freed, and of writing it in a new thread."""
    keep_freed_memory()

    def write(_: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        bytes.fromhex("").ljust(size, b"x")
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    result = [write(0), write(1)]
    with ThreadPoolExecutor(1) as pool:
        return [*result, *pool.map(write, [2])]


def measured(size: int) -> list[int]:
    """`faults` in a process of its own, because the setting is the process's."""
    code = f"from tests.cpu.test_heap import faults; print(*faults({size}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_freed_memory_is_written_again_without_faults() -> None:
    pages = BLOCK // PAGESIZE
    first, again, other_thread = measured(BLOCK)
    assert first > pages // 2
    assert again < pages // 10
    assert other_thread < pages // 10
    assert measured(2 * LARGEST_KEPT)[1] > pages, "else small blocks would split it"
