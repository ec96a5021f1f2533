"""The first ten minutes on a GPU: ten probes, from the first kernel to a whole run, and a verdict on each.

    python -m run_scripts.bench.first --out first.json [--probes kernels products ...] [--seconds 590]

A probe is a file of tests/gpu or tests/kernels in its own process with its own time limit. They go from what needs the
least to what needs the most, and one that fails stops no other. `first.json` has each verdict and the figures that the
tests record; `first-logs.tar.gz` beside it all that the probes printed, and the logs of their engines.
Without a GPU the same tests run on the CPU, and those that need CUDA are skipped. Exit code 1 if a probe has failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from run_scripts.bench.alone import Ended, keep_logs, run_alone
from run_scripts.bench.machine import describe

Result = dict[str, Any]


@dataclass(frozen=True)
class Probe:
    """One rung of the ladder."""

    tests: tuple[str, ...]
    """Arguments of pytest."""
    limit_s: int
    question: str
    cuda: bool = False
    """Whether all of it needs CUDA."""


PROBES = {
    "kernels": Probe(("tests/gpu/test_kernels.py", "-k", "sglang"), 30, "SGLang's compiled kernels", cuda=True),
    "products": Probe(("tests/gpu/test_kernels.py", "-k", "products"), 20, "narrow products into float32"),
    "attention": Probe(("tests/gpu/test_attention.py",), 20, "packed attention, forward and backward"),
    "rows": Probe(("tests/kernels/test_cuda.py",), 45, "the loss and the Triton kernels"),
    "world": Probe(("tests/gpu/test_world.py",), 20, "NCCL, its subgroups, gloo beside it"),
    "ipc": Probe(("tests/gpu/test_memory.py", "-k", "bucket"), 30, "another process reads the weights"),
    "saver": Probe(("tests/gpu/test_memory.py", "-k", "saver"), 25, "memory given back and taken again", cuda=True),
    "learner": Probe(("tests/gpu/test_learner.py",), 100, "updates, sleep, checkpoints"),
    "engine": Probe(("tests/gpu/test_engine.py",), 185, "engine and learner take turns"),
    "run": Probe(("tests/gpu/test_run.py",), 115, "mugrpo train, stopped and continued"),
}
SECONDS = 590.0
"""For all probes: their limits together."""
PATIENCE_ON_CPU = 4
"""Factor of all limits without a GPU, for cores that other programs use."""


def run_probe(name: str, limit_s: float, logs: Path) -> Result:
    """Verdict, seconds, figures and, of a failed probe, why; its logs go to `logs`."""
    with tempfile.TemporaryDirectory(prefix="first-") as folder:
        report = Path(folder) / "report.xml"
        # -m "": the two longest are for the night where there is no GPU.
        arguments = ["-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}"]
        started = time.perf_counter()
        with run_alone([*arguments, *PROBES[name].tests], limit_s) as ended:
            keep_logs(ended.scratch, logs, name)
            result = read_report(report, ended)
        return {"seconds": round(time.perf_counter() - started, 1), **result}


def read_report(report: Path, ended: Ended) -> Result:
    """Verdict, counts and figures of pytest's JUnit report; a process that has left none has failed."""
    if ended.code not in (0, 1) or not report.exists():
        lines = ended.output.strip().splitlines()
        return {"verdict": "failed", "why": ended.failure if ended.code is None or not lines else lines[-1]}
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
        if entry.get("name") != "CPU seconds"
    ]
    passed = len(cases) - skipped - len(failures)
    verdict = "failed" if failures else "passed" if passed else "skipped"
    result: Result = {"verdict": verdict, "passed": passed, "skipped": skipped, "figures": figures}
    return {**result, "why": failures[0], "failures": failures} if failures else result


def attempt(name: str, limit_s: float, logs: Path) -> Result:
    """`run_probe`, unless it needs CUDA and there is none, or no time is left."""
    if PROBES[name].cuda and not torch.cuda.is_available():
        return {"verdict": "skipped", "why": f"needs CUDA: {PROBES[name].question}"}
    if limit_s <= 0:
        return {"verdict": "failed", "why": "no time left"}
    return run_probe(name, limit_s, logs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first.json"))
    parser.add_argument("--probes", nargs="+", choices=PROBES, default=list(PROBES))
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all probes together; {SECONDS:.0f}")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    patience = 1 if torch.cuda.is_available() else PATIENCE_ON_CPU
    results: dict[str, Result] = {}
    end = time.monotonic() + patience * options.seconds
    with tempfile.TemporaryDirectory(prefix="first-") as folder:
        for name in options.probes:
            limit_s = min(float(patience * PROBES[name].limit_s), end - time.monotonic())
            results[name] = attempt(name, limit_s, Path(folder) / "logs")
            print(verdict_line(name, results[name]), flush=True)
            # After every probe: an early end keeps the finished probes.
            report = {**describe(sys.argv), "probes": results}
            options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            with tarfile.open(options.out.with_name(f"{options.out.stem}-logs.tar.gz"), "w:gz") as archive:
                if (Path(folder) / "logs").exists():
                    archive.add(Path(folder) / "logs", "logs")
    return int(any(result["verdict"] == "failed" for result in results.values()))


def verdict_line(name: str, result: Result) -> str:
    """The probe's verdict and figures in one line."""
    number = list(PROBES).index(name) + 1
    what = result.get("why") or PROBES[name].question
    return f"{number:2} {name:<10} {result['verdict']:<8} {result.get('seconds', 0.0):6.1f} s  {what}"


if __name__ == "__main__":
    sys.exit(main())
