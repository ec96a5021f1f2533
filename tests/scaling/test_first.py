"""run_scripts/bench/first.py: its verdicts, and the whole ladder on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from run_scripts.bench.alone import Ended
from run_scripts.bench.first import PROBES, read_report, verdict_line

ROOT = Path(__file__).parents[2]
CASES = {
    "passed": '<testcase name="a"><properties><property name="sync, s" value="0.2"/></properties></testcase>',
    "failed": '<testcase name="b"><failure message="RuntimeError: no kernel image&#10;more"/></testcase>',
    "skipped": '<testcase name="c"><skipped/></testcase>',
}


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        (["passed", "skipped"], {"verdict": "passed", "passed": 1, "skipped": 1, "figures": [("sync, s", "0.2")]}),
        (["skipped"], {"verdict": "skipped", "passed": 0, "skipped": 1, "figures": []}),
        (["passed", "failed"], {"verdict": "failed", "why": "b: RuntimeError: no kernel image", "passed": 1}),
    ],
)
def test_a_verdict_is_that_of_the_tests(cases: list[str], expected: dict[str, Any], tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(CASES[case] for case in cases)}</testsuite></testsuites>")
    result = read_report(report, Ended(int("failed" in cases), "", tmp_path))
    assert expected.items() <= result.items()


@pytest.mark.parametrize(
    ("code", "output", "why"),
    [
        (None, "....", "not done at its time limit"),
        (-11, "", "ended with code -11"),
        (4, "ERROR: no such file", "ERROR: no such file"),
    ],
)
def test_a_probe_without_a_report_has_failed(code: int | None, output: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "errors.log").touch()
    result = read_report(tmp_path / "report.xml", Ended(code, output, tmp_path))
    assert result == {"verdict": "failed", "why": why}
    assert verdict_line("ipc", {**result, "seconds": 3.0}) == f" 6 ipc        failed      3.0 s  {why}"


def climb(out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "run_scripts.bench.first", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    probes = json.loads(out.read_text(encoding="utf-8"))["probes"]
    assert len(done.stdout.splitlines()) == len(probes)
    return probes


@pytest.mark.night
@pytest.mark.process
def test_the_whole_ladder_runs_on_a_cpu(tmp_path: Path) -> None:
    probes = climb(tmp_path / "first.json")
    assert {name for name, probe in probes.items() if probe["verdict"] == "skipped"} == {"kernels", "saver"}
    assert probes.keys() == PROBES.keys()
    assert "mismatch after the sync, nats" in dict(probes["engine"]["figures"])
    with tarfile.open(tmp_path / "first-logs.tar.gz") as archive:
        assert "logs/products-output.log" in archive.getnames()
