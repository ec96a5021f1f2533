"""Measures one GPU in ten minutes, one process a step, and writes each result as a JSON line at once.

    python -m run_scripts.dev.bench.ten --out a.jsonl --command A        # the learner: five minutes, no SGLang
    python -m run_scripts.dev.bench.ten --out b.jsonl --command B        # the engine, and a whole run: five minutes
    python -m run_scripts.dev.bench.ten --out c.jsonl --command C        # the clock of a run: six minutes
    python -m run_scripts.dev.bench.ten --out d.jsonl --command D        # Transformer Engine, the filled bridge
    python -m run_scripts.dev.bench.ten --out e.jsonl --steps graphs bare ours asleep equal
    python -m run_scripts.dev.bench.ten --small                      # tiny shapes, also on a CPU: shows that it runs

A step that fails stops no other; the time that a step leaves goes to the next. `a-logs.tar.gz` beside `a.jsonl` has
all that the steps printed, and the logs of their engines. Predictions are in docs/performance.md (A, B) and in
README.md beside this file (C, D).
"""

from __future__ import annotations

import sys

if __name__ == "__mp_main__":  # in a scheduler that SGLang spawns, as in engine/host.py
    sys.modules["megatron"] = None  # type: ignore[assignment]

import argparse
import json
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

import torch

from run_scripts.dev.bench import ten_clock, ten_engine, ten_equal, ten_learner, ten_te
from run_scripts.dev.bench.alone import Ended, keep_logs, run_alone
from run_scripts.dev.bench.machine import absent, describe, requirements

