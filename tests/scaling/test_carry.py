"""run_scripts/dev/bench/carry.sh: what goes to a GPU machine without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from run_scripts.dev.bench.engine_kernels import HEAD_DIMS, ROW_BYTES, compile_kernels
from run_scripts.dev.bench.ten_learner import SHAPES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "run_scripts/dev/bench/carry.sh").read_text(encoding="utf-8")
CARRIED = ROOT / ".gpu" / "engine" / "site.tar.xz"
KERNELS = re.compile(r"\./(sgl_kernel|sglang_kernel-|flashinfer|IPython)")
LIBRARIES = ["sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/spatial_ops.abi3.so"]
"""The ones that a Hopper GPU without FlashAttention 3 loads."""
IMPORT = """
import importlib
import sys
from unittest.mock import MagicMock

from tests.engine.simulated_cuda import simulate

simulate(stubs=["sentencepiece"])
sys.modules["sgl_kernel.load_utils"] = MagicMock()  # loads the libraries
for name in sys.argv[1:]:
    importlib.import_module(name)
print(sys.modules["sgl_kernel"].__file__)
"""
MODULES = (
    "sgl_kernel",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.qwen2",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.qwen3_moe",
    "sglang.srt.models.llama",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.layers.sampler",
)
"""What an engine on CUDA imports."""


def test_everything_that_is_carried_is_pinned() -> None:
    packages = [name for part in ("learner", "engine") for name in TEXT.split(f"\n{part}=(")[1].split(")")[0].split()]
    assert len(packages) == len(set(packages)) > 30
    constraints = [ROOT / "run_scripts" / f"constraints-{name}.txt" for name in ("cuda", "cpu")]
    pins = [line for file in constraints for line in file.read_text(encoding="utf-8").splitlines()]
    assert [package for package in packages if not any(pin.startswith(f"{package}==") for pin in pins)] == []


@pytest.mark.process
def test_every_python_file_of_the_kernels_is_carried_and_no_library_too_many(tmp_path: Path) -> None:
    """The script's own `tar`, on files named as in the wheel of sglang-kernel 0.4.4."""
    python = ["sgl_kernel/__init__.py", "sgl_kernel/quantization/gguf.py", "sgl_kernel/testing/a/b.py"]
    left = ["sgl_kernel/flash_ops.abi3.so", "sgl_kernel/flashmla_ops.abi3.so", "sgl_kernel/sm100/common_ops.abi3.so"]
    record = "sglang_kernel-0.4.4.dist-info/RECORD"
    for name in (*python, *LIBRARIES, *left, record):
        (tmp_path / "engine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "engine" / name).write_text(name)
    (tmp_path / "out" / "engine").mkdir(parents=True)
    [command] = [line for line in TEXT.splitlines() if line.strip().startswith("tar c")]
    environment = os.environ | {"work": str(tmp_path), "archive": str(tmp_path / "out"), "part": "engine"}
    subprocess.run(["bash", "-euc", command], env=environment, check=True)
    with tarfile.open(tmp_path / "out" / "engine" / "site.tar.xz") as archive:
        files = {member.name.removeprefix("./") for member in archive if member.isfile()}
    assert files == {*python, *LIBRARIES, record}


def test_kernels_are_compiled_for_the_shapes_and_the_architecture_of_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang asks of its compiler; its engine looks for the same names (`load_jit`)."""
    compiler = MagicMock(__version__="1")
    monkeypatch.setitem(sys.modules, "tvm_ffi", compiler)
    monkeypatch.setitem(sys.modules, "tvm_ffi.cpp", compiler.cpp)
    compile_kernels()
    folders = [Path(call.kwargs["build_directory"]).name for call in compiler.cpp.load_inline.call_args_list]
    assert all(folder.endswith("__arch_9.0__tvmffi_1") for folder in folders)
    shape = SHAPES["Qwen2.5-1.5B"]
    head_dim = shape.hidden_size // shape.num_attention_heads
    for sizes, size, kernel in (
        (HEAD_DIMS, head_dim, f"fused_rope_true_{head_dim}_true_bf16_t"),
        (ROW_BYTES, 2 * head_dim * shape.num_key_value_heads, f"kvcache_{ROW_BYTES[0]}_true"),
    ):
        assert size in sizes
        assert sum(folder.startswith(f"sgl_kernel_jit_{kernel}") for folder in folders) == 1
    assert len(folders) == 8


@pytest.mark.process
def test_parts_are_unpacked_without_xz_and_one_after_the_other(tmp_path: Path) -> None:
    """The learner's part alone, then the others; an empty environment, and a PATH with a few programs."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for program in ("bash", "tar", "cp", "mkdir", "touch", "dirname"):
        (tools / program).symlink_to(shutil.which(program) or program)
    (tools / "python3").write_text(f'#!{shutil.which("sh")}\nexec {sys.executable} "$@"\n')
    (tools / "python3").chmod(0o755)
    (tmp_path / "module.py").touch()

    def carry(part: str, *modules: str) -> None:
        (tmp_path / ".gpu" / part).mkdir(parents=True)
        with tarfile.open(tmp_path / ".gpu" / part / "site.tar.xz", "w:xz") as archive:
            for module in modules:
                archive.add(tmp_path / "module.py", f"./{module}.py")

    def source(*modules: str) -> str:
        script = (
            f"source {ROOT}/run_scripts/dev/bench/carried.sh; PATH={tools}; python3 -c 'import {', '.join(modules)}'"
        )
        environment = {"HOME": str(tmp_path), "PATH": str(tools)}
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.stderr if done.returncode else ""

    carry("learner", "of_learner")
    assert source("of_learner") == ""
    assert "No module named 'of_engine'" in source("of_engine")
    carry("engine", "of_engine", "of_stub")
    kernel = Path("sgl_kernel_jit", "kernel.so")
    (tmp_path / ".gpu" / "engine" / "tvm-ffi" / kernel).parent.mkdir(parents=True)
    (tmp_path / ".gpu" / "engine" / "tvm-ffi" / kernel).touch()
    assert source("of_learner", "of_engine", "of_stub") == ""
    assert (tmp_path / ".cache" / "tvm-ffi" / kernel).exists()
    carry("te", "of_te")
    assert "No module named 'of_te'" in source("of_te"), "Megatron would import it without its extension"
    assert (tmp_path / "te" / "of_te.py").exists()


@pytest.mark.process
def test_a_folder_travels_in_parts_and_a_damaged_part_is_named(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here / "model", there / "home", there / "checkout"):
        place.mkdir(parents=True)
    (here / "model" / "weights").write_bytes(os.urandom(70_000))
    (here / "model" / "config.json").write_text("{}")

    def parts(*arguments: str, where: Path, code: int = 0) -> str:
        environment = os.environ | {"HOME": str(there / "home"), "PART_BYTES": "30000"}
        script = str(ROOT / "run_scripts/dev/bench/parts.sh")
        done = subprocess.run([script, *arguments], cwd=where, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "parts: 3 of model" in parts("split", "model", where=here)
    for number in "123":  # a call each; the checkout there has what the last call brought
        shutil.rmtree(there / "checkout" / ".gpu", ignore_errors=True)
        (there / "checkout" / ".gpu" / "parts").mkdir(parents=True)
        for name in (number, "sums"):
            shutil.copy(here / ".gpu" / "parts" / name, there / "checkout" / ".gpu" / "parts")
        assert f"parts: {number} of 3 are there" in parts("take", where=there / "checkout")
    second = there / "home" / "parts" / "2"
    whole = second.read_bytes()
    second.write_bytes(b"x" + whole[1:])
    assert "2: FAILED" in parts("join", where=there / "checkout", code=1)
    second.write_bytes(whole)
    parts("join", where=there / "checkout")
    for name in ("weights", "config.json"):
        assert (there / "checkout" / "model" / name).read_bytes() == (here / "model" / name).read_bytes()
    assert not (there / "home" / "parts").exists()
    parts("joins", where=here, code=2)


@pytest.mark.process
@pytest.mark.skipif(not CARRIED.exists(), reason="run run_scripts/dev/bench/carry.sh first: it downloads 600 MB")
def test_an_engine_can_be_imported_from_what_is_carried(tmp_path: Path) -> None:
    """On a machine that claims to have CUDA; all but the libraries, which need a GPU."""
    with tarfile.open(CARRIED) as archive:
        archive.extractall(tmp_path, [file for file in archive if KERNELS.match(file.name)], filter="data")
    record = next(tmp_path.glob("sglang_kernel-*.dist-info/RECORD")).read_text(encoding="utf-8")
    python = [line.split(",")[0] for line in record.splitlines() if line.split(",")[0].endswith(".py")]
    assert [name for name in python if not (tmp_path / name).exists()] == []
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    variables = {"SGLANG_IS_FLASHINFER_AVAILABLE": "false", "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}
    command = [sys.executable, "-c", IMPORT, *MODULES]
    environment = os.environ | variables | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "sgl_kernel" / "__init__.py")
