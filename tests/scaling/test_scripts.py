"""The scripts' handling of arguments, with stand-ins for the programs that they start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SCRIPTS = Path(__file__).parents[2] / "run_scripts"
SAY_ARGUMENTS = '#!/usr/bin/env bash\nprintf "%s\\n" "$@"\necho "interface=${GLOO_SOCKET_IFNAME:-}"\n'


def program(path: Path, text: str = SAY_ARGUMENTS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose Python prints how it was called."""
    for name in ("torchrun.sh", "slurm.sbatch"):
        (tmp_path / "run_scripts").mkdir(exist_ok=True)
        shutil.copy(SCRIPTS / name, tmp_path / "run_scripts")
    program(tmp_path / ".venv" / "bin" / "python")
    return tmp_path


def call(checkout: Path, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"run_scripts/{script}", *arguments],
        cwd=checkout,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
    )


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_one_node(checkout: Path) -> None:
    words = said(call(checkout, "torchrun.sh", "4", "train", "recipe.toml", "--set", "a.b=c"))
    assert words[:3] == ["-P", "run_scripts/launch.py", "600"]
    assert option(words, "--rdzv-backend") == "loopback"
    assert option(words, "--nproc-per-node") == "4"
    ranks = ["-P", "-u", "-m", "mugrpo_megatron", "train", "recipe.toml", "--set", "a.b=c"]
    assert words[words.index("--no-python") + 2 :] == [*ranks, "interface=lo"]
    assert said(call(checkout, "torchrun.sh", "--interface", "ib0", "1", "train", "r"))[-1] == "interface=ib0"
    assert said(call(checkout, "torchrun.sh", "--grace", "90", "1", "train", "r"))[2] == "90"


def test_many_nodes_use_the_master_as_rendezvous(checkout: Path) -> None:
    where = ["--nodes", "16", "--node", "3", "--master", "head.cluster:29400", "--interface", "ib0", "--logs", "logs/1"]
    words = said(call(checkout, "torchrun.sh", *where, "8", "train", "recipe.toml"))
    assert "--rdzv-backend" not in words
    found = {name: option(words, name) for name in ("--nnodes", "--node-rank", "--master-addr", "--master-port")}
    assert list(found.values()) == ["16", "3", "head.cluster", "29400"]
    assert option(words, "--log-dir") == "logs/1"
    assert words[-1] == "interface=ib0"
    words = said(call(checkout, "torchrun.sh", "--nodes", "2", "--node", "0", "--master", "head", "8", "train", "r"))
    assert option(words, "--master-port") == "29500"


def test_without_an_environment_it_says_how_to_make_one(checkout: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    done = call(checkout, "torchrun.sh", "4", "train", "recipe.toml")
    assert done.returncode == 2
    assert "run run_scripts/setup.sh first" in done.stderr


@pytest.mark.parametrize(("node", "is_host"), [("0", "true"), ("1", "false")])
def test_restarts_need_a_rendezvous_that_nodes_can_come_back_to(checkout: Path, node: str, is_host: str) -> None:
    where = ["--nodes", "2", "--node", node, "--master", "head", "--restarts", "3"]
    words = said(call(checkout, "torchrun.sh", *where, "8", "train", "recipe.toml"))
    assert option(words, "--max-restarts") == "3"
    assert option(words, "--rdzv-backend") == "c10d"
    assert option(words, "--rdzv-endpoint") == "head:29500"
    assert f"is_host={is_host}" in option(words, "--rdzv-conf")
    assert "--node-rank" not in words


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["8"], "torchrun.sh RANKS COMMAND"),
        (["eight", "train"], "eight is not a number"),
        (["--nods", "2", "8", "train"], "unknown option --nods"),
        (["--nodes", "2", "--node", "0", "8", "train"], "needs --master"),
        (["--nodes", "2", "--node", "2", "--master", "head", "8", "train"], "counts from 0 to 1"),
    ],
)
def test_torchrun_refuses_what_it_does_not_understand(checkout: Path, arguments: list[str], complaint: str) -> None:
    done = call(checkout, "torchrun.sh", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_slurm_starts_each_node_with_its_number(checkout: Path) -> None:
    tools = checkout / "tools"
    program(tools / "scontrol", "#!/usr/bin/env bash\nprintf 'gpu-%s\\n' 07 08\n")
    program(
        tools / "srun",
        '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do echo "srun $1"; shift; done\nSLURM_NODEID=1 exec "$@"\n',
    )
    done = call(
        checkout,
        "slurm.sbatch",
        *("train", "recipe.toml", "--set", "a.b=two words"),
        PATH=f"{tools}:{os.environ['PATH']}",
        SLURM_JOB_ID="20017",
        SLURM_JOB_NODELIST="gpu-[07-08]",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="4",
        SLURM_CPUS_PER_TASK="96",
    )
    words = said(done)
    assert "srun --cpus-per-task=96" in words
    assert [option(words, name) for name in ("--nnodes", "--node-rank", "--master-addr", "--master-port")] == [
        "2",
        "1",
        "gpu-07",
        "20017",
    ]
    assert option(words, "--nproc-per-node") == "4"
    assert option(words, "--log-dir") == "logs/20017/node-1"
    assert words[-4:-1] == ["recipe.toml", "--set", "a.b=two words"]


def test_slurm_gives_ranks_the_time_that_torchrun_gives_them_and_needs_no_folder() -> None:
    settings = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", (SCRIPTS / "slurm.sbatch").read_text(), re.MULTILINE))
    grace = re.search(r" grace=(\d+) ", (SCRIPTS / "torchrun.sh").read_text())
    signal, seconds = settings["signal"].split("@")
    assert grace
    assert signal == "TERM"
    assert int(seconds) >= int(grace[1]) + 60
    assert "/" not in settings["output"]  # Slurm makes no folder: a job whose log cannot be opened fails in silence


def test_slurm_without_a_recipe(checkout: Path) -> None:
    done = call(checkout, "slurm.sbatch", "train")
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--cpu", "--with-apex"], "for CUDA machines"), (["--gpu"], "unknown option --gpu; it takes --cpu, --cuda")],
)
def test_setup_refuses_before_it_touches_anything(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    script = program(tmp_path / "run_scripts" / "setup.sh", (SCRIPTS / "setup.sh").read_text())
    done = subprocess.run([str(script), *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run_scripts"]


def test_the_container_copies_what_there_is() -> None:
    recipe = (SCRIPTS / "container" / "Dockerfile").read_text()
    copied = [word for line in recipe.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    assert [path for path in copied if not (SCRIPTS.parent / path).exists()] == []
    kept = (SCRIPTS / "container" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{path}" for path in copied} <= set(kept)


def test_apex_is_imported_after_torch_whose_libraries_it_needs() -> None:
    assert "'import torch, amp_C;" in (SCRIPTS / "setup.sh").read_text()
