"""Runs on machines that fail them: disks that fill, limits of files, clocks that jump, locks that vanish, frozen ranks.

Every command ends with one sentence and the way out, and the same command then ends as if nothing had happened.
"""

from __future__ import annotations

import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mugrpo_megatron.observe.log import read_rows
from tests.forked import started
from tests.hostile.faults import disk
from tests.patience import PATIENCE_S
from tests.scaling.nodes import TORCHRUN, kill, said, wait_until
from tests.tiny import FINISHED, mugrpo, rows, save_model, take_stages, weights, write_run

pytestmark = [pytest.mark.process, pytest.mark.night]

UPDATES = FINISHED["updates_per_stage"]
DAY_S = 86_400


def check_like_unbroken(folder: Path, model: Path, run: Path, **sections: dict[str, Any]) -> None:
    """The finished run of `write_run` ends as an unbroken one on the same stages does, with each update once."""
    recipe = write_run(folder / "unbroken", model, **sections)
    take_stages(run, folder / "unbroken" / "run")
    mugrpo("train", recipe)
    assert weights(run) == weights(folder / "unbroken" / "run") != (model / "model.safetensors").read_bytes()
    assert {row["update"] for row in rows(run, "update")} == set(range(2 * UPDATES))
    assert not list(run.rglob("*.partial"))


def test_a_disk_that_fills_in_every_phase(tmp_path: Path) -> None:
    """Each attempt has a little more room than the one before; the last one has enough."""
    model, told, phases = save_model(tmp_path / "model"), [], set()
    with disk(tmp_path / "disk", 32 << 20) as place:
        recipe, run, ballast = write_run(place, model), place / "run", place / "ballast"
        for room in (4 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20):
            ballast.unlink(missing_ok=True)
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(place).free - room)
            with started("train", recipe) as command:
                code = command.wait()
                assert code in (0, 2), command.said
                assert "Traceback" not in command.said, command.said
                last = command.stderr.splitlines()[-1] if code else ""
            if code == 0:
                break
            assert re.search("no space left|No space left|MiB are free", last), last
            assert "free some space" in last, last
            told.append(last)
            phases |= {row["phase"] for row in (rows(run, "phase") or [{"phase": "start"}])[-1:]}
        ballast.unlink()
        mugrpo("train", recipe)
        print(f"{len(told)} attempts on a full disk ended in {sorted(phases)}:", *told, sep="\n")
        assert len(told) >= 3
        check_like_unbroken(tmp_path, model, run)


def limit_to_16_kib() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, 16 << 10))


def limit_to_300_kib() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, 300 << 10))


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    """It holds for the engine too, which is a process of its own; a checkpoint is larger than both limits."""
    model = save_model(tmp_path / "model")
    recipe, run = write_run(tmp_path, model), tmp_path / "run"
    for limit in (limit_to_16_kib, limit_to_300_kib):
        with started("train", recipe, real_engine=True, first=limit) as command:
            assert command.wait() == 2, command.said
            assert "Traceback" not in command.said, command.said
            last = command.stderr.splitlines()[-1]
        print(last)
        assert "ulimit -f" in last
    mugrpo("train", recipe)
    check_like_unbroken(tmp_path, model, run)


