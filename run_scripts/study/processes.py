"""Processor time of a run's whole process tree, which a busy machine stretches far less than wall-clock."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

FILE_NAME = "cpu.jsonl"


@dataclass
class CpuMeter:
    """Adds up what a process and everything it started have used; `sample` appends a row to the run's cpu.jsonl.

    A row: Unix `time`, `cpu` seconds of the tree since the process started, `others`: processor seconds that the rest
    of the machine used meanwhile. A process that lives between two samples alone is missed, as is what each one uses
    after its last sample.
    """

    root: psutil.Process
    path: Path
    used: dict[tuple[int, float], float] = field(default_factory=dict)
    machine: float = field(default_factory=lambda: _machine_seconds())

    def sample(self) -> None:
        try:
            tree = [self.root, *self.root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in tree:
            try:
                times = process.cpu_times()
                self.used[process.pid, process.create_time()] = times.user + times.system
            except psutil.NoSuchProcess:
                continue
        cpu = sum(self.used.values())
        others = max(0.0, _machine_seconds() - self.machine - cpu)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "cpu": round(cpu, 2), "others": round(others, 2)}) + "\n")


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Processor seconds of a run up to a moment, over all its processes and resumes; linear between two samples."""

    times: tuple[float, ...]
    cpu: tuple[float, ...]
    others: tuple[float, ...]

    def __call__(self, when: float) -> float:
        return float(np.interp(when, self.times, self.cpu))

    def others_share(self) -> float:
        """Processor time that the rest of the machine used, over all that was used while the run went on."""
        own, theirs = self.cpu[-1], self.others[-1]
        return theirs / (own + theirs) if own + theirs else 0.0


def read_cpu_clock(run_dir: Path) -> CpuClock | None:
    """The clock of a run that the study ran; None where it was not metered. A new process starts again at 0 in the file
    and goes on from there in the clock."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return None
    times, cpu, others = [], [], []
    before, last = (0.0, 0.0), (0.0, 0.0)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["cpu"] < last[0]:
            before = (before[0] + last[0], before[1] + last[1])
        last = (row["cpu"], row["others"])
        times.append(row["time"])
        cpu.append(before[0] + last[0])
        others.append(before[1] + last[1])
    return CpuClock(tuple(times), tuple(cpu), tuple(others)) if times else None


def _machine_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
