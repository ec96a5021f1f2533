"""The batch scripts under a stand-in for Slurm: from a fresh clone to the end of the run, over time limits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mugrpo_megatron.observe.log import read_rows
from tests.scaling.slurm import Job, Slurm
from tests.tiny import COIN, save_model, write_recipe

pytestmark = [pytest.mark.process, pytest.mark.night]
"""What the scripts hand to srun is in test_scripts.py, every day."""

ROOT = Path(__file__).parents[2]
NODES = ("127.0.0.1", "127.0.0.2")
"""Names that lead to this machine."""
UPDATES = 400
"""Of the real run: so many that the limit comes before its end, however late this process looks."""
PYTHON = """#!/usr/bin/env bash
# A run that needs as many starts as the file `needs` says, and is stopped by SIGTERM before; or ends with `code`.
if [ "$2" = -c ]; then exit 0; fi
log=$RUN/node-$SLURM_NODEID
echo "$(nproc) $*" >> "$log"
if [ -e "$RUN/code" ]; then exit "$(cat "$RUN/code")"; fi
starts=$(wc -l < "$log")
if [ "$starts" -ge "$(cat "$RUN/needs")" ]; then exit 0; fi
trap 'echo saved; exit 0' TERM
: > "$RUN/waits-$SLURM_NODEID-$starts"
while :; do sleep 0.02; done
"""


@dataclass(frozen=True)
class Site:
    """A cluster, and a clone with an environment whose Python is PYTHON."""

    slurm: Slurm
    clone: Path
    run: Path

    def submit(self, *words: object) -> subprocess.CompletedProcess[str]:
        return self.slurm.submit(*words, directory=self.clone, RUN=str(self.run))

    def waits(self, nodes: int) -> Callable[[Job], bool]:
        """Whether all nodes of a job are at work."""
        return lambda job: all((self.run / f"waits-{node}-{job.restarts + 1}").exists() for node in range(nodes))

    def starts(self, node: int = 0) -> list[str]:
        return (self.run / f"node-{node}").read_text().splitlines()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    clone, run = tmp_path / "clone", tmp_path / "run"
    shutil.copytree(ROOT / "run_scripts", clone / "run_scripts", ignore=shutil.ignore_patterns("__pycache__"))
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    run.mkdir()
    (run / "needs").write_text("3")
    return Site(Slurm(tmp_path / "slurm", NODES, cores=2, gpus=4, before=41), clone, run)


def test_a_run_goes_on_over_time_limits_to_its_end_under_one_job(site: Site) -> None:
    done = site.submit("--gpus-per-node", 4, "run_scripts/slurm.sbatch", "train", "r.toml", "--set", "a.b=two words")
    assert done.stdout == "Submitted batch job 42\n", done.stderr
    site.slurm.run(at_limit=site.waits(2))
    (job,) = site.slurm.jobs
    assert (job.state, job.restarts, job.codes) == ("COMPLETED", 2, [0, 0, 0]), job.output.read_text()
    assert job.output.name == "slurm-42.log"
    assert job.output.read_text().count("queueing job 42 again") == 2, "the log of all starts is in one file"
    for node in (0, 1):
        first, *others = site.starts(node)
        assert others == [first] * 2, "each start has the same command"
        assert f"--nproc-per-node 4 --nnodes 2 --node-rank {node} --master-addr 127.0.0.1 --master-port 20042" in first
        assert f"--log-dir logs/42/node-{node} " in first
        assert first.endswith("-m mugrpo_megatron train r.toml --set a.b=two words")
        assert first.startswith(f"{min(2, len(os.sched_getaffinity(0)))} "), "the ranks have all cores of the node"


def test_a_bound_on_the_restarts(site: Site) -> None:
    assert site.submit("--gpus-per-node=1", "run_scripts/slurm.sbatch", "--again", 1, "train", "r").returncode == 0
    site.slurm.run(at_limit=site.waits(2))
    (job,) = site.slurm.jobs
    assert (job.state, job.restarts, job.codes) == ("FAILED", 1, [0, 1])
    assert "restarted 1 times (--again); submit the same command to continue" in job.output.read_text()


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_finished_run_a_failure_and_a_mistake_end_the_job(site: Site, code: int) -> None:
    (site.run / "code").write_text(str(code))
    site.submit("--gpus-per-node=1", "run_scripts/slurm.sbatch", "train", "r")
    site.slurm.run()
    (job,) = site.slurm.jobs
    assert (job.state, job.restarts) == ("FAILED" if code else "COMPLETED", 0)
    # srun ends with the highest code: 137 if the other node was still starting, and was killed.
    assert job.codes in ([code], [137] if code else [0])


def test_a_cancelled_job_is_not_queued_again(site: Site) -> None:
    site.submit("--gpus-per-node=1", "run_scripts/slurm.sbatch", "train", "r")
    site.slurm.run(at_cancel=site.waits(2))
    (job,) = site.slurm.jobs
    assert (job.state, job.restarts) == ("CANCELLED", 0)
    assert "saved" in job.output.read_text(), "it had the time to save"


def test_the_shares_of_a_stage_as_an_array(site: Site) -> None:
    (site.run / "needs").write_text("2")
    script = ["run_scripts/generate.sbatch", "4", "r.toml", "--set", "a.b=c"]
    site.submit("--array", "1-2", "--cpus-per-task=1", *script)
    site.slurm.run(at_limit=lambda job: job.read()["task"] == 1 and site.waits(1)(job))
    one, two = site.slurm.jobs
    assert [(job.state, job.restarts) for job in (one, two)] == [("COMPLETED", 1), ("COMPLETED", 0)]
    assert [job.output.name for job in (one, two)] == ["slurm-42_1.log", "slurm-42_2.log"]
    ran = [line.partition("mugrpo_megatron ")[2] for line in site.starts()]
    said = "generate r.toml --set a.b=c --engine-only --shard"
    assert ran == [f"{said} 1/4", f"{said} 1/4", f"{said} 2/4"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["run_scripts/slurm.sbatch", "train"], "usage: sbatch"),
        (["run_scripts/slurm.sbatch", "--agin", "1", "train", "r"], "unknown option --agin"),
        (["run_scripts/slurm.sbatch", "--again", "x", "train", "r"], "--again x is not a number"),
        (["run_scripts/slurm.sbatch", "--pyxis", "a", "--apptainer", "b", "train", "r"], "exclude each other"),
        (["--gpus-per-node=0", "run_scripts/slurm.sbatch", "train", "r"], "the job has no GPUs; ask for some"),
        (["--cpus-per-task=1", "run_scripts/generate.sbatch", "4", "r"], "not an array; give sbatch --array"),
        (["--cpus-per-task=1", "--array=4", "run_scripts/generate.sbatch", "4", "r"], "there is no share 4 of 4"),
        (["--cpus-per-task=1", "--array=0", "run_scripts/generate.sbatch", "r", "4"], "r is not a number of shares"),
    ],
)
def test_what_is_wrong_is_said_in_the_jobs_log(site: Site, words: list[str], complaint: str) -> None:
    assert site.submit("--gpus-per-node=1", *words).returncode == 0
    site.slurm.run()
    (job,) = site.slurm.jobs
    assert (job.state, job.codes) == ("FAILED", [2])
    assert complaint in job.output.read_text()


def test_a_job_submitted_from_elsewhere_says_so(site: Site) -> None:
    site.slurm.submit("--gpus-per-node=1", site.clone / "run_scripts/slurm.sbatch", "train", "r", directory=site.run)
    site.slurm.run()
    (job,) = site.slurm.jobs
    assert (job.state, job.codes) == ("FAILED", [2])
    assert "submit the job from the repository's root" in job.output.read_text()


@pytest.mark.parametrize("script", ["slurm.sbatch", "generate.sbatch"])
def test_the_stand_in_fails_a_job_in_silence_whose_log_has_no_folder_which_ours_need_not(
    site: Site, script: str
) -> None:
    site.submit("--gpus-per-node=1", "--cpus-per-task=1", "--array=0", "--output=logs/x", f"run_scripts/{script}", "4")
    site.slurm.run()
    (job,) = site.slurm.jobs
    assert (job.state, job.output.exists()) == ("FAILED", False)
    assert "--output=slurm-%" in (site.clone / "run_scripts" / script).read_text()


@pytest.mark.night
def test_two_nodes_train_from_a_fresh_clone_over_a_time_limit(tmp_path: Path) -> None:
    """Two ranks with gloo, a node each: the time limit comes after three updates, and the next start takes the rest."""
    clone = tmp_path / "clone"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a checkout")
    for name in filter(None, listed.stdout.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, clone / name)
        shutil.copymode(ROOT / name, clone / name)
    (clone / ".venv").symlink_to(sys.prefix)
    run_dir = tmp_path / "run"
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        save_model(tmp_path / "model"),
        run_dir,
        schedule={"stages": 1, "updates_per_stage": UPDATES},
        checkpoint={"every_updates": 100},
        reward=COIN,
    )

    def updates() -> list[int]:
        log = run_dir / "metrics.jsonl"
        return [row["update"] for row in read_rows(log) if row["kind"] == "update"] if log.exists() else []

    slurm = Slurm(tmp_path / "slurm", NODES, cores=len(os.sched_getaffinity(0)), gpus=1, before=os.getpid())
    # As installed from a clone, but next to the package of the environment that runs this test.
    environment = {"PYTHONPATH": str(clone), "GLOO_SOCKET_IFNAME": "lo", "HOME": str(tmp_path)}
    words = ["--gpus-per-node=1", "run_scripts/slurm.sbatch", "--interface", "lo", "train", recipe]
    done = slurm.submit(*words, directory=clone, **environment)
    assert done.returncode == 0, done.stderr
    slurm.run(at_limit=lambda job: job.restarts == 0 and len(updates()) >= 3)
    (job,) = slurm.jobs
    said = job.output.read_text()
    assert (job.state, job.restarts, job.codes) == ("COMPLETED", 1, [0, 0]), said
    assert "stopped as asked" in said
    assert f"queueing job {job.id} again" in said
    assert updates() == list(range(UPDATES)), "each update once: the learner was saved when the limit came"
    assert (run_dir / "summary.json").exists()
    logs = clone / "logs" / str(job.id)
    assert all(list((logs / f"node-{node}").rglob("stdout.log")) for node in (0, 1)), "a log for the rank of each node"
