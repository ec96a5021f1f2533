"""A stand-in for a cluster with Slurm 23: starts, limits and requeues jobs, whose nodes are names of this machine.

A test gives the moment of the time limit as a condition, so nothing depends on how fast the machine is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.scaling.slurm_commands import kill_tree

COMMANDS = Path(__file__).with_name("slurm_commands.py")
KILL_WAIT_S = 30.0
"""slurm.conf's KillWait: seconds between the SIGTERM and the SIGKILL of a job that is cancelled."""

Condition = Callable[["Job"], bool]


def never(job: Job) -> bool:
    return False


@dataclass
class Job:
    """A job that is running or has run; `path` is its record."""

    path: Path

    def read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())

    def write(self, **values: Any) -> None:
        self.path.write_text(json.dumps(self.read() | values))

    @property
    def id(self) -> int:
        return int(self.path.stem)

    @property
    def restarts(self) -> int:
        return self.read()["restarts"]

    @property
    def state(self) -> str:
        return self.read()["state"]

    @property
    def codes(self) -> list[int]:
        """The exit code of the batch script each time it ran."""
        return self.read()["codes"]

    @property
    def output(self) -> Path:
        """Where Slurm writes what the job prints."""
        job = self.read()
        name = job["options"].get("output", "slurm-%j.out")
        for mark, value in (("%j", job["id"]), ("%A", job["array"]), ("%a", job["task"])):
            name = name.replace(mark, str(value))
        return Path(job["directory"]) / name


class Slurm:
    """A cluster whose state is the folder `state`; its commands are in `state/bin`."""

    def __init__(self, state: Path, nodes: Sequence[str], cores: int, gpus: int, before: int = 0) -> None:
        """`before`: the id of the job before the first one."""
        self.state = state
        for name in ("bin", "jobs", "requeued", "spool", "steps"):
            (state / name).mkdir(parents=True)
        (state / "machine.json").write_text(
            json.dumps({"nodes": list(nodes), "cores": cores, "gpus": gpus, "before": before})
        )
        for name in ("sbatch", "srun", "scontrol"):
            program = state / "bin" / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{COMMANDS}" {name} "{state}" "$@"\n')
            program.chmod(0o755)

    @property
    def jobs(self) -> list[Job]:
        return [Job(path) for path in sorted(self.state.glob("jobs/*.json"), key=lambda path: int(path.stem))]

    def submit(self, *words: object, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """`sbatch WORDS` in a directory, with nothing but PATH and `environment`."""
        programs = self.state / "bin"
        return subprocess.run(
            [programs / "sbatch", *map(str, words)],
            cwd=directory,
            env={"PATH": f"{programs}:{os.environ['PATH']}", **environment},
            capture_output=True,
            text=True,
        )

    def run(self, at_limit: Condition = never, at_cancel: Condition = never) -> None:
        """Run queued jobs one after the other until none is left.

        `at_limit`: whether the moment of --signal has come for the running job. `at_cancel`: whether its owner cancels.
        """
        while waiting := [job for job in self.jobs if job.state == "PENDING"]:
            self._run(waiting[0], at_limit, at_cancel)

    def _run(self, job: Job, at_limit: Condition, at_cancel: Condition) -> None:
        record = job.read()
        if not job.output.parent.is_dir():  # and nobody is told
            job.write(state="FAILED", codes=[*job.codes, 1])
            return
        append = record["options"].get("open-mode") == "append"
        with job.output.open("ab" if append else "wb") as output:
            batch = subprocess.Popen(
                ["bash", record["script"], *record["arguments"]],
                cwd=record["directory"],
                env=record["environment"] | _variables(record),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                state = self._watch(job, batch, at_limit, at_cancel)
            finally:
                if batch.poll() is None:
                    kill_tree(batch.pid)
                    batch.wait()
        code = batch.returncode
        if (requeued := self.state / "requeued" / str(job.id)).exists():
            requeued.unlink()
            job.write(state="PENDING", restarts=job.restarts + 1, codes=[*job.codes, code])
        else:
            job.write(state=state or ("COMPLETED" if code == 0 else "FAILED"), codes=[*job.codes, code])

    def _watch(self, job: Job, batch: subprocess.Popen[bytes], at_limit: Condition, at_cancel: Condition) -> str:
        name, _, seconds = job.read()["options"].get("signal", "").partition("@")
        ends, warned, state = float("inf"), False, ""
        while batch.poll() is None:
            if not warned and at_limit(job):
                # proctrack/cgroup passes every signal but SIGKILL to the tasks alone, not to their children. Without B:
                # in --signal the batch script gets none.
                self._signal(job, signal.Signals[f"SIG{name}"])
                ends, warned = time.monotonic() + float(seconds), True
            if not state and at_cancel(job):
                self._signal(job, signal.SIGTERM)
                batch.send_signal(signal.SIGTERM)
                ends, state = time.monotonic() + KILL_WAIT_S, "CANCELLED"
            if time.monotonic() > ends:
                state = state or "TIMEOUT"
                kill_tree(batch.pid)
            try:
                batch.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        left = self._tasks(job)
        psutil.wait_procs([psutil.Process(pid) for pid in left if psutil.pid_exists(pid)], timeout=KILL_WAIT_S)
        for pid in left:
            kill_tree(pid)
        return state

    def _tasks(self, job: Job) -> list[int]:
        step = self.state / "steps" / f"{job.id}.json"
        return json.loads(step.read_text()) if step.exists() else []

    def _signal(self, job: Job, number: signal.Signals) -> None:
        for pid in self._tasks(job):
            os.kill(pid, number)


def _variables(job: dict[str, Any]) -> dict[str, str]:
    """What Slurm sets for a batch script."""
    options, nodes = job["options"], job["nodes"]
    found = {
        "SLURM_JOB_ID": job["id"],
        "SLURM_SUBMIT_DIR": job["directory"],
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "SLURM_NNODES": len(nodes),
        "SLURM_JOB_NUM_NODES": len(nodes),
        "SLURM_NODEID": 0,
        "SLURM_PROCID": 0,
        "SLURM_CPUS_ON_NODE": job["cores"],
        "SLURM_JOB_CPUS_PER_NODE": f"{job['cores']}(x{len(nodes)})" if len(nodes) > 1 else job["cores"],
    }
    if job["gpus"]:
        found["SLURM_GPUS_ON_NODE"] = job["gpus"]
    if "cpus-per-task" in options:
        found["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
    if job["restarts"]:
        found["SLURM_RESTART_COUNT"] = job["restarts"]
    if job["task"] is not None:
        tasks = job["tasks"]
        found |= {"SLURM_ARRAY_JOB_ID": job["array"], "SLURM_ARRAY_TASK_ID": job["task"]}
        found |= {"SLURM_ARRAY_TASK_COUNT": len(tasks), "SLURM_ARRAY_TASK_MAX": max(tasks)}
    return {name: str(value) for name, value in found.items()}
