"""Seconds of a run's training until each evaluation: wall-clock, and processor time of its process tree.

Other work on the machine changes processor time far less than wall-clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from mugrpo_megatron.observe.rundata import RunData

CPU_FILE = "cpu.jsonl"
WALL, CPU = 1, 2
"""Indices into a point of `points`."""


@dataclass
class CpuMeter:
    """Processor time of a process and its descendants; `sample` appends a row to the run's cpu.jsonl.

    A row: Unix `time`, and `cpu` seconds of the tree since the process started. A process that starts and ends between
    two samples is missed, as is the time after the last sample of each.
    """

    root: psutil.Process
    path: Path
    used: dict[tuple[int, float], float] = field(default_factory=dict)

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
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "cpu": round(cpu, 2)}) + "\n")


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Processor seconds of a run up to a moment, over all its processes and resumes; linear between samples."""

    times: tuple[float, ...]
    cpu: tuple[float, ...]

    def __call__(self, when: float) -> float:
        return float(np.interp(when, self.times, self.cpu))


def read_cpu_clock(run_dir: Path) -> CpuClock | None:
    """The clock of a run, None if its processor time was not sampled. After a resume the file starts again at 0; the
    clock continues."""
    path = run_dir / CPU_FILE
    if not path.exists():
        return None
    times, cpu = [], []
    before = last = 0.0
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        before += last * (row["cpu"] < last)
        last = row["cpu"]
        times.append(row["time"])
        cpu.append(before + last)
    return CpuClock(tuple(times), tuple(cpu)) if times else None


def points(run: RunData, clock: CpuClock | None) -> list[list[Any]]:
    """[update, wall seconds, processor seconds, accuracy or mean reward] of every evaluation of the run.

    Seconds of training until the evaluation began, without start-up, evaluations and pauses.
    """
    found = []
    for row in run.evals:
        begin = [one["start"] for one in run.phases if one["phase"] == "eval" and one["start"] <= row["time"]][-1]
        cpu = None if clock is None else round(_training_cpu(run, clock, begin), 2)
        score = row["accuracy/mean"] if "accuracy/mean" in row else row["reward/mean"]
        found.append([row["update"], round(_training_seconds(run, begin), 2), cpu, float(f"{score:.4g}")])
    return found


def arrival(evals: Sequence[Sequence[Any]], level: float, axis: int) -> float | None:
    """Where on `axis`, WALL or CPU, the line through the points first reaches an accuracy; None if it does not."""
    known = [(point[axis], point[3]) for point in evals if point[axis] is not None]
    if known and known[0][1] >= level:
        return float(known[0][0])
    for (x0, y0), (x1, y1) in pairwise(known):
        if y0 < level <= y1:
            return float(x0 + (x1 - x0) * (level - y0) / (y1 - y0))
    return None


def _training_seconds(run: RunData, when: float) -> float:
    excluded = [row for row in run.phases if row["phase"] in ("start", "eval")]
    return run.clock(when) - sum(max(0.0, min(row["end"], when) - row["start"]) for row in excluded)


def _training_cpu(run: RunData, clock: CpuClock, when: float) -> float:
    excluded = [row for row in run.phases if row["phase"] in ("start", "eval") and row["start"] < when]
    imports = clock(run.phases[0]["start"])  # before the first phase; they belong to start-up
    return clock(when) - sum(clock(min(row["end"], when)) - clock(row["start"]) for row in excluded) - imports
