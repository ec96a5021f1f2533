"""A step of run_scripts/dev/bench/ten.py: Transformer Engine on one GPU, installed there, tested and timed.

`carry.sh` brings the library, and the sources of its torch extension. They are compiled for that machine's torch and
Python, beside the steps before this one, or ahead on another machine with the same Python, torch and headers:

    PYTHON -m run_scripts.dev.bench.ten_te     # makes a wheel in .gpu/te, if none is there
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    yield {"wait_s": install()}
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
    """Put the extension into SITE: from the wheel in SOURCES if it loads, else from one that is compiled now.

    Returns the seconds until the wheel is there. Raises CalledProcessError, after the compiler's output, if it cannot
    be compiled or loaded.
    """
    started = time.perf_counter()
    unpack(make_wheel(), SITE)
    waited = time.perf_counter() - started
    if subprocess.run([sys.executable, "-c", IMPORT]).returncode:
        print("the wheel does not load here, so the extension is compiled again", flush=True)
        unpack(make_wheel(again=True), SITE)
        waited = time.perf_counter() - started
        subprocess.run([sys.executable, "-c", IMPORT], check=True)
    return round(waited, 1)


def make_wheel(again: bool = False) -> Path:
    """The extension's wheel in SOURCES, compiled if there is none, or if `again` is true.

    Waits for another process that compiles it. CalledProcessError if that fails here, after pip's output.
    """
    with _alone():
        found = sorted(SOURCES.glob(f"{EXTENSION}-*.whl"))
        if found and not again:
            return found[0]
        for wheel in found:
            wheel.unlink()
        with tempfile.TemporaryDirectory() as folder:
            return Path(shutil.move(build(Path(folder)), SOURCES))


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other process compiles the extension, and let none begin inside the block."""
    with (SOURCES / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def unpack(wheel: Path, site: Path) -> None:
    """Unpack the extension's wheel beside the library, in place of an earlier extension.

    Its files belong into the library's folders, where `pip install --target` would add nothing: it leaves a folder
    that exists as it is.
    """
    for old in site.glob(f"*/wheel_lib/{EXTENSION}*"):
        old.unlink()
    shutil.unpack_archive(wheel, site, "zip")


def build(folder: Path) -> Path:
    """Compile the extension into a wheel in `folder`; returns it. CalledProcessError if that fails, after pip's
    output."""
    [source] = SOURCES.glob(f"{EXTENSION}-*.tar.gz")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir"]
    variables = VARIABLES | {
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # else its setup.py looks for a finished wheel on GitHub first
        "MAX_JOBS": str(len(os.sched_getaffinity(0))),
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
    print(make_wheel())