def jump() -> None:
    """From now on the wall clock is a day ahead, right, or a day behind, by turns of ten looks."""
    looks, right = itertools.count(), time.time

    def jumping() -> float:
        return right() + DAY_S * (1 - next(looks) // 10 % 3)

    time.time = jumping


def test_a_clock_that_jumps_by_days(tmp_path: Path) -> None:
    """It starts the run a day ahead; the engine's process has the right time."""
    model = save_model(tmp_path / "model")
    recipe, run = write_run(tmp_path, model), tmp_path / "run"
    with started("train", recipe, first=jump) as command:
        assert command.wait() == 0, command.said
    logged = read_rows(run / "metrics.jsonl")
    times = [row["end"] if row["kind"] == "phase" else row["time"] for row in logged if row["kind"] != "engine"]
    assert times == sorted(times)
    assert times[-1] - times[0] < DAY_S
    generations = [(row["start"], row["end"]) for row in rows(run, "phase") if row["phase"] == "generate"]
    for reading in rows(run, "engine"):
        assert any(start <= reading["time"] <= end for start, end in generations), (reading, generations)
    check_like_unbroken(tmp_path, model, run)


def branch(source: Path, run: Path, *settings: str) -> list[str]:
    """The words of a command that takes the first stage of a finished run again."""
    sets = [word for one in (f"run.dir={run}", "schedule.stages=1", *settings) for word in ("--set", one)]
    return ["optimize", str(source.parent / "recipe.toml"), "--from", str(source), "--stage", "0", *sets]


def test_a_lock_that_is_removed_under_its_holder(finished_run: Path, tmp_path: Path) -> None:
    """Another process could have the directory now: the run ends before it saves; called again, it goes on."""
    mugrpo(*branch(finished_run, tmp_path / "whole"))
    command = branch(finished_run, tmp_path / "run")
    with started(*command) as running:
        while not rows(tmp_path / "run", "update"):
            assert running.wait(0.02) is None, running.said
        (tmp_path / "run" / ".lock").unlink()
        assert running.wait() == 2, running.said
        last = running.stderr.splitlines()[-1]
    assert ".lock was removed or replaced" in last
    assert "the same command then continues" in last
    mugrpo(*command)
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


TIMEOUT_S = 120
"""Of a collective: far above what an update of the tiny model takes on a busy machine."""


def rank_of(torchrun: subprocess.Popen[bytes], rank: int) -> psutil.Process:
    for process in psutil.Process(torchrun.pid).children(recursive=True):
        if process.environ().get("RANK") == str(rank) and "mugrpo_megatron" in process.cmdline():
            return process
    raise AssertionError(f"no process is rank {rank}")


def launch(logs: Path, command: list[str]) -> subprocess.Popen[bytes]:
    logs.mkdir()
    with (logs / "torchrun.log").open("wb") as output:
        words = [TORCHRUN, "--grace", "5", "--logs", str(logs / "ranks"), "2", *command]
        return subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_rank_is_named_and_the_run_goes_on_later(frozen: int, finished_run: Path, tmp_path: Path) -> None:
    """SIGSTOP, as of a debugger or a paused machine, for longer than the limit of a collective."""
    command = branch(finished_run, tmp_path / "run", f"run.collective_timeout_s={TIMEOUT_S}")
    torchrun = launch(tmp_path / "logs", command)
    try:
        wait_until(lambda: len(rows(tmp_path / "run", "update")) >= 4, [torchrun], tmp_path / "logs")
        family = psutil.Process(torchrun.pid).children(recursive=True)
        rank_of(torchrun, frozen).send_signal(signal.SIGSTOP)
        assert torchrun.wait(PATIENCE_S) == 1
    finally:
        kill(torchrun)
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == [], "the frozen rank is ended too"
    failure = re.search(rf"mugrpo: rank {1 - frozen} of 2 failed in .*", said(tmp_path / "logs"))
    assert failure, said(tmp_path / "logs")
    print(failure[0])
    assert f"no heartbeat from rank {frozen} for over" in failure[0]
    assert "The same command continues the run." in said(tmp_path / "logs")
    again = launch(tmp_path / "again", command)
    try:
        assert again.wait(PATIENCE_S) == 0, said(tmp_path / "again")
    finally:
        kill(again)
    whole = launch(tmp_path / "unbroken", branch(finished_run, tmp_path / "whole"))
    try:
        assert whole.wait(PATIENCE_S) == 0, said(tmp_path / "unbroken")
    finally:
        kill(whole)
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert {row["update"] for row in rows(tmp_path / "run", "update")} == set(range(UPDATES))
