"""What the devices of a run can do at most, and how much memory a process has taken."""

from __future__ import annotations

import resource
from contextlib import suppress

import psutil

BF16_PEAK = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
}
"""Part of a device's name -> FLOP/s of dense bfloat16 products, from NVIDIA's data sheets of the SXM modules."""


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 FLOP/s of a CUDA device by its name; None where no data sheet is in the table, as for a CPU."""
    return next((peak for name, peak in BF16_PEAK.items() if name in device), None)


def reset_peak_memory() -> None:
    """Start measuring `learner_memory_peak` again on CUDA; a process's peak in host memory cannot be reset."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def learner_memory_peak() -> float:
    """Most bytes that this process reserved on its device since `reset_peak_memory`; without CUDA, resident ones."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_reserved())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def device_memory_in_use() -> float:
    """Bytes in use on this process's CUDA device, by all processes; 0 without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def group_memory(leader: int) -> float:
    """Resident bytes of a process and its descendants; pages that they share count once for each of them."""
    total = 0.0
    with suppress(psutil.Error):
        process = psutil.Process(leader)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += one.memory_info().rss
    return total
