"""Versions of the software and the machine: recorded with every run, shown by doctor and report."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.toolchain import DRIVER, driver_answers

PACKAGES = (
    "mugrpo-megatron",
    "torch",
    "megatron-core",
    "sglang",
    "transformers",
    "triton",
    "transformer-engine",
    "flash-attn",
    "math-verify",
    "numpy",
)
"""Distributions that affect what a run computes and how fast."""


def installed(distribution: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def environment() -> dict[str, str]:
    """Name -> version or description: installed packages, Python, system, cores, memory, devices."""
    packages = {name: found for name in PACKAGES if (found := installed(name))}
    return packages | {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": f"{usable_cores()} usable of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "devices": devices(),
    }


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may run on: its affinity, and the quota of its control group (cgroups v2), rounded up."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no quota file, or "max"
        limit, period = map(int, quota.read_text(encoding="ascii").split())
        cores = max(1, min(cores, -(-limit // period)))
    return cores


def may_find_cuda() -> bool:
    """False only where `finds_cuda` is, as no driver has made a device; imports nothing."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def finds_cuda() -> bool:
    """Whether torch finds a CUDA device.

    Raises UserError if nvidia-smi finds a GPU that torch does not, unless CUDA_VISIBLE_DEVICES hides it: a run that was
    meant for the GPU would train on the CPU, without a word. An environment that was made on a login node without a GPU
    has a torch for CPUs.
    """
    import torch

    if torch.cuda.is_available():
        return True
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    if hidden or not driver_answers():
        return False
    remedy = f"update NVIDIA's driver to {DRIVER} or newer" if torch.version.cuda else "run run_scripts/setup.sh --cuda"
    raise UserError(
        f"nvidia-smi finds a GPU but torch {torch.__version__} does not: {remedy}; to train on the CPU, set "
        'run.device = "cpu", or CUDA_VISIBLE_DEVICES=""'
    )


def devices() -> str:
    """The CUDA devices, such as `2 x NVIDIA H200 (139 GiB)`, or `none (CPU)`."""
    import torch  # here, so that doctor runs on a machine without torch

    if not torch.cuda.is_available():
        return "none (CPU)"
    properties = torch.cuda.get_device_properties(0)
    return f"{torch.cuda.device_count()} x {properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
