"""Stand-ins for Slurm's commands: what sbatch, srun and scontrol of Slurm 23 do as far as a batch script notices.

    python slurm_commands.py sbatch|srun|scontrol STATE [ARGUMENTS]

STATE is the folder of `tests.scaling.slurm.Slurm`, which starts the jobs. Options and variables are those of the manual
pages sbatch(1), srun(1) and scontrol(1) of Slurm 23.02; an option that is not listed here is refused, as Slurm does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", "time", "output", "open-mode",
    "signal", "array", "chdir", "partition", "account",
}  # fmt: skip
SBATCH_FLAGS = {"exclusive", "requeue", "no-requeue", "parsable"}
SRUN = {"ntasks-per-node", "cpus-per-task", "kill-on-bad-exit", "wait"}


def options_of(
    words: Sequence[str], known: set[str], flags: set[str], program: str
) -> tuple[dict[str, str], list[str]]:
    """Leading long options and what follows them."""
    found, words = dict[str, str](), list(words)
    while words and words[0].startswith("--"):
        option, given, value = words.pop(0)[2:].partition("=")
        if option in flags and not given:
            found[option] = ""
        elif option in known:
            found[option] = value if given else words.pop(0)
        else:
            sys.exit(f"{program}: unrecognized option '--{option}'")
    return found, words


def expanded(hosts: str) -> list[str]:
    """`gpu-[07-09,12],head` -> every name."""
    names = []
    for name, ranges in re.findall(r"([^,\[]+)(?:\[([^\]]+)\])?,?", hosts):
        for part in ranges.split(",") if ranges else [""]:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if part else [None]
            names += [name if n is None else f"{name}{n:0{len(first)}d}" for n in numbers]
    return names


def tasks_of_array(text: str) -> list[int]:
    """`0-3,7` -> 0, 1, 2, 3, 7."""
    ends = [part.partition("-") for part in text.split(",")]
    return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]


def sbatch(state: Path, words: Sequence[str]) -> int:
    """Queue a job: options of the command line before those of the script, and a copy of the script."""
    own, (script, *arguments) = options_of(words, SBATCH, SBATCH_FLAGS, "sbatch")
    text = Path(script).read_text()
    lines = [word for line in re.findall(r"^#SBATCH +(.+)$", text, re.MULTILINE) for word in line.split()]
    asked = options_of(lines, SBATCH, SBATCH_FLAGS, "sbatch")[0] | own
    machine = json.loads((state / "machine.json").read_text())
    nodes, gpus = int(asked.get("nodes", "1")), int(asked.get("gpus-per-node", "0"))
    cores = int(asked.get("cpus-per-task", "1"))
    if nodes > len(machine["nodes"]) or gpus > machine["gpus"] or cores > machine["cores"]:
        sys.exit("sbatch: error: Batch job submission failed: Requested node configuration is not available")
    first = 1 + max((int(path.stem) for path in state.glob("jobs/*.json")), default=machine["before"])
    tasks = tasks_of_array(asked["array"]) if "array" in asked else [None]
    for number, task in enumerate(tasks, first):
        spool = state / "spool" / f"job{number:05d}" / "slurm_script"
        spool.parent.mkdir(parents=True)
        shutil.copy(script, spool)
        job = {
            "id": number, "array": first if task is not None else None, "task": task, "tasks": tasks, "options": asked,
            "script": str(spool), "arguments": arguments, "directory": asked.get("chdir", str(Path.cwd())),
            "nodes": machine["nodes"][:nodes], "gpus": gpus,
            "cores": machine["cores"] if "exclusive" in asked else cores,
            "environment": dict(os.environ), "restarts": 0, "state": "PENDING", "codes": [],
        }  # fmt: skip
        (state / "jobs" / f"{number}.json").write_text(json.dumps(job))
    print(first if "parsable" in asked else f"Submitted batch job {first}")
    return 0


def srun(state: Path, words: Sequence[str]) -> int:
    """A task on each node of the job; the highest exit code. Signals to srun itself kill the tasks, as Slurm's does."""
    options, command = options_of(words, SRUN, set(), "srun")
    nodes = expanded(os.environ["SLURM_JOB_NODELIST"])
    job, cores = os.environ["SLURM_JOB_ID"], int(options.get("cpus-per-task", "1"))  # not that of the job, since 22.05
    if cores > json.loads((state / "jobs" / f"{job}.json").read_text())["cores"]:
        sys.exit("srun: error: Unable to create step: More processors requested than permitted")
    tasks = []
    for number in range(len(nodes)):
        environment = {key: value for key, value in os.environ.items() if key != "SLURM_CPUS_PER_TASK"}
        environment |= {"SLURM_NODEID": str(number), "SLURM_PROCID": str(number), "SLURM_LOCALID": "0"}
        if "cpus-per-task" in options:
            environment["SLURM_CPUS_PER_TASK"] = str(cores)
        usable = sorted(os.sched_getaffinity(0))[:cores]
        tasks.append(
            subprocess.Popen(
                command,
                env=environment,
                start_new_session=True,  # a slurmstepd of its own
                preexec_fn=lambda usable=usable: os.sched_setaffinity(0, usable),  # type: ignore[misc]
            )
        )
    (state / "steps" / f"{job}.json").write_text(json.dumps([task.pid for task in tasks]))

    def kill() -> None:
        for task in tasks:
            kill_tree(task.pid)

    def forced(number: int, frame: object) -> None:
        print("srun: forcing job termination", file=sys.stderr, flush=True)
        kill()

    signal.signal(signal.SIGTERM, forced)
    until = float("inf")
    while any(task.poll() is None for task in tasks):
        codes = [task.returncode for task in tasks if task.returncode is not None]
        if any(codes) and options.get("kill-on-bad-exit") == "1":
            kill()
        elif codes:
            until = min(until, time.monotonic() + float(options.get("wait", "0") or "inf"))
            if time.monotonic() > until:
                kill()
        running = next((task for task in tasks if task.poll() is None), None)
        if running is not None:
            try:
                running.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
    (state / "steps" / f"{job}.json").unlink()
    return max(code if code >= 0 else 128 - code for code in (task.returncode for task in tasks))


def kill_tree(pid: int) -> None:
    """SIGKILL for a process and all of its descendants: what the step's cgroup holds."""
    import psutil

    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def scontrol(state: Path, words: Sequence[str]) -> int:
    """`show hostnames LIST` and `requeue JOB`."""
    if words[:2] == ["show", "hostnames"]:
        print("\n".join(expanded(words[2])))
        return 0
    assert words[0] == "requeue", words
    job = json.loads((state / "jobs" / f"{words[1]}.json").read_text())
    if "requeue" not in job["options"]:
        print("Requested operation is presently disabled for job", words[1], file=sys.stderr)
        return 1
    (state / "requeued" / words[1]).touch()
    return 0


if __name__ == "__main__":
    program, folder, *rest = sys.argv[1:]
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[program](Path(folder), rest))
