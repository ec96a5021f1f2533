"""Measures one GPU for docs/performance.md and writes JSON; run_scripts/bench/gpu.sh runs it.

    python -m run_scripts.bench.gpu --out gpu.json [--parts ceilings loss ...] [--small]

Each part runs alone, in its own process. If it fails, its entry says why and the others still run. Parts that would not
end within `--seconds` are skipped, and their entry says so. `--small` runs the same code on tiny shapes, also on a CPU.

    ceilings   device copy and large bfloat16 matrix product, which the other parts are measured against
    loss       the loss path against its GEMMs, Liger and TRL (run_scripts/bench/loss_path.py)
    learner    tokens/s, share of the matrix product's FLOP/s and memory against the plan, Qwen2.5 0.5B and 1.5B shapes
    engine_bare, engine_ours   tokens/s of SGLang alone and of the project's engine on the same prompts
    switch     the switch from learner to engine and back, and the bridge's GB/s
    whole      a whole small run of mu-GRPO against µ = 4: seconds per phase, ratio, accuracies
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from run_scripts.bench import gpu_parts
from run_scripts.bench.gpu_whole import whole

Result = dict[str, Any]
PARTS: dict[str, tuple[Callable[[bool], Result], int]] = {
    "ceilings": (gpu_parts.ceilings, 40),
    "loss": (gpu_parts.loss, 150),
    "learner": (gpu_parts.learner, 120),
    "engine_bare": (gpu_parts.engine_bare, 100),
    "engine_ours": (gpu_parts.engine_ours, 100),
    "switch": (gpu_parts.switch, 100),
    "whole": (whole, 200),
}
"""Part -> its function and its time limit in seconds."""
SMALL_PATIENCE = 4
"""Factor of the time limits with --small, for cores that other programs use."""
PACKAGES = ("torch", "triton", "megatron-core", "sglang", "transformers", "transformer-engine", "liger-kernel", "trl")


def alone(part: str, small: bool, limit_s: float) -> Result:
    """Run a part in its own process, and end all that it started; `failed` is the last line of its errors."""
    command = [sys.executable, "-m", "run_scripts.bench.gpu", "--one", json.dumps([part, small])]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit_s:.0f} s"}
    finally:  # also after Ctrl-C
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        lines = errors.strip().splitlines()
        return {"failed": lines[-1] if lines else f"ended with code {process.returncode}"}
    return json.loads(printed.strip().splitlines()[-1])


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, help="for all parts together; 460, or four times that with --small")
    parser.add_argument("--small", action="store_true", help="tiny shapes: shows that it runs, measures nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        part, small = json.loads(given.one)
        print(json.dumps(PARTS[part][0](small)))
        return
    if not torch.cuda.is_available() and not given.small:
        sys.exit("gpu: torch finds no CUDA device; --small shows that everything runs without one")
    started, patience = time.monotonic(), SMALL_PATIENCE if given.small else 1
    budget = given.seconds or 460.0 * patience
    found: Result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        "command": " ".join(sys.argv),
        "small": given.small,
        "versions": {"python": platform.python_version()} | {name: installed(name) for name in PACKAGES},
        "parts": {},
    }
    for part in given.parts:
        left = budget - (time.monotonic() - started)
        print(f"{part} ...", flush=True)
        enough = left >= 5
        limit_s = min(PARTS[part][1] * patience, left)
        found["parts"][part] = (
            alone(part, given.small, limit_s) if enough else {"failed": f"no time left of {budget:.0f} s"}
        )
        given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(found["parts"][part], indent=2), flush=True)


if __name__ == "__main__":
    main()
