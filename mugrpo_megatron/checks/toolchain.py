"""Tools that a CUDA machine needs besides Python packages: driver, C library, compilers.

Imports only Python's own library, so that run_scripts/setup.sh can run it before anything is installed:

    python -m mugrpo_megatron.checks.toolchain     # prints what is missing; exits with 2 if packages would not run here
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from mugrpo_megatron.cuda import DRIVER, program_output

GLIBC = (2, 34)
"""Oldest C library that SGLang's wheels run on."""
CUDA = 13
"""Major version of torch's CUDA build, and so of the compiler that builds kernels for it."""
TOOLKIT = "/usr/local/cuda"
PACKAGES = "on Debian and Ubuntu: apt-get install build-essential python3-dev"


State = Literal["ok", "absent", "broken"]


class CheckResult(NamedTuple):
    """The state of one component of the machine or of the software."""

    name: str
    state: State
    detail: str
    """Version, size or model; for a broken package the error of its import."""
    use: str
    needed: bool
    """Whether this machine cannot train without it."""
    remedy: str = ""
    """Instructions to get or repair the component, where it is not ok."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool or library of the machine."""

    name: str
    detail: str
    """Version or path of the tool; `not found`, or `not in` a folder, if the tool is missing."""
    fits: bool
    use: str
    remedy: str
    """Instructions to install it."""
    blocks_setup: bool = False
    """Whether Python packages are useless without it; the other tools can be installed later."""


def tools(environment: Mapping[str, str], include: Path, glibc: str) -> list[Tool]:
    """Returns every tool, found by the variables `PATH`, `CUDA_HOME`, `CUDA_PATH`, `CXX` and `CC` of `environment`.

    include: folder of Python's C headers. glibc: value of `os.confstr("CS_GNU_LIBC_VERSION")`, such as "glibc 2.36".
    """
    path = environment.get("PATH", "")
    return [
        *_driver(path),
        _glibc(glibc),
        _nvcc(environment, path),
        _program("c++", environment.get("CXX", "c++"), path, "compiles SGLang's kernels when an engine starts"),
        _program("gcc", environment.get("CC", "gcc"), path, "compiles Triton's launchers", others=("clang",)),
        _program(
            "ninja", "ninja", path, "builds SGLang's kernels", remedy=".venv/bin/pip install ninja, as setup.sh does"
        ),
        _headers(include),
    ]


def tools_here() -> list[Tool]:
    """Returns this machine's tools as an engine would find them: programs next to this Python come before those on
    PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return tools({**os.environ, "PATH": path}, Path(sysconfig.get_paths()["include"]), _confstr())


def _driver(path: str) -> list[Tool]:
    """Returns the GPU's driver as a list of one tool; empty without a driver, as on a login node or in a container's
    build."""
    output = program_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", path=path)
    version = re.match(r"\d+", output)
    if not version:
        return []
    version_text, fits = output.splitlines()[0], int(version[0]) >= DRIVER
    remedy = f"update NVIDIA's driver to {DRIVER} or newer"
    return [Tool("driver", version_text, fits, f"CUDA {CUDA} needs {DRIVER} or newer", remedy, blocks_setup=True)]


def _glibc(confstr: str) -> Tool:
    needs = ".".join(map(str, GLIBC))
    remedy = "use a newer system (Ubuntu 22.04, Debian 12, RHEL 9 or newer) or run_scripts/container/Dockerfile"
    use = f"SGLang's wheels need {needs} or newer"
    version = re.search(r"(\d+)\.(\d+)", confstr)
    fits = version is not None and (int(version[1]), int(version[2])) >= GLIBC
    return Tool("glibc", version[0] if version else "not found", fits, use, remedy, blocks_setup=True)


def _nvcc(environment: Mapping[str, str], path: str) -> Tool:
    """Returns the compiler that SGLang will use: in CUDA_HOME, else CUDA_PATH, else on PATH, else in TOOLKIT."""
    use = f"CUDA {CUDA}: compiles SGLang's kernels"
    remedy = f"install the CUDA {CUDA} toolkit (on clusters: module load cuda/{CUDA}), or point CUDA_HOME at it"
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    compiler = f"{home}/bin/nvcc" if home else shutil.which("nvcc", path=path) or f"{TOOLKIT}/bin/nvcc"
    release = re.search(r"release (\d+)\.\d+", program_output(compiler, "--version", path=path))
    if not release:
        return Tool("nvcc", f"not found in {home}" if home else "not found", False, use, remedy)
    return Tool("nvcc", f"{release[0]} ({compiler})", int(release[1]) == CUDA, use, remedy)


def _program(
    name: str, command: str, path: str, use: str, others: tuple[str, ...] = (), remedy: str = PACKAGES
) -> Tool:
    candidates = (shutil.which(program, path=path) for program in (*command.split()[:1], *others))
    executable = next(filter(None, candidates), None)
    return Tool(name, executable or "not found", executable is not None, use, remedy)


def _headers(include: Path) -> Tool:
    header = include / "Python.h"
    detail = str(include) if header.is_file() else f"not in {include}"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    remedy = f"on Debian and Ubuntu: apt-get install {version}; on RHEL: the package ends in -devel"
    return Tool("Python.h", detail, header.is_file(), "Triton compiles against it", remedy)


def _confstr() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except ValueError:  # raised by another C library than glibc
        return ""


def main() -> int:
    """Print the tools that are missing or of a wrong version, except ninja, which setup.sh installs.

    Returns 2 if one of them blocks the setup, else 0.
    """
    missing = [tool for tool in tools_here() if not tool.fits and tool.name != "ninja"]
    for tool in missing:
        print(f"setup: {tool.name}: {tool.detail}; {tool.use}; {tool.remedy}", file=sys.stderr)
    return 2 if any(tool.blocks_setup for tool in missing) else 0


if __name__ == "__main__":
    sys.exit(main())
