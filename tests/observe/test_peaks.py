"""Peaks of devices and of memory."""

from __future__ import annotations

import os
from mmap import mmap

import numpy as np
import pytest

from mugrpo_megatron.observe.environment import group_memory, learner_memory_peak, peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
    ],
)
def test_a_device_is_known_by_its_name(name: str, peak: float) -> None:
    assert peak_flops(name) == peak


def test_an_unknown_device_has_no_peak() -> None:
    assert peak_flops("NVIDIA GeForce RTX 4090") is None


def test_memory_that_is_touched_is_counted() -> None:
    size = 64 << 20
    held = np.frombuffer(mmap(-1, size), dtype=np.uint8)  # not from the heap, which may have kept as much
    before = group_memory(os.getpid())
    held[:] = 1
    assert group_memory(os.getpid()) - before > size / 2
    assert learner_memory_peak() >= held.nbytes
    assert group_memory(2**22 + 1) == 0.0, "no such process"
