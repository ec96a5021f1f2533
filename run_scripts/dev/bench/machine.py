"""Describes the machine and the packages with which a figure was measured."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "megatron-core", "sglang", "transformers", "transformer-engine", "liger-kernel", "trl")


def describe(command: Sequence[str]) -> dict[str, Any]:
    """Date, machine, command and versions, as JSON values."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "command": " ".join([Path(command[0]).name, *command[1:]]),
        "versions": {"python": platform.python_version()} | {name: installed(name) for name in PACKAGES},
    }


def processor() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")


def installed(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
