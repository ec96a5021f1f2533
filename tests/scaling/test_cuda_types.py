"""The calls of torch, checked against the torch of CUDA machines; the suite runs on a later one.

A call with an argument that torch 2.11 does not have is a TypeError there, in the first update on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torch211 import python_files

ROOT = Path(__file__).parents[2]
OURS = ("mugrpo_megatron/", "checkpoints_convert/", "run_scripts/", "tests/")


@pytest.mark.night
@pytest.mark.process
def test_our_calls_have_the_types_of_cudas_torch(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """mypy over everything, with that version's Python files and stubs in front of the installed ones."""
    torch = python_files(pytestconfig.cache.mkdir("torch211"))
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), "--no-error-summary"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "MYPYPATH": str(torch)}, capture_output=True, text=True)
    wrong = [line for line in done.stdout.splitlines() if line.startswith(OURS) and ": error: " in line]
    assert wrong == []
    assert done.returncode == 0 or f"{torch}/torch/" in done.stdout, done.stdout + done.stderr
