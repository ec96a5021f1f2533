"""Triton's kernels without a GPU: interpreted against PyTorch, and compiled for one."""

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
@pytest.mark.parametrize("narrow", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("entropy", [False, True])
def test_compile_for_hopper_with_wide_loads_and_stores(narrow: str, entropy: bool) -> None:
    """Sizes divisible by 16, as a learner's are, let every thread move 16 bytes at a time."""
    from mugrpo_megatron.kernels import triton_ops

    assert "ld.global.v4" in ptx(
        triton_ops._statistics,
        {"logits": "*fp32", "stride": "i32", "targets": "*i64", "out": "*fp32", "n": "i32", "valid": "i32"},
    )
    result = ptx(
        triton_ops._gradient,
        {"logits": "*fp32", "stride": "i32", "out": f"*{narrow}", "out_stride": "i32", "targets": "*i64"}
        | {"lse": "*fp32", "d_logprobs": "*fp32", "entropy": "*fp32", "d_entropy": "*fp32"}
        | {"columns": "i32", "valid": "i32"},
        {"BLOCK": triton_ops.BLOCK, "ENTROPY": entropy},
    )
    assert "ld.global.v4" in result
    assert "st.global.v4" in result
    assert ("bar.sync" in result) == (narrow != "fp32")


@pytest.mark.process
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_swiglu_compiles_for_hopper_with_wide_loads_and_stores(kind: str) -> None:
    from mugrpo_megatron.kernels import triton_ops

    constants = {"BLOCK": triton_ops.LAYER_BLOCK}
    for kernel, tensors, read in (
        (triton_ops._swiglu, "x out", 2),
        (triton_ops._swiglu_gradient, "grad x dx", 3),
    ):
        types = dict.fromkeys(tensors.split(), f"*{kind}") | {"width": "i32"}
        result = ptx(kernel, types, constants, triton_ops.LAYER_WARPS)
        assert result.count("ld.global.v4") == read * (1 if kind == "bf16" else 2)
        assert "st.global.v4" in result


@pytest.mark.process
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "half"), [(28, 64), (4, 64), (16, 32)])  # Qwen2.5-7B's queries and keys; 0.5B's
def test_rotation_compiles_for_hopper_with_wide_loads_and_stores(kind: str, heads: int, half: int) -> None:
    from mugrpo_megatron.kernels import triton_ops

    block, warps = triton_ops.tile(heads, half)
    signature = {"x": f"*{kind}", "token_stride": "i32", "head_stride": "i32", "cos": "*fp32", "sin": "*fp32"}
    for inverse in (False, True):
        result = ptx(
            triton_ops._rotate,
            signature | {"out": f"*{kind}", "heads": "i32", "half": "i32"},
            {"INVERSE": inverse, "HEADS": block, "HALF": half},
            warps,
        )
        assert "ld.global.v4" in result
        assert "st.global.v4" in result


def ptx(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any] | None = None, warps: int | None = None
) -> str:
    """PTX of a kernel for compute capability 9.0; compiled to machine code too, or this raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mugrpo_megatron.kernels import triton_ops

    constants = constants or {"BLOCK": triton_ops.BLOCK}
    floats = {"scale": "fp32", "floor": "fp32"}
    types = signature | {name: kind for name, kind in floats.items() if name in kernel.arg_names}
    source = ASTSource(
        fn=kernel,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(argument,): [["tt.divisibility", 16]] for argument in range(len(signature))},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps or triton_ops.WARPS}
    )
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]
