"""The constraints: one version of every package, in its ranges; and our calls have the types of CUDA's torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mugrpo_megatron.extras.doctor.fix import STACKS
from tests.torch211 import python_files

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCKED = {
    "constraints-cpu.txt": ("cpu", "dev", "study", "compare"),
    "constraints-cuda.txt": ("cuda", "dev", "study"),
    "constraints-cpu-new.txt": ("cpu-new", "dev", "study"),
    "constraints-cuda-new.txt": ("cuda-new", "dev", "study"),
}
"""File -> the extras that are installed with it."""


def requirements(name: str) -> list[Requirement]:
    lines = (ROOT / "run_scripts" / name).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def pins(name: str) -> dict[str, str]:
    """Package -> version."""
    found: dict[str, str] = {}
    for requirement in requirements(name):
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        assert found.setdefault(canonicalize_name(requirement.name), specifier.version) == specifier.version
    return found


@pytest.mark.parametrize(("name", "extras"), LOCKED.items(), ids=LOCKED)
def test_every_requirement_is_pinned_in_its_range(name: str, extras: tuple[str, ...]) -> None:
    locked = pins(name)
    asked = [*PROJECT["dependencies"], *(line for e in extras for line in PROJECT["optional-dependencies"][e])]
    for requirement in map(Requirement, asked):
        version = locked.get(canonicalize_name(requirement.name))
        assert version, f"{requirement} is not in {name}"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: {name} has {version}"


@pytest.mark.parametrize("name", ["constraints-cuda", "constraints-cuda-new"])
def test_the_cuda_lock_is_of_its_input(name: str) -> None:
    locked = pins(f"{name}.txt")
    for requirement in requirements(f"{name}.in"):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


def test_transformer_engine_is_in_megatrons_range_everywhere() -> None:
    (extra,) = map(Requirement, PROJECT["optional-dependencies"]["te"])
    built = re.search(r"^TE_VERSION=(\S+)", (ROOT / "run_scripts" / "setup.sh").read_text(), re.MULTILINE)
    assert built
    assert extra.specifier.contains(built[1])
    assert not extra.specifier.contains("2.12.0")


@pytest.mark.parametrize("suffix", ["", "-new"])
def test_a_stack_is_one_everywhere(suffix: str) -> None:
    """Its extras, its locks, what setup.sh adds on CPU and what `doctor` has as tested."""
    cpu, cuda = pins(f"constraints-cpu{suffix}.txt"), pins(f"constraints-cuda{suffix}.txt")
    pair = cuda["megatron-core"], cuda["sglang"]
    assert cpu["megatron-core"] == pair[0]
    stack = STACKS[pair[0]]
    assert (stack.name, stack.sglang) == (suffix.lstrip("-") or "pinned", pair[1])


@pytest.mark.night
@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "python"),
    [("constraints-cuda.txt", "3.11"), ("constraints-cuda.txt", "3.12"), ("constraints-cuda-new.txt", "3.12")],
)
def test_the_cuda_lock_resolves(name: str, python: str) -> None:
    """uv finds no other versions for pyproject.toml under the lock, and needs nothing that it lacks."""
    if not shutil.which("uv"):
        pytest.skip("uv is not installed")
    command = ["uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--python-version", python]
    command += ["--python-platform", "x86_64-manylinux_2_34", "--constraint", f"run_scripts/{name}"]
    command += [word for extra in LOCKED[name] for word in ("--extra", extra)]
    done = subprocess.run([*command, "pyproject.toml"], cwd=ROOT, capture_output=True, text=True)
    if "error sending request" in done.stderr or "dns error" in done.stderr:
        pytest.skip(f"the package index cannot be reached: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    lines = (ROOT / "run_scripts" / name).read_text().splitlines()
    assert set(done.stdout.splitlines()) <= set(lines)


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
