"""run_scripts/setup.sh with stand-ins for Python and pip: what is replaced when, and by how many at once."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.scaling.test_scripts import program

pytestmark = pytest.mark.process

SCRIPTS = Path(__file__).parents[2] / "run_scripts"
PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-m venv "*)
    echo "venv $3" >> calls
    cudnn=$3/lib/python3.11/site-packages/nvidia/cudnn/include
    mkdir -p "$3/bin" "$cudnn"; touch "$cudnn/cudnn.h"
    cp "$0" "$3/bin/python"; cp "$(dirname "$0")/pip" "$3/bin/pip" ;;
  "-m mugrpo_megatron"*) echo "asked for tools" >> calls; exit "${TOOLS_CODE:-0}" ;;
  *torch.version.cuda*) echo 13.0 ;;
esac
"""
PIP = """#!/usr/bin/env bash
echo "pip CPATH=${CPATH:-} $*" >> calls
if [ -e gate ]; then read -r _ < gate; fi
exit "${PIP_CODE:-0}"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which nothing was installed, with stand-ins for the programs in `tools`."""
    (tmp_path / "run_scripts").mkdir()
    for name in ("setup.sh", *(f"constraints-{kind}.txt" for kind in ("cpu", "cuda", "cpu-new", "cuda-new"))):
        shutil.copy(SCRIPTS / name, tmp_path / "run_scripts")
    shutil.copy(SCRIPTS.parent / "pyproject.toml", tmp_path)
    (tmp_path / "tools").mkdir()
    for python in ("python3.11", "python3.12"):
        program(tmp_path / "tools" / python, PYTHON)
    program(tmp_path / "tools" / "pip", PIP)
    program(tmp_path / "tools" / "nvcc", "#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    return tmp_path


def start(checkout: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    path = f"{checkout / 'tools'}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["run_scripts/setup.sh", *(arguments or ["--cpu"])],
        cwd=checkout,
        env={"PATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(checkout: Path, *arguments: str, code: int = 0, **environment: str) -> str:
    process = start(checkout, *arguments, **environment)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, said
    return said


def calls(checkout: Path, word: str) -> list[str]:
    return [line for line in (checkout / "calls").read_text().splitlines() if line.startswith(word)]


def change_a_pin(checkout: Path, text: str) -> None:
    (checkout / "run_scripts" / "constraints-cpu.txt").write_text(text)


def test_a_second_call_does_nothing_and_a_changed_pin_makes_another_environment(checkout: Path) -> None:
    run(checkout)
    first = (checkout / ".venv").resolve()
    assert (first / "bin" / "python").is_file()
    assert run(checkout) == ""
    change_a_pin(checkout, "torch==9\n")
    run(checkout)
    second = (checkout / ".venv").resolve()
    assert second != first
    assert first.is_dir()  # runs go on with it
    shutil.copy(SCRIPTS / "constraints-cpu.txt", checkout / "run_scripts")
    run(checkout)
    assert (checkout / ".venv").resolve() == first
    assert len(calls(checkout, "venv")) == 2


def test_a_copied_checkout_gets_an_environment_of_its_own(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run(checkout)
    copy = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(checkout, copy, symlinks=True)
    assert f"was made for {checkout}" in run(copy)
    assert (copy / ".venv" / ".ready").read_text().endswith(f"{copy}\n")
    assert run(copy) == run(checkout) == ""


def test_an_environment_that_is_neither_new_nor_former_is_removed_unless_a_process_uses_it(checkout: Path) -> None:
    run(checkout)
    oldest = (checkout / ".venv").resolve()
    shutil.copy("/bin/sleep", oldest / "bin" / "engine")
    with subprocess.Popen([oldest / "bin" / "engine", "1000"]) as engine:
        for pin in "ab":
            change_a_pin(checkout, f"{pin}\n")
            run(checkout)
        assert oldest.is_dir()
        engine.kill()
    change_a_pin(checkout, "c\n")
    run(checkout)
    assert not oldest.exists()
    assert len([path for path in (checkout / ".venvs").iterdir() if path.is_dir()]) == 2


def test_a_set_up_that_fails_leaves_the_environment_that_there_is(checkout: Path) -> None:
    run(checkout)
    before = (checkout / ".venv").resolve()
    change_a_pin(checkout, "torch==9\n")
    run(checkout, code=1, PIP_CODE="1")
    assert (checkout / ".venv").resolve() == before
    run(checkout)
    assert (checkout / ".venv").resolve() != before


def test_two_at_once_make_one_environment(checkout: Path) -> None:
    os.mkfifo(checkout / "gate")
    first = start(checkout)
    assert first.stdout
    assert "installing" in first.stdout.readline()
    second = start(checkout)
    assert second.stdout
    waiting = second.stdout.readline()
    for said in _opened(checkout / "gate", first):
        assert said is None
    assert "another setup.sh is at work" in waiting
    assert second.wait(PATIENCE_S) == 0
    assert len(calls(checkout, "venv")) == 1


def _opened(gate: Path, process: subprocess.Popen[str]) -> Iterator[int | None]:
    """Let every pip pass the gate until the process ends."""
    while (code := process.poll()) is None:
        try:
            with os.fdopen(os.open(gate, os.O_WRONLY | os.O_NONBLOCK), "w") as passing:
                passing.write("\n")
        except OSError:  # no pip waits yet
            yield code
    assert code == 0


def test_a_machine_that_cannot_run_the_packages_is_refused_before_anything_is_made(checkout: Path) -> None:
    run(checkout, "--cuda", code=2, TOOLS_CODE="2")
    assert (checkout / "calls").read_text() == "asked for tools\n"
    assert not (checkout / ".venvs").exists()


def test_cuda_installs_the_locked_extra_and_builds_against_pips_cudnn(checkout: Path) -> None:
    run(checkout, "--cuda", "--with-te")
    packages, *_, engine = calls(checkout, "pip")
    assert "--constraint run_scripts/constraints-cuda.txt --editable .[cuda,dev,study]" in packages
    assert "transformer-engine[pytorch,core_cu13]==" in engine
    assert "nvidia/cudnn/include:" in engine


def test_the_new_stack_stands_beside_the_pinned_one(checkout: Path) -> None:
    run(checkout)
    pinned = (checkout / ".venv").resolve()
    assert "the new stack for cpu into .venv-new" in run(checkout, "--cpu", "--stack", "new")
    new = (checkout / ".venv-new").resolve()
    assert new.is_dir()
    assert (checkout / ".venv").resolve() == pinned
    assert (
        "--constraint run_scripts/constraints-cpu-new.txt --editable .[cpu-new,dev,docs,study]"
        in calls(checkout, "pip")[-1]
    )
    assert calls(checkout, "asked") == ["asked for tools"] * 2, "SGLang comes from mugrpo_megatron.extras.doctor.fix"
    assert run(checkout) == run(checkout, "--stack", "new", "--cpu") == ""
    for pin in "ab":  # the environments of one stack do not remove those of the other
        change_a_pin(checkout, pin)
        run(checkout)
    assert new.is_dir()


@pytest.mark.parametrize("arguments", [["--stack"], ["--stack", "old"], ["--cuda", "--stack", "new", "--with-te"]])
def test_a_stack_that_there_is_not_is_refused(checkout: Path, arguments: list[str]) -> None:
    assert "--stack" in run(checkout, *arguments, code=2)
