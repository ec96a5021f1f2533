"""The scripts' handling of arguments, with stand-ins for the programs that they start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mugrpo_megatron import __version__
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.process

SCRIPTS = Path(__file__).parents[2] / "run_scripts"
SAY_ARGUMENTS = '#!/usr/bin/env bash\nprintf "%s\\n" "$@"\necho "interface=${GLOO_SOCKET_IFNAME:-}"\n'
HAS_THE_PACKAGE = SAY_ARGUMENTS.replace("\n", '\nif [ "$2" = -c ]; then exit 0; fi\n', 1)
LACKS_IT = "#!/usr/bin/env bash\nexit 1\n"


def program(path: Path, text: str = SAY_ARGUMENTS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose Python has the package and prints how it was called."""
    for name in ("torchrun.sh", "slurm.sbatch", "generate.sbatch", "setup.sh"):
        (tmp_path / "run_scripts").mkdir(exist_ok=True)
        shutil.copy(SCRIPTS / name, tmp_path / "run_scripts")
    shutil.copytree(SCRIPTS / "cluster", tmp_path / "run_scripts" / "cluster")
    program(tmp_path / ".venv" / "bin" / "python", HAS_THE_PACKAGE)
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
    assert words[:3] == ["-P", "run_scripts/cluster/launch.py", "600"]
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


ENVIRONMENTS = (".venv/bin/python", "venv/bin/python", "conda/bin/python", "path/python3", "path/python")
"""Where a Python may be, in the order in which torchrun.sh looks."""


@pytest.mark.parametrize("found", range(len(ENVIRONMENTS)))
def test_the_first_environment_that_has_the_package_is_taken(found: int, checkout: Path) -> None:
    for number, name in enumerate(ENVIRONMENTS):
        program(checkout / name, LACKS_IT if number < found else HAS_THE_PACKAGE)
    words = said(
        call(
            checkout,
            *("torchrun.sh", "4", "train", "recipe.toml"),
            VIRTUAL_ENV=str(checkout / "venv"),
            CONDA_PREFIX=str(checkout / "conda"),
            PATH=f"{checkout / 'path'}:{os.environ['PATH']}",
        )
    )
    assert option(words, "--no-python") == str(checkout / ENVIRONMENTS[found])


