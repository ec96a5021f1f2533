"""Describes the machine and the packages with which a figure was measured."""

from __future__ import annotations

import platform
import re
import tomllib
from collections.abc import Iterable, Sequence
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


def absent(requirements: Iterable[str]) -> list[str]:
    """The packages of these requirements that are not installed."""
    names = [re.split(r"[^\w.-]", requirement)[0] for requirement in requirements]
    return [name for name in names if installed(name) is None]


def requirements(project: Path) -> list[str]:
    """The packages that a pyproject.toml requires in any case."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))
    return list(table["project"]["dependencies"])
