"""Measures one GPU for docs/performance.md and writes JSON; run_scripts/bench/gpu.sh runs it.

    python -m run_scripts.bench.gpu --out gpu.json [--parts ceilings loss ...] [--attention-backend triton] [--small]

Each part runs alone, in its own process. If it fails, its entry says why, what it and its engine printed is kept in
`gpu-logs/` next to `gpu.json`, and the others still run. Parts that would not end within `--seconds` are skipped, and
their entry says so. `--small` runs the same code on tiny shapes, also on a CPU.

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
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from run_scripts.bench import gpu_parts
from run_scripts.bench.gpu_parts import How
from run_scripts.bench.gpu_whole import whole

Result = dict[str, Any]
PARTS: dict[str, tuple[Callable[[How], Result], int]] = {
    "ceilings": (gpu_parts.ceilings, 40),
    "loss": (gpu_parts.loss, 150),
    "learner": (gpu_parts.learner, 200),
    "engine_bare": (gpu_parts.engine_bare, 100),
    "engine_ours": (gpu_parts.engine_ours, 100),
    "switch": (gpu_parts.switch, 100),
    "whole": (whole, 400),
}
"""Part -> its function and its time limit in seconds, with every kernel still to be compiled."""
SMALL_PATIENCE = 4
"""Factor of the time limits with --small, for cores that other programs use."""
PACKAGES = ("torch", "triton", "megatron-core", "sglang", "transformers", "transformer-engine", "liger-kernel", "trl")


def alone(part: str, how: How, limit_s: float, logs: Path) -> Result:
    """Run a part in its own process, and end all that it started.

    If it fails, `failed` of the result is the last line of its errors, and `logs` gets every log that it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        found = _alone(part, how, limit_s, Path(scratch))
        if "failed" in found:
            found["logs"] = keep_logs(Path(scratch), logs, part)
    return found


def _alone(part: str, how: How, limit_s: float, scratch: Path) -> Result:
    command = [sys.executable, "-m", "run_scripts.bench.gpu", "--one", json.dumps([part, asdict(how)])]
    errors = scratch / "errors.log"
    with errors.open("w") as file:
        # The part's temporary files are ours: logs outlive a part that is killed, models do not.
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True, env=environment
        )
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {limit_s:.0f} s"}
        finally:  # also after Ctrl-C
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    if process.returncode:
        lines = errors.read_text(errors="replace").strip().splitlines()
        return {"failed": lines[-1] if lines else f"ended with code {process.returncode}"}
    return json.loads(printed.strip().splitlines()[-1])


def keep_logs(scratch: Path, logs: Path, part: str) -> list[str]:
    """Copy every log under `scratch` into `logs`, under names that begin with the part's; returns the names."""
    kept = []
    for log in sorted(scratch.rglob("*.log")):
        if log.stat().st_size:
            logs.mkdir(parents=True, exist_ok=True)
            name = "-".join([part, *log.relative_to(scratch).parts])
            shutil.copy(log, logs / name)
            kept.append(name)
    return kept


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
    parser.add_argument(
        "--attention-backend", default="auto", help="of the engine; triton where FlashAttention 3 is not"
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes: shows that it runs, measures nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        part, fields = json.loads(given.one)
        print(json.dumps(PARTS[part][0](How(**fields))))
        return
    how = How(given.small, given.attention_backend)
    if not torch.cuda.is_available() and not given.small:
        sys.exit("gpu: torch finds no CUDA device; --small shows that everything runs without one")
    logs = given.out.with_name(f"{given.out.stem}-logs")
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
            alone(part, how, limit_s, logs) if enough else {"failed": f"no time left of {budget:.0f} s"}
        )
        given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(found["parts"][part], indent=2), flush=True)


if __name__ == "__main__":
    main()
