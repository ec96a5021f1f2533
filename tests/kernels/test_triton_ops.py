"""Triton's row kernels without a GPU: interpreted against PyTorch, and compiled for one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.process
def test_under_the_interpreter() -> None:
    """In a process of its own, since Triton decides when a kernel is defined whether it is interpreted."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/interpreted_ops.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.parametrize("narrow", ["fp32", "bf16"])
def test_compile_for_hopper_with_wide_loads_and_stores(narrow: str) -> None:
    """Sizes divisible by 16, as a learner's are, let every thread move 16 bytes at a time."""
    from mugrpo_megatron.kernels import triton_ops

    assert "ld.global.v4" in ptx(
        triton_ops._statistics,
        {"logits": "*fp32", "stride": "i32", "targets": "*i64", "out": "*fp32", "n": "i32", "valid": "i32"},
    )
    found = ptx(
        triton_ops._gradient,
        {"logits": "*fp32", "stride": "i32", "out": f"*{narrow}", "out_stride": "i32", "targets": "*i64"}
        | {"lse": "*fp32", "coefficient": "*fp32", "columns": "i32", "valid": "i32"},
    )
    assert "ld.global.v4" in found
    assert "st.global.v4" in found
    assert ("bar.sync" in found) == (narrow == "bf16")


def ptx(kernel: Any, signature: dict[str, str]) -> str:
    """PTX of a row kernel for compute capability 9.0; compiled to machine code too, or this raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mugrpo_megatron.kernels import triton_ops

    floats = {"scale": "fp32", "floor": "fp32"}
    types = signature | {name: kind for name, kind in floats.items() if name in kernel.arg_names}
    source = ASTSource(
        fn=kernel,
        signature=types | {"BLOCK": "constexpr"},
        constexprs={"BLOCK": triton_ops.BLOCK},
        attrs={(place,): [["tt.divisibility", 16]] for place in range(len(signature))},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": triton_ops.WARPS})
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]
