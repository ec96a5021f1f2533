"""Measures one GPU for docs/performance.md and writes JSON; run_scripts/bench/gpu.sh runs it.

    python -m run_scripts.bench.gpu --out gpu.json [--parts ceilings loss ...] [--after first.json] [--small]

Each part runs alone, in its own process. If it fails, its entry says why, what it and its engine printed is kept in
`gpu-logs/` next to `gpu.json`, and the others still run. Parts that would not end within `--seconds`, and parts that
need a probe which failed in `--after`, are skipped, and their entries say so. `--small` runs the same code on tiny
shapes, also on a CPU.

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
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from run_scripts.bench import gpu_parts
from run_scripts.bench.alone import keep_logs, run_alone
from run_scripts.bench.gpu_parts import How
from run_scripts.bench.gpu_whole import whole
from run_scripts.bench.machine import describe

Result = dict[str, Any]
LEARNER = ("products", "attention", "world")
BOTH = (*LEARNER, "kernels", "ipc", "saver")


@dataclass(frozen=True)
class Part:
    """One part of the bench."""

    measure: Callable[[How], Result]
    limit_s: int
    """With every kernel still to be compiled."""
    needs: tuple[str, ...] = ()
    """Probes of first.py without which it has no chance: what the machine has to allow, not what has to be right."""


PARTS = {
    "ceilings": Part(gpu_parts.ceilings, 40),
    "loss": Part(gpu_parts.loss, 150, ("products",)),
    "learner": Part(gpu_parts.learner, 200, LEARNER),
    "engine_bare": Part(gpu_parts.engine_bare, 100, ("kernels",)),
    "engine_ours": Part(gpu_parts.engine_ours, 100, ("kernels",)),
    "switch": Part(gpu_parts.switch, 300, BOTH),
    "whole": Part(whole, 400, BOTH),
}
SMALL_PATIENCE = 4
"""Factor of the time limits with --small, for cores that other programs use."""


def alone(part: str, how: How, limit_s: float, logs: Path) -> Result:
    """Run a part in its own process.

    If it fails, `failed` of the result is the last line of its errors, and `logs` gets every log that it wrote.
    """
    with run_alone(["-m", "run_scripts.bench.gpu", "--one", json.dumps([part, asdict(how)])], limit_s) as ended:
        if ended.failure:
            return {"failed": ended.failure, "logs": keep_logs(ended.scratch, logs, part)}
        return json.loads(ended.output.strip().splitlines()[-1])


def obstacle(part: str, probes: Mapping[str, Result]) -> str:
    """The probe of first.py without which this part has no chance, if that failed; else empty."""
    return next((name for name in PARTS[part].needs if probes.get(name, {}).get("verdict") == "failed"), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--seconds",
        type=float,
        help="for all parts together; by default no more than the limit of each",
    )
    parser.add_argument("--after", type=Path, help="first.json of first.py: leave out what cannot work")
    parser.add_argument("--small", action="store_true", help="tiny shapes: shows that it runs, measures nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        part, fields = json.loads(options.one)
        print(json.dumps(PARTS[part].measure(How(**fields))))
        return
    how = How(options.small)
    if not torch.cuda.is_available() and not options.small:
        sys.exit("gpu: torch finds no CUDA device; --small shows that everything runs without one")
    probes = json.loads(options.after.read_text(encoding="utf-8"))["probes"] if options.after else {}
    obstacles = {part: obstacle(part, probes) for part in options.parts}
    dependent = [part for part in options.parts if PARTS[part].needs]
    if dependent and all(obstacles[part] for part in dependent):
        sys.exit(f"gpu: nothing more can work: {'; '.join(failures(probes))}. The logs are beside {options.after}")
    logs = options.out.with_name(f"{options.out.stem}-logs")
    started, patience = time.monotonic(), SMALL_PATIENCE if options.small else 1
    budget = options.seconds or patience * sum(PARTS[part].limit_s for part in options.parts)
    report: Result = {**describe(sys.argv), "small": options.small, "parts": {}}
    for part in options.parts:
        rest = budget - (time.monotonic() - started)
        print(f"{part} ...", flush=True)
        if obstacles[part]:
            result = {"failed": f"the probe {obstacles[part]} of first.py failed"}
        elif rest < 5:
            result = {"failed": f"no time left of {budget:.0f} s"}
        else:
            result = alone(part, how, min(PARTS[part].limit_s * patience, rest), logs)
        report["parts"][part] = result
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(result, indent=2), flush=True)


def failures(probes: Mapping[str, Result]) -> list[str]:
    """The probes that failed, each with its reason."""
    return [f"{name}: {probe['why']}" for name, probe in probes.items() if probe["verdict"] == "failed"]


if __name__ == "__main__":
    main()
