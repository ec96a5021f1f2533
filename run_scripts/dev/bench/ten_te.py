"""A step of run_scripts/dev/bench/ten.py: Transformer Engine on one GPU, compiled there, tested and timed.

`carry.sh` brings the library and the sources of its torch extension, which is compiled for that machine's torch and
Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from run_scripts.dev.bench.ten_learner import Row, learner_of, seconds, update_row

SOURCES = Path(".gpu/te")
SITE = Path.home() / "te"
"""Folder into which carried.sh installs."""


def transformer_engine(small: bool) -> Iterator[Row]:
    """Yield the seconds of the compilation, the tests' verdict on its layers, and updates at 1.5B with and without
    them."""
    yield build()
    sys.path.insert(0, str(SITE))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    tests = ["-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "tests/gpu/test_learner.py"]
    done = subprocess.run(
        [sys.executable, *tests, "-k", "transformer_engine or fp8"], capture_output=True, text=True, timeout=90
    )
    print(done.stdout, done.stderr)
    yield {"tests": (done.stdout.strip().splitlines() or [""])[-1], "code": done.returncode}
    for layers in ("local", "transformer_engine", "fp8_blockwise"):
        with learner_of("small" if small else "Qwen2.5-1.5B", small, layers) as (mine, update):
            yield {"layers": layers, **update_row(mine, seconds(update, repeats=2))}


def build() -> Row:
    """Compile the torch extension into SITE; CalledProcessError if that fails, after pip's output."""
    started = time.perf_counter()
    [source] = SOURCES.glob("transformer_engine_torch-*.tar.gz")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--target", str(SITE)]
    environment = os.environ | {
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # else its setup.py looks for a finished wheel on GitHub first
        "MAX_JOBS": "16",
        "CPLUS_INCLUDE_PATH": os.pathsep.join(headers()),
    }
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], env=environment, check=True)
    return {"build_s": time.perf_counter() - started}


def headers() -> list[str]:
    """Folders of the headers of pip's CUDA packages: a toolkit that is only a compiler lacks cusparse.h and others."""
    package = find_spec("nvidia")
    roots = package.submodule_search_locations or [] if package else []
    return sorted(str(folder) for root in roots for folder in Path(root).glob("*/include"))
