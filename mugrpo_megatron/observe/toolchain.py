"""What a CUDA machine needs besides Python packages: driver, C library, compilers.

Imports only Python's own library, so that run_scripts/setup.sh can run it before anything is installed:

    python -m mugrpo_megatron.observe.toolchain     # names what is missing; 2 if the packages would be of no use
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DRIVER = 580
"""The oldest major version of NVIDIA's driver that runs CUDA 13, which torch 2.11 is built for."""
GLIBC = (2, 34)
"""The C library that SGLang's wheels are built for."""
CUDA = 13
"""Major version of torch's CUDA build, and so of the compiler that builds kernels for it."""
TOOLKIT = "/usr/local/cuda"
PATIENCE_S = 30
"""How long a program may take; nvidia-smi hangs with a broken driver."""
PACKAGES = "on Debian and Ubuntu: apt-get install build-essential python3-dev"


@dataclass(frozen=True, slots=True)
class Tool:
    """One part of the machine."""

    part: str
    found: str
    """Version or path; what is wrong with it, or `not found`."""
    fits: bool
    use: str
    remedy: str
    """How to get it."""
    installs: bool = False
    """Whether installing Python packages is of no use without it; the others can still follow."""


def tools(environment: Mapping[str, str], include: Path, glibc: str) -> list[Tool]:
    """Every part, as programs of this environment's `PATH`, `CUDA_HOME`, `CXX` and `CC` see it.

    include: folder of Python's C headers. glibc: what `os.confstr("CS_GNU_LIBC_VERSION")` says, as "glibc 2.36".
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
    """Every part on this machine, as an engine sees it: programs next to this Python come first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return tools({**os.environ, "PATH": path}, Path(sysconfig.get_paths()["include"]), _confstr())


def driver_answers(path: str | None = None) -> bool:
    """Whether nvidia-smi finds a GPU; `path` replaces `PATH`."""
    return "GPU " in _said("nvidia-smi", "-L", path=path)


def _driver(path: str) -> list[Tool]:
    """Nothing where there is no driver at all: a login node or a container that is being built."""
    output = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", path=path)
    version = re.match(r"\d+", output)
    if not version:
        return []
    version_text, fits = output.splitlines()[0], int(version[0]) >= DRIVER
    remedy = f"update NVIDIA's driver to {DRIVER} or newer"
    return [Tool("driver", version_text, fits, f"CUDA {CUDA} needs {DRIVER} or newer", remedy, installs=True)]


def _glibc(said: str) -> Tool:
    needs = ".".join(str(part) for part in GLIBC)
    remedy = "use a newer system (Ubuntu 22.04, Debian 12, RHEL 9 or newer) or run_scripts/container/Dockerfile"
    use = f"SGLang's wheels need {needs} or newer"
    version = re.search(r"(\d+)\.(\d+)", said)
    fits = version is not None and (int(version[1]), int(version[2])) >= GLIBC
    return Tool("glibc", version[0] if version else "not found", fits, use, remedy, installs=True)


def _nvcc(environment: Mapping[str, str], path: str) -> Tool:
    """The compiler that SGLang takes: that of CUDA_HOME, else the one on PATH, else the one in TOOLKIT."""
    use = f"CUDA {CUDA}: compiles SGLang's kernels"
    remedy = f"install the CUDA {CUDA} toolkit (on clusters: module load cuda/{CUDA}), or point CUDA_HOME at it"
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    place = f"{home}/bin/nvcc" if home else shutil.which("nvcc", path=path) or f"{TOOLKIT}/bin/nvcc"
    release = re.search(r"release (\d+)\.\d+", _said(place, "--version", path=path))
    if not release:
        return Tool("nvcc", f"not found in {home}" if home else "not found", False, use, remedy)
    return Tool("nvcc", f"{release[0]} ({place})", int(release[1]) == CUDA, use, remedy)


def _program(
    part: str, command: str, path: str, use: str, others: tuple[str, ...] = (), remedy: str = PACKAGES
) -> Tool:
    places = [place for name in (*command.split()[:1], *others) if (place := shutil.which(name, path=path))]
    return Tool(part, places[0] if places else "not found", bool(places), use, remedy)


def _headers(include: Path) -> Tool:
    header = include / "Python.h"
    place = str(include) if header.is_file() else f"not in {include}"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    remedy = f"on Debian and Ubuntu: apt-get install {version}; on RHEL: the package ends in -devel"
    return Tool("Python.h", place, header.is_file(), "Triton compiles against it", remedy)


def _confstr() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except ValueError:  # another C library
        return ""


def _said(command: str, *arguments: str, path: str | None) -> str:
    """What the command prints; empty if it does not exist, fails or hangs."""
    place = shutil.which(command, path=path)
    if place is None:
        return ""
    try:
        done = subprocess.run([place, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    """Print what is missing, except ninja, which setup.sh installs."""
    missing = [tool for tool in tools_here() if not tool.fits and tool.part != "ninja"]
    for tool in missing:
        print(f"setup: {tool.part}: {tool.found}; {tool.use}; {tool.remedy}", file=sys.stderr)
    return 2 if any(tool.installs for tool in missing) else 0


if __name__ == "__main__":
    sys.exit(main())
