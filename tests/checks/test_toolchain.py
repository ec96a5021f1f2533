"""What a CUDA machine needs besides Python packages, with stand-ins for its programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mugrpo_megatron.checks.preflight import _check_toolkit
from mugrpo_megatron.checks.toolchain import Tool, tools
from mugrpo_megatron.cuda import finds_cuda, may_find_cuda
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.doctor.doctor import results
from tests.test_cli import HEAVY
from tests.tiny import save_model, write_recipe

pytestmark = pytest.mark.process


def program(folder: Path, name: str, prints: str = "", code: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{prints}'\nexit {code}\n")
    (folder / name).chmod(0o755)


def nvidia_smi(folder: Path, driver: str = "580.95.05", code: int = 0) -> None:
    text = f'#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: NVIDIA H200" || echo {driver}\nexit {code}\n'
    program(folder, "nvidia-smi")
    (folder / "nvidia-smi").write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The PATH of a machine that has everything, and Python's headers in its `include`."""
    tmp_path = tmp_path / "bin"
    nvidia_smi(tmp_path)
    program(tmp_path, "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    for name in ("c++", "gcc", "ninja"):
        program(tmp_path, name)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    monkeypatch.setattr("mugrpo_megatron.checks.toolchain.TOOLKIT", str(tmp_path / "no-toolkit"))
    return tmp_path


def seen(machine: Path, glibc: str = "glibc 2.36", **environment: str) -> list[Tool]:
    return tools({"PATH": str(machine), **environment}, machine / "include", glibc)


def missing(found: list[Tool]) -> dict[str, str]:
    return {tool.name: tool.detail for tool in found if not tool.fits}


def test_a_machine_that_has_everything(machine: Path) -> None:
    found = seen(machine)
    assert missing(found) == {}
    assert [tool.name for tool in found] == ["driver", "glibc", "nvcc", "c++", "gcc", "ninja", "Python.h"]


def test_programs_and_headers_that_are_not_there(machine: Path) -> None:
    absent = {"nvcc": "nvcc", "c++": "c++", "gcc": "gcc", "ninja": "ninja", "Python.h": "include/Python.h"}
    for path in absent.values():
        (machine / path).unlink()
    lacking = [tool for tool in seen(machine) if not tool.fits]
    assert [tool.name for tool in lacking] == list(absent)
    assert all(
        tool.detail.startswith("not ") and "install" in tool.remedy and not tool.blocks_setup for tool in lacking
    )
    assert f"python3.{sys.version_info.minor}-dev" in lacking[-1].remedy


def test_what_is_too_old(machine: Path) -> None:
    nvidia_smi(machine, "570.124.06")
    program(machine, "nvcc", "Cuda compilation tools, release 12.8, V12.8.93")
    found = seen(machine, "glibc 2.28")
    assert missing(found) == {"driver": "570.124.06", "glibc": "2.28", "nvcc": f"release 12.8 ({machine}/nvcc)"}
    assert [tool.name for tool in found if tool.blocks_setup] == ["driver", "glibc"]
    assert "glibc" not in missing(seen(machine, "glibc 2.34"))
    assert missing(seen(machine, ""))["glibc"] == "not found"


def test_the_variables_that_name_compilers_are_followed(machine: Path) -> None:
    for name in ("nvcc", "c++", "gcc"):
        (machine / name).unlink()
    program(machine / "cuda" / "bin", "nvcc", "release 13.1, V13.1.1")
    program(machine, "clang")
    program(machine, "g++-13")
    assert missing(seen(machine, CUDA_HOME=str(machine / "cuda"), CXX="g++-13 -O2")) == {}
    assert "nvcc" in missing(seen(machine, CUDA_HOME=str(machine / "elsewhere"), CXX="g++-13"))


def test_without_a_driver_nothing_is_said_of_it(machine: Path) -> None:
    nvidia_smi(machine, code=9)
    assert seen(machine)[0].name == "glibc"
    (machine / "nvidia-smi").unlink()
    assert seen(machine)[0].name == "glibc"


def test_a_gpu_that_torch_does_not_find_is_an_error(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("PATH", str(machine))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(UserError, match=r"does not: run run_scripts/setup.sh --cuda; .* set CUDA_VISIBLE_DEVICES"):
        finds_cuda()  # a torch for CPU, as a login node gets it
    monkeypatch.setattr("torch.version.cuda", "13.0")
    with pytest.raises(UserError, match=r"nvidia-smi finds a GPU but torch .* does not: update NVIDIA's driver to 580"):
        finds_cuda()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not finds_cuda()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (machine / "nvidia-smi").unlink()
    assert not finds_cuda()


TRAIN = f"""
import sys
from mugrpo_megatron import cuda

cuda.may_find_cuda = lambda: True
from mugrpo_megatron.cli import main

print(main(["train", sys.argv[1]]), *sorted(set({HEAVY}) & set(sys.modules)))
"""


def test_train_names_a_missing_toolkit_before_it_imports_anything_slow(machine: Path, tmp_path: Path) -> None:
    (machine / "nvcc").unlink()
    recipe = write_recipe(tmp_path / "recipe.toml", save_model(tmp_path / "model"), tmp_path / "run")
    environment = {**os.environ, "PATH": str(machine), "CUDA_HOME": str(machine / "no-toolkit")}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-c", TRAIN, str(recipe)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["2"], done.stdout + done.stderr
    assert "an engine does not start on this machine's GPU: nvcc not found in" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_toolkit_is_asked_for_once_a_node(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "nvcc").unlink()
    monkeypatch.setattr("mugrpo_megatron.cuda.may_find_cuda", lambda: True)
    monkeypatch.setenv("PATH", str(machine))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    _check_toolkit()


def test_a_hidden_gpu_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert may_find_cuda()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not may_find_cuda()


def test_doctor_tells_what_a_gpu_lacks(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "c++").unlink()
    nvidia_smi(machine, "550.1")
    monkeypatch.setenv("PATH", str(machine))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("mugrpo_megatron.extras.doctor.doctor.PACKAGES", ())
    lacking = {check.name: check.state for check in results() if check.needed and check.state != "ok"}
    assert {"driver": "broken", "c++": "absent"}.items() <= lacking.items()


def test_it_runs_before_anything_is_installed(machine: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.path.insert(0, sys.argv[1]); "]
    command[-1] += "import mugrpo_megatron.checks.toolchain as t; t.tools_here(); print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, str(root)], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
