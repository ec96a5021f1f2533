"""Processor time of a run's whole process tree, which other work on the machine changes far less than wall-clock."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

CPU_FILE = "cpu.jsonl"


@dataclass
class CpuMeter:
    """Processor time of a process and its descendants; `sample` appends a row to the run's cpu.jsonl.

    A row: Unix `time`, `cpu` seconds of the tree since the process started, `others`: processor seconds that the rest
    of the machine used meanwhile. A process that starts and ends between two samples is missed, as is the time after
    the last sample of each.
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
    """Processor seconds of a run up to a moment, over all its processes and resumes; linear between samples."""

    times: tuple[float, ...]
    cpu: tuple[float, ...]
    others: tuple[float, ...]

    def __call__(self, when: float) -> float:
        return float(np.interp(when, self.times, self.cpu))

    def others_share(self) -> float:
        """Share of other processes in the processor time that was used during the run."""
        own, theirs = self.cpu[-1], self.others[-1]
        return theirs / (own + theirs) if own + theirs else 0.0


def read_cpu_clock(run_dir: Path) -> CpuClock | None:
    """The clock of a run, None if its processor time was not sampled. After a resume the file starts again at 0; the
    clock continues."""
    path = run_dir / CPU_FILE
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
