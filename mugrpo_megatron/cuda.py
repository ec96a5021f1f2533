"""Finds out whether this process has a CUDA device, from device files, NVIDIA's driver and torch.

`run_scripts/setup.sh` uses this module before any package is installed, so torch is imported only inside a function.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from mugrpo_megatron.errors import UserError

DRIVER = 580
"""The oldest major version of NVIDIA's driver that runs CUDA 13, which torch 2.11 is built for."""
TIMEOUT_S = 120
"""How long a program may take. nvidia-smi hangs when the driver is broken, and takes half a minute on a node of eight
GPUs without persistence mode."""


def may_find_cuda() -> bool:
    """Whether `finds_cuda` can be true: a driver has made a device file, and CUDA_VISIBLE_DEVICES does not hide it."""
    return not _hidden() and any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def driver_finds_gpu() -> bool:
    """Whether nvidia-smi finds a GPU that CUDA_VISIBLE_DEVICES does not hide."""
    return may_find_cuda() and driver_answers()


def driver_answers(path: str | None = None) -> bool:
    """Whether nvidia-smi finds a GPU; `path`, if given, takes the place of the variable `PATH` in the search for it."""
    return "GPU " in program_output("nvidia-smi", "-L", path=path)


def finds_cuda() -> bool:
    """Whether torch finds a CUDA device.

    Raises UserError if nvidia-smi finds a GPU that torch does not, unless CUDA_VISIBLE_DEVICES hides it.
    """
    import torch

    if torch.cuda.is_available():
        return True
    # Without this check a run meant for the GPU could silently train on the CPU, since a setup on a login node installs
    # torch's CPU build.
    if _hidden() or not driver_answers():
        return False
    build = 'run run_scripts/setup.sh --cuda; without a checkout, pip install "mugrpo-megatron[cuda]"'
    remedy = f"update NVIDIA's driver to {DRIVER} or newer" if torch.version.cuda else build
    raise UserError(
        f"nvidia-smi finds a GPU but torch {torch.__version__} does not: {remedy}; to train on the CPU, set "
        'CUDA_VISIBLE_DEVICES=""'
    )


def program_output(command: str, *arguments: str, path: str | None) -> str:
    """Run a program and return its stripped stdout; empty if it does not exist, fails or hangs."""
    executable = shutil.which(command, path=path)
    if executable is None:
        return ""
    try:
        completed = subprocess.run([executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""


def _hidden() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
