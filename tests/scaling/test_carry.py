"""run_scripts/bench/carry.sh: what goes to a GPU machine without a network."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "run_scripts" / "bench" / "carry.sh").read_text(encoding="utf-8")
LIBRARIES = ["sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/spatial_ops.abi3.so"]
"""The ones that a Hopper GPU without FlashAttention 3 loads."""


def test_everything_that_is_carried_is_pinned() -> None:
    packages = re.sub(r"\s+", " ", TEXT.split("packages=(")[1].split(")")[0]).split()
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
        (tmp_path / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "all" / name).write_text(name)
    [command] = [line for line in TEXT.splitlines() if line.startswith("tar c")]
    environment = os.environ | {"work": str(tmp_path), "out": str(tmp_path)}
    subprocess.run(["bash", "-euc", command], env=environment, check=True)
    with tarfile.open(tmp_path / "sgl_kernel.tar.xz") as archive:
        files = {member.name.removeprefix("./") for member in archive if member.isfile()}
    assert files == {*python, *LIBRARIES, record}
