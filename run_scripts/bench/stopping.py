"""Seconds from SIGTERM to the end of a run, in each of its phases, for one process and for two ranks under torchrun.

    python run_scripts/bench/stopping.py [--phases start sync ...] [--ranks 1 2]

Every row is a run of its own on a random Qwen2 of 100k parameters, made so that the phase lasts long. The signal goes
to the process, or to torchrun. In the last row the signal is SIGKILL, to one rank of two while they generate. Prints a
Markdown table: seconds until the run says what it keeps, seconds until its last process is gone, exit code, and what it
said.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from mugrpo_megatron.observe.log import read_rows

ROOT = Path(__file__).parents[2]
TORCHRUN = ROOT / "run_scripts" / "torchrun.sh"
POLL_S = 0.02
LIMIT_S = 300.0

Rows = list[dict[str, Any]]
Sections = dict[str, dict[str, Any]]


def after(kind: str, count: int = 1, **facts: str) -> Callable[[Path, Rows], bool]:
    """Whether the run has logged `count` rows of a kind with these facts."""
    return lambda _, rows: sum({"kind": kind, **facts}.items() <= row.items() for row in rows) >= count


@dataclass(frozen=True)
class Phase:
    """How a phase is made to last, and how to see that it has begun."""

    begun: Callable[[Path, Rows], bool]
    sections: Sections = field(default_factory=dict)
    kills_a_rank: bool = False


LONG: Sections = {"rollout": {"prompts_per_update": 400}, "schedule": {"updates_per_stage": 100}}
MANY: Sections = {"schedule": {"updates_per_stage": 60}}
PHASES = {
    "start": Phase(lambda run, _: any(run.glob("logs/engine*.log"))),
    "sync": Phase(after("phase", phase="start")),
    "evaluate": Phase(
        after("phase", phase="sync"), {"data": {"eval_problems": 500}, "eval": {"samples": 200, "temperature": 1.0}}
    ),
    "generate": Phase(lambda run, _: any(run.glob("stages/00000/shard-*")), LONG),
    "score": Phase(
        after("phase", phase="generate"),
        {"data": {"eval_problems": 1}, "reward": {"function": "run_scripts.bench.stopping:slow"}},
    ),
    "logprobs": Phase(after("phase", phase="score"), {**MANY, "rollout": {"behaviour": "learner"}}),
    "optimize": Phase(after("update", 3), MANY),
    "save": Phase(lambda run, _: any(run.glob("checkpoints/.*.partial")), {**MANY, "checkpoint": {"every_updates": 3}}),
    "generate, a rank is killed": Phase(lambda run, _: any(run.glob("stages/00000/shard-*")), LONG, kills_a_rank=True),
}


def slow(response: str, answer: str) -> float:
    """A reward that takes its time, as one that runs code does."""
    time.sleep(1.5)
    return float(len(response) % 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=list(PHASES), metavar="PHASE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    from stage_memory import make_model  # here, as verifier processes import this module for `slow`

    print("| phase | ranks | saved after s | gone after s | exit code | said |", flush=True)
    print("| --- | --: | --: | --: | --: | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", experts=False)
        for ranks in options.ranks:
            for name in options.phases:
                if ranks > 1 or not PHASES[name].kills_a_rank:
                    print(measure(Path(folder), name, ranks), flush=True)


def measure(folder: Path, name: str, ranks: int) -> str:
    """A line of the table."""
    phase, place = PHASES[name], folder / f"{name.replace(' ', '-')}-{ranks}"
    place.mkdir()
    recipe, run_dir = write_recipe(place, folder / "model", phase.sections), place / "run"
    launch = [str(TORCHRUN), str(ranks)] if ranks > 1 else [sys.executable, "-m", "mugrpo_megatron"]
    with (place / "said").open("wb") as output:
        process = psutil.Popen([*launch, "train", str(recipe)], stdout=output, stderr=output, cwd=ROOT)
    try:
        wait_for(phase, run_dir, process)
        family = process.children(recursive=True)
        began = time.monotonic()
        if phase.kills_a_rank:
            rank_process(family, rank=1).kill()
        else:
            process.send_signal(signal.SIGTERM)
        saved = seconds_until_said(place / "said", process, began)
        code = process.wait(LIMIT_S)
        _, alive = psutil.wait_procs(family, LIMIT_S)
        gone = time.monotonic() - began
    finally:
        if process.is_running():
            for one in [*process.children(recursive=True), process]:
                one.kill()
    last = (final_lines(place / "said") or [""])[-1].removeprefix("mugrpo: ")
    left = f"; {len(alive)} processes left" if alive else ""
    return f"| {name} | {ranks} | {saved:.1f} | {gone:.1f} | {code} | {last[:160]}{left} |"


def seconds_until_said(output: Path, process: psutil.Popen, began: float) -> float:
    """Until the run has printed how it ends, or has ended."""
    while not final_lines(output):
        try:
            process.wait(POLL_S)
            break
        except psutil.TimeoutExpired:
            if time.monotonic() - began > LIMIT_S:
                raise
    return time.monotonic() - began


def final_lines(output: Path) -> list[str]:
    """What the run says of its end, as the command prints it."""
    ends = ("mugrpo: stopped as asked", "mugrpo: rank ")
    return [line for line in output.read_text(errors="replace").splitlines() if line.startswith(ends)]


def wait_for(phase: Phase, run_dir: Path, process: psutil.Popen) -> None:
    """Until the phase has begun; SystemExit when the run ends before."""
    log = run_dir / "metrics.jsonl"
    while not phase.begun(run_dir, read_rows(log) if log.exists() else []):
        try:
            process.wait(POLL_S)
        except psutil.TimeoutExpired:
            continue
        raise SystemExit(f"the run ended before the phase: {(run_dir.parent / 'said').read_text(errors='replace')}")


def rank_process(family: list[psutil.Process], rank: int) -> psutil.Process:
    """The process of a rank, by the environment that torchrun gave it."""
    ranks = [one for one in family if one.environ().get("RANK") == str(rank) and "mugrpo_megatron" in one.cmdline()]
    return ranks[0]


def write_recipe(folder: Path, model: Path, sections: Sections) -> Path:
    """A recipe of short responses on the bundled task; `sections` are merged over it."""
    table: Sections = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"eval_problems": 16, "max_prompt_tokens": 32},
        "schedule": {"stages": 2, "updates_per_stage": 4},
        "rollout": {"prompts_per_update": 16, "responses_per_prompt": 4, "max_response_tokens": 12},
        "learner": {"threads": 1},
        "engine": {"max_running_requests": 64},
        "track": {"tensorboard": False},
    }
    for name, values in sections.items():
        table[name] = {**table.get(name, {}), **values}
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
