"""A step of run_scripts/dev/bench/ten.py: Transformer Engine on one GPU, installed there, tested and timed.

`carry.sh` brings the library, and the sources of its torch extension. They are compiled there, for that machine's torch
and Python, unless a wheel that was compiled ahead lies beside them:

    PYTHON -m run_scripts.dev.bench.ten_te     # here, after carry.sh, with that machine's Python, torch and headers
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from run_scripts.dev.bench.ten_learner import Row, learner_of, seconds, update_row

SOURCES = Path(".gpu/te")
SITE = Path.home() / "te"
"""Folder into which carried.sh unpacks the library."""
EXTENSION = "transformer_engine_torch"
"""The torch extension: its package, and the first letters of its files."""
IMPORT = "import transformer_engine.pytorch"
VARIABLES = {"NVTE_FRAMEWORK": "pytorch"}
"""Else it takes a machine with JAX for one that wants its extension for JAX, too."""


def transformer_engine(small: bool) -> Iterator[Row]:
    """Yield the seconds of the compilation, the tests' verdict on its layers, and updates at 1.5B with and without
    them."""
    sys.path.insert(0, str(SITE))
    os.environ |= VARIABLES | {"PYTHONPATH": os.pathsep.join([str(SITE), *filter(None, [os.getenv("PYTHONPATH")])])}
    yield {"build_s": install()}
    tests = ["-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "tests/gpu/test_learner.py"]
    done = subprocess.run(
        [sys.executable, *tests, "-k", "transformer_engine or fp8"], capture_output=True, text=True, timeout=90
    )
    print(done.stdout, done.stderr)
    yield {"tests": (done.stdout.strip().splitlines() or [""])[-1], "code": done.returncode}
    for layers in ("local", "transformer_engine", "fp8_blockwise"):
        with learner_of("small" if small else "Qwen2.5-1.5B", small, layers) as (mine, update):
            yield {"layers": layers, **update_row(mine, seconds(update, repeats=2))}


def install() -> float:
    """Put the extension into SITE: the wheel that was compiled ahead if it loads, else one that is compiled now.

    Returns the seconds of the compilation, 0 without one. Raises CalledProcessError, after the compiler's output, if
    neither loads.
    """
    for wheel in sorted(SOURCES.glob(f"{EXTENSION}-*.whl")):
        unpack(wheel, SITE)
        if subprocess.run([sys.executable, "-c", IMPORT]).returncode == 0:
            return 0.0
        print(f"{wheel} does not load here, so the extension is compiled", flush=True)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        unpack(build(Path(folder), jobs=16), SITE)
    taken = time.perf_counter() - started
    subprocess.run([sys.executable, "-c", IMPORT], check=True)
    return taken


def unpack(wheel: Path, site: Path) -> None:
    """Unpack the extension's wheel beside the library, in place of an earlier extension.

    Its files belong into the library's folders, where `pip install --target` would add nothing: it leaves a folder
    that exists as it is.
    """
    for old in site.glob(f"*/wheel_lib/{EXTENSION}*"):
        old.unlink()
    shutil.unpack_archive(wheel, site, "zip")


def build(folder: Path, jobs: int) -> Path:
    """Compile the extension into a wheel in `folder`; returns it. CalledProcessError if that fails, after pip's
    output."""
    [source] = SOURCES.glob(f"{EXTENSION}-*.tar.gz")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir"]
    variables = VARIABLES | {
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # else its setup.py looks for a finished wheel on GitHub first
        "MAX_JOBS": str(jobs),
        "CPLUS_INCLUDE_PATH": os.pathsep.join(headers()),
    }
    command = [sys.executable, "-m", "pip", "wheel", *options, str(folder), str(source)]
    subprocess.run(command, env=os.environ | variables, check=True)
    [wheel] = folder.glob(f"{EXTENSION}-*.whl")
    return wheel


def headers() -> list[str]:
    """Folders of the headers of pip's CUDA packages: a toolkit that is only a compiler lacks cusparse.h and others."""
    package = find_spec("nvidia")
    roots = package.submodule_search_locations or [] if package else []
    return sorted(str(folder) for root in roots for folder in Path(root).glob("*/include"))


if __name__ == "__main__":
    print(build(SOURCES, jobs=len(os.sched_getaffinity(0))))