Row = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One process of a measurement: a function that yields rows, or a number of tests."""

    limit_s: int
    rows: Callable[[bool], Iterator[Row]] | None = None
    tests: tuple[str, ...] = ()
    """Arguments of pytest."""
    needs: str = ""
    """`cuda`, or a program on PATH."""


A: dict[str, Step] = {
    "ceilings": Step(20, ten_learner.ceilings),
    "correct": Step(
        40,
        tests=(
            "tests/gpu/test_kernels.py", "tests/gpu/test_attention.py", "tests/gpu/test_world.py",
            "tests/kernels/test_cuda.py", "-k", "not sglang",
        ),
    ),
    "loss": Step(40, ten_learner.loss),
    "learner": Step(80, ten_learner.learner),
    "layers": Step(80, ten_learner.layers),
    "profile": Step(25, ten_learner.profile_update),
    "ncu": Step(20, ten_learner.row_kernels, needs="ncu"),
}  # fmt: skip
B: dict[str, Step] = {
    "machine": Step(
        50, tests=("tests/gpu/test_kernels.py", "tests/gpu/test_memory.py", "-k", "sglang or saver or bucket")
    ),
    "switch": Step(155, ten_engine.switch),
    "run": Step(60, tests=("tests/gpu/test_run.py",)),
}
C: dict[str, Step] = {
    "clock": Step(185, ten_clock.clock),
    "drift": Step(85, ten_engine.drift),
    "resumed": Step(65, tests=("tests/gpu/test_resumed.py",)),
}
D: dict[str, Step] = {
    "fill": Step(65, ten_learner.learner),
    "te": Step(145, ten_te.transformer_engine, needs="cuda"),
}
MORE: dict[str, Step] = {
    "asleep": Step(170, ten_engine.asleep),
    "updates": Step(180, tests=("tests/gpu/test_learner.py",)),
    "turns": Step(185, tests=("tests/gpu/test_engine.py",)),
    "graphs": Step(165, ten_engine.switch_without_graphs, needs="cuda"),
    "bare": Step(120, ten_engine.engine_bare),
    "ours": Step(120, ten_engine.engine_ours),
    "equal": Step(420, ten_equal.equal),
}
STEPS = A | B | C | D | MORE
COMMANDS = {"A": tuple(A), "B": tuple(B), "C": tuple(C), "D": tuple(D)}
"""Command -> its steps. Each command is one call on a borrowed machine; the steps that are surest and worth most come
first."""
INSTALL_S = {"A": 10, "B": 20, "C": 20, "D": 15}
"""Command -> seconds that carried.sh takes before it."""
PATIENCE = 20
"""Factor by which --small extends the time limits: on busy cores a step may be slow, and only hangs are to be ended."""


def write_row(out: Path, row: Row) -> None:
    """Append a JSON line, and print it."""
    line = json.dumps(row)
    with out.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line[:400], flush=True)


def run_step(name: str, small: bool, limit_s: float, out: Path, logs: Path) -> Row:
    """Run a step in a process of its own; returns its verdict, its seconds, and the reason if it failed."""
    step = STEPS[name]
    missing = not torch.cuda.is_available() if step.needs == "cuda" else step.needs and not which(step.needs)
    if missing:
        return {"verdict": "skipped", "why": f"needs {step.needs}"}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ten-") as folder:
        report = Path(folder) / "report.xml"
        arguments = [
            "-m",
            "run_scripts.dev.bench.ten",
            "--one",
            name,
            "--out",
            str(out),
            *(["--small"] if small else []),
        ]
        if step.tests:  # -m "": some are for the night where there is no GPU
            pytest = ["-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}"]
            arguments = [*pytest, *step.tests]
        with run_alone(arguments, limit_s) as ended:
            keep_logs(ended.scratch, logs, name)
            if step.tests:
                result = read_report(report, ended)
            else:
                result = {"verdict": "failed", "why": ended.failure} if ended.failure else {"verdict": "passed"}
    return {**result, "seconds": round(time.perf_counter() - started, 1)}


def read_report(report: Path, ended: Ended) -> Row:
    """Read verdict, counts and figures from pytest's JUnit report; a process that left no report has failed."""
    if ended.code not in (0, 1) or not report.exists():
        lines = ended.output.strip().splitlines()
        killed = ended.code is None or ended.code < 0
        return {"verdict": "failed", "why": ended.failure if killed or not lines else lines[-1]}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failures = [
        f"{case.get('name')}: {(problem.get('message') or '').splitlines()[0]}"
        for case in cases
        for problem in case
        if problem.tag in ("failure", "error")
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    figures = [
        (entry.get("name"), entry.get("value"))
        for case in cases
        for entry in case.iter("property")
        if entry.get("name") not in ("CPU seconds", "cost")
    ]
    passed = len(cases) - skipped - len(failures)
    verdict = "failed" if failures else "passed" if passed else "skipped"
    result: Row = {"verdict": verdict, "passed": passed, "skipped": skipped, "figures": figures}
    return {**result, "why": failures[0], "failures": failures} if failures else result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("ten.jsonl"))
    parser.add_argument("--command", choices=COMMANDS, help="its steps; by default those of A and B")
    parser.add_argument("--steps", nargs="+", choices=STEPS)
    parser.add_argument("--small", action="store_true", help="tiny shapes: shows that it runs, measures nothing")
    parser.add_argument("--one", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.absolute()
    if options.one:
        measure = STEPS[options.one].rows
        assert measure is not None
        started = time.perf_counter()
        for row in measure(options.small):
            write_row(out, {"step": options.one, "at_s": round(time.perf_counter() - started, 1), **row})
        return
    if not torch.cuda.is_available() and not options.small:
        sys.exit("ten: torch finds no CUDA device; --small shows that everything runs without one")
    out.parent.mkdir(parents=True, exist_ok=True)
    steps = options.steps or (COMMANDS[options.command] if options.command else [*A, *B])
    missing = absent(requirements(Path(__file__).parents[3] / "pyproject.toml"))
    write_row(out, {"absent": missing, **describe(sys.argv), "small": options.small})
    end = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ten-") as folder:
        logs = Path(folder) / "logs"
        logs.mkdir()
        for name in steps:
            end += STEPS[name].limit_s * (PATIENCE if options.small else 1)
            verdict = run_step(name, options.small, end - time.monotonic(), out, logs)
            write_row(out, {"step": name, **verdict})
            with tarfile.open(out.with_name(f"{out.stem}-logs.tar.gz"), "w:gz") as archive:
                archive.add(logs, "logs")


if __name__ == "__main__":
    main()
