"""The versions of the software, and the machine: recorded with every run, and shown by `mugrpo doctor` and the
report."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from mugrpo_megatron.errors import UserError

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
"""Packages whose versions affect a run's results or its speed."""


SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_REMEDY = "docker run --ipc host or --shm-size"


def installed_version(distribution: str) -> str | None:
    """Returns the version of a distribution; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def environment() -> dict[str, str]:
    """Returns name -> version or description: packages, Python, system, cores, memory, devices."""
    packages = {name: number for name in PACKAGES if (number := installed_version(name))}
    return packages | {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": f"{usable_cores()} usable of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "devices": devices(),
    }


def invocation() -> dict[str, str]:
    """Returns host and command line of this process and the commit of its code, without what is unknown."""
    program = Path(sys.argv[0]).name
    command = shlex.join(["mugrpo" if program == "__main__.py" else program, *sys.argv[1:]])
    values = {"host": platform.node(), "command": command, "commit": commit()}
    return {name: value for name, value in values.items() if value}


def commit(package: Path = Path(__file__).parents[1]) -> str:
    """Returns the commit of the package's code, from its checkout or its wheel; "" if unknown.

    A checkout whose files differ from the commit has a + at the end.
    """
    checkout = package.parent
    if not (checkout / ".git").exists():
        with suppress(OSError):
            # setup.py writes this file into a wheel.
            return (package / "commit.txt").read_text(encoding="ascii").strip()
        return ""
    describe = ("git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(describe, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return ""


def process_seconds() -> float:
    """Seconds since the system started this process, its imports included."""
    return time.time() - psutil.Process().create_time()


def rank_of_environment() -> int:
    """Returns the rank that torchrun gave this process, before a process group exists; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Returns how many cores this process may use: the smaller of its affinity and its cgroup's quota (v2), rounded up
    to whole cores."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # there is no quota file, or it says "max"
        limit, period = map(int, quota.read_text(encoding="ascii").split())
        cores = max(1, min(cores, -(-limit // period)))
    return cores


def bfloat16_products(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the CPU's flag that says it multiplies bfloat16, such as `amx_bf16`; "" if none is found."""
    with suppress(OSError):
        for line in cpuinfo.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):  # flags on x86, Features on Arm
                return next((flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags.split()), "")
    return ""


def devices() -> str:
    """Returns the CUDA devices, such as `2 x NVIDIA H200 (139 GiB)`, or `none (CPU)`."""
    import torch  # not at the top: doctor runs without torch

    if not torch.cuda.is_available():
        return "none (CPU)"
    properties = torch.cuda.get_device_properties(0)
    return f"{torch.cuda.device_count()} x {properties.name} ({properties.total_memory / 2**30:.0f} GiB)"


BF16_PEAK = {
    "H200 NVL": 835e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H800 PCIe": 756e12,
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
}
"""Substring of a device's name -> FLOP/s of dense bfloat16 products, from NVIDIA's data sheets; the first match
counts. Names without a form factor are SXM modules."""


def peak_flops(device: str) -> float | None:
    """Returns the dense bfloat16 FLOP/s of a CUDA device by its name; None for a device that the table lacks, such as a
    CPU."""
    return next((peak for name, peak in BF16_PEAK.items() if name in device), None)


def reset_peak_memory() -> None:
    """Start a new measurement for `learner_memory_peak`. Without CUDA this does nothing: the peak is then that since
    the process's start."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def learner_memory_peak() -> float:
    """Returns the most bytes that torch reserved on the device since `reset_peak_memory`.

    Without CUDA it is the most resident memory of this process since its start.
    """
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_reserved())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def device_memory_in_use() -> float:
    """Returns the bytes in use on this process's CUDA device, by all processes; 0 without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def group_memory(leader: int) -> float:
    """Returns the resident bytes of a process and its descendants; shared pages count once for each process."""
    total = 0.0
    with suppress(psutil.Error):
        root = psutil.Process(leader)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def ignore_library_warnings() -> None:
    """Ignore all warnings of Megatron and torch. Many are about missing packages, which `mugrpo doctor` reports."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")


def missing_wandb_error(project: str | None) -> UserError:
    """Returns the error for a recipe with `track.wandb_project` where the package wandb is not installed."""
    return UserError(
        f'track.wandb_project = "{project}" needs the wandb package: pip install "mugrpo-megatron[wandb]", or remove '
        "the key"
    )
