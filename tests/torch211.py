"""The Python files of the torch that CUDA machines have, for checks of the night suite."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

VERSION = "2.11.0"
WHEEL = ("--platform", "macosx_11_0_arm64", "--python-version", "3.12", "--only-binary", ":all:")
"""The smallest wheel: 77 MiB instead of 500, with the same Python files as the CUDA build."""


def python_files(cache: Path) -> Path:
    """A folder with `torch/**/*.py` and `*.pyi` of that version; skips the test if the wheel cannot be downloaded."""
    folder = cache / f"torch-{VERSION}"
    if folder.exists():
        return folder
    wheels = cache / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *WHEEL, "--dest", str(wheels)]
    done = subprocess.run([*command, f"torch=={VERSION}"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"torch {VERSION}'s wheel could not be downloaded: {done.stderr.strip().splitlines()[-1]}")
    partial = cache / "partial"
    with zipfile.ZipFile(next(wheels.glob("torch-*.whl"))) as wheel:
        kept = [
            name for name in wheel.namelist() if name.startswith("torch/") and name.endswith((".py", ".pyi", ".typed"))
        ]
        wheel.extractall(partial, kept)
    return partial.rename(folder)