def test_without_an_environment_it_says_how_to_make_one(checkout: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    for name in ("python3", "python"):
        program(checkout / "path" / name, LACKS_IT)
    done = call(checkout, "torchrun.sh", "4", "train", "r", PATH=f"{checkout / 'path'}:/usr/bin:/bin")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no Python here has mugrpo_megatron" in done.stderr
    assert "run run_scripts/setup.sh" in done.stderr


def test_this_environment_is_found_from_a_checkout_that_has_none(checkout: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    folder = Path(sys.executable).parent
    command = ["run_scripts/cluster/mugrpo.sh", "--version"]
    environment = {**os.environ, "VIRTUAL_ENV": "", "CONDA_PREFIX": "", "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(f"mugrpo {__version__}"), done.stderr


@pytest.mark.parametrize(("node", "is_host"), [("0", "true"), ("1", "false")])
def test_restarts_need_a_rendezvous_that_nodes_can_come_back_to(checkout: Path, node: str, is_host: str) -> None:
    where = ["--nodes", "2", "--node", node, "--master", "head", "--restarts", "3"]
    words = said(call(checkout, "torchrun.sh", *where, "8", "train", "recipe.toml"))
    assert option(words, "--max-restarts") == "3"
    assert option(words, "--rdzv-backend") == "c10d"
    assert option(words, "--rdzv-endpoint") == "head:29500"
    assert f"is_host={is_host}" in option(words, "--rdzv-conf")
    assert "--node-rank" not in words


JOB = {
    "SLURM_JOB_ID": "20017",
    "SLURM_JOB_NODELIST": "gpu-[07-08]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_JOB_CPUS_PER_NODE": "96(x3),64",
}
"""What Slurm says to a job on unequal nodes."""


def srun_of(checkout: Path, script: str, *arguments: str, **environment: str) -> list[str]:
    """The arguments of srun."""
    tools = checkout / "tools"
    program(tools / "scontrol", "#!/usr/bin/env bash\nprintf 'gpu-%s\\n' 07 08\n")
    program(tools / "srun")
    done = call(checkout, script, *arguments, PATH=f"{tools}:{os.environ['PATH']}", **JOB, **environment)
    return said(done)[:-1]


def test_slurm_gives_a_step_as_many_cores_as_every_node_has(checkout: Path) -> None:
    words = srun_of(checkout, "slurm.sbatch", "train", "recipe.toml", "--set", "a.b=two words")
    assert "--cpus-per-task=64" in words
    assert words[-4:] == ["train", "recipe.toml", "--set", "a.b=two words"]
    assert option(words, "--master") == "gpu-07:20017"


PYXIS = ["--container-image=reg#mu:1", "--container-mounts=HERE:HERE,/data:/data", "--container-workdir=HERE"]
APPTAINER = ["apptainer", "exec", "--nv", "--bind", "HERE:HERE,/data:/data", "--pwd", "HERE", "mu.sif"]


@pytest.mark.parametrize("script", ["slurm.sbatch", "generate.sbatch"])
@pytest.mark.parametrize(("kind", "image", "lines"), [("pyxis", "reg#mu:1", PYXIS), ("apptainer", "mu.sif", APPTAINER)])
def test_a_container_sees_the_current_directory_and_runs_the_scripts_of_its_image(
    kind: str, image: str, lines: list[str], script: str, checkout: Path
) -> None:
    arguments = ["train", "recipe.toml"] if script == "slurm.sbatch" else ["4", "recipe.toml"]
    options = [f"--{kind}", image, "--mounts", "/data:/data"]
    words = srun_of(checkout, script, *options, *arguments, SLURM_ARRAY_TASK_ID="3")
    expected = [line.replace("HERE", str(checkout)) for line in lines]
    start = words.index(expected[0])
    assert words[start : start + len(expected)] == expected
    noted = words.index(f"{checkout}/run_scripts/cluster/noted.sh")
    assert (start > noted) == (kind == "apptainer"), "pyxis takes srun's options, apptainer is a command"
    program_of_image = "torchrun.sh" if script == "slurm.sbatch" else "cluster/mugrpo.sh"
    assert f"/mugrpo/run_scripts/{program_of_image}" in words[noted:]
    assert "WORKDIR /mugrpo\n" in (SCRIPTS / "container" / "Dockerfile").read_text()


RUNS = """#!/usr/bin/env bash
# A Python that has the package: notes how it was started, and is stopped by its job's time limit or ends with $ENDS.
if [ "$2" = -c ]; then exit 0; fi
echo "$*" >> "$NOTES"
if [ "$ENDS" != limit ]; then exit "$ENDS"; fi
trap 'echo saved; exit 0' TERM
kill -TERM $PPID
while :; do sleep 0.02; done
"""
SRUN = """#!/usr/bin/env bash
# One node, on which the step's command runs; the time limit's signal goes to that command, and not to its children.
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=1 "$@"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then printf 'gpu-%s\\n' 07 08; else echo "$*" >> "$NOTES"; exit "${REFUSES:-0}"; fi
"""


def job(checkout: Path, *words: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A batch script as Slurm runs it, and what it has started or asked for."""
    for place, text in ((".venv/bin/python", RUNS), ("tools/srun", SRUN), ("tools/scontrol", SCONTROL)):
        program(checkout / place, text)
    notes = checkout / "notes"
    notes.touch()
    known = {"PATH": f"{checkout / 'tools'}:{os.environ['PATH']}", "NOTES": str(notes), "ENDS": "0", **JOB}
    done = call(checkout, words[0], *words[1:], **known | environment)
    return done, notes.read_text().splitlines()


TRAIN = ("slurm.sbatch", "--again", "2", "train", "r.toml", "--set", "a.b=two words")
SHARD = ("generate.sbatch", "4", "r.toml", "--set", "a.b=c")


@pytest.mark.parametrize(
    ("words", "environment", "code", "said", "again"),
    [
        (TRAIN, {"ENDS": "limit"}, 0, "saved\nslurm.sbatch: stopped before its end; queueing job 20017 again", True),
        (TRAIN, {"ENDS": "limit", "SLURM_RESTART_COUNT": "1"}, 0, "queueing job 20017 again", True),
        (TRAIN, {"ENDS": "limit", "SLURM_RESTART_COUNT": "2"}, 1, "restarted 2 times (--again); submit", False),
        (TRAIN, {"ENDS": "limit", "REFUSES": "1"}, 1, "Slurm does not queue this job again", True),
        *((TRAIN, {"ENDS": code}, int(code), "", False) for code in "012"),
        (SHARD, {"ENDS": "limit", "SLURM_ARRAY_TASK_ID": "3"}, 0, "queueing job 20017 again", True),
    ],
)
def test_a_job_is_queued_again_only_where_its_time_limit_stopped_it(
    words: tuple[str, ...], environment: dict[str, str], code: int, said: str, again: bool, checkout: Path
) -> None:
    done, (started, *asked) = job(checkout, *words, **environment)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert asked == ["requeue 20017"] * again
    if words is SHARD:
        assert started.endswith("-m mugrpo_megatron generate r.toml --set a.b=c --engine-only --shard 3/4")
    else:
        assert started.endswith("-m mugrpo_megatron train r.toml --set a.b=two words")
        assert "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr gpu-07 --master-port 20017" in started
        assert "--log-dir logs/20017/node-1 " in started


@pytest.mark.parametrize(
    ("words", "environment", "complaint"),
    [
        (["torchrun.sh", "8"], {}, "torchrun.sh RANKS COMMAND"),
        (["torchrun.sh", "eight", "train"], {}, "eight is not a number"),
        (["torchrun.sh", "--nods", "2", "8", "train"], {}, "unknown option --nods"),
        (["torchrun.sh", "--nodes", "2", "--node", "0", "8", "train"], {}, "needs --master"),
        (["torchrun.sh", "--nodes", "2", "--node", "2", "--master", "head", "8", "train"], {}, "counts from 0 to 1"),
        (["slurm.sbatch", "train"], {}, "usage: sbatch"),
        (["slurm.sbatch", "--agin", "1", "train", "r"], {}, "unknown option --agin"),
        (["slurm.sbatch", "--again", "x", "train", "r"], {}, "--again x is not a number"),
        (["slurm.sbatch", "--pyxis", "a", "--apptainer", "b", "train", "r"], {}, "exclude each other"),
        (["slurm.sbatch", "train", "r"], {"SLURM_GPUS_ON_NODE": ""}, "the job has no GPUs; ask for some"),
        (["generate.sbatch", "4", "r"], {}, "not an array; give sbatch --array"),
        (["generate.sbatch", "4", "r"], {"SLURM_ARRAY_TASK_ID": "4"}, "there is no shard 4 of 4"),
        (["generate.sbatch", "r", "4"], {"SLURM_ARRAY_TASK_ID": "0"}, "r is not a number of shards"),
        (["setup.sh", "--cpu", "--with-apex"], {}, "for CUDA machines"),
        (["setup.sh", "--gpu"], {}, "unknown option --gpu; it takes --cpu, --cuda"),
    ],
)
def test_what_is_wrong_ends_the_script_with_a_sentence(
    words: list[str], environment: dict[str, str], complaint: str, checkout: Path
) -> None:
    before = sorted(checkout.iterdir())
    done, started = job(checkout, *words, **environment)
    assert (done.returncode, started) == (2, [])
    assert complaint in done.stderr
    made = {path.name for path in checkout.iterdir()} - {path.name for path in before}
    assert made <= {"tools", "notes", *({"logs"} if "sbatch" in words[0] else ())}


def test_a_job_submitted_from_elsewhere_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPTS / "slurm.sbatch"), "train", "r"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "submit the job from the repository's root" in done.stderr


@pytest.mark.parametrize("script", [*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch"), *SCRIPTS.glob("cluster/*.sh")])
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    if (shellcheck := shutil.which("shellcheck")) is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, "-x", str(script)], cwd=SCRIPTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_slurm_gives_ranks_the_time_that_torchrun_gives_them_and_needs_no_folder() -> None:
    settings = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", (SCRIPTS / "slurm.sbatch").read_text(), re.MULTILINE))
    grace = re.search(r" grace=(\d+) ", (SCRIPTS / "torchrun.sh").read_text())
    signal, seconds = settings["signal"].split("@")
    assert grace
    assert signal == "TERM"
    assert int(seconds) >= int(grace[1]) + 60
    for script in ("slurm.sbatch", "generate.sbatch"):  # Slurm makes no folder: a job whose log cannot be opened fails
        assert "#SBATCH --output=slurm-%" in (SCRIPTS / script).read_text()


@pytest.mark.parametrize("name", ["Dockerfile", "cpu.Dockerfile"])
def test_the_container_copies_what_there_is(name: str) -> None:
    recipe = (SCRIPTS / "container" / name).read_text()
    copied = [word for line in recipe.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    assert [path for path in copied if not (SCRIPTS.parent / path).exists()] == []
    kept = (SCRIPTS / "container" / f"{name}.dockerignore").read_text().splitlines()
    assert {f"!{path}" for path in copied} <= set(kept)


@pytest.mark.parametrize(
    ("command", "stopped", "code"), [("sleep 977", True, 0), ("bash -c 'kill -TERM $$'", False, 143)]
)
def test_a_command_that_the_signal_ends_was_still_starting(
    tmp_path: Path, command: str, stopped: bool, code: int
) -> None:
    note = tmp_path / "note"
    words = ["bash", str(SCRIPTS / "cluster/noted.sh"), str(note), "bash", "-c", f"echo ready; exec {command}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as started:
        assert started.stdout
        assert started.stdout.readline() == b"ready\n"
        if stopped:
            started.terminate()
        assert started.wait(PATIENCE_S) == code
    assert note.exists() == stopped
