"""The fused loss on the device that there is, a GPU with Triton or a CPU, against float64 over all logits."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from mugrpo_megatron.kernels import torch_ops
from mugrpo_megatron.learner.operators import rotate, rotate_
from tests.gpu.tiny import DEVICE
from tests.kernels.problems import (
    OBJECTIVES,
    Problem,
    assert_same,
    distance,
    fused,
    layout_of,
    make_problem,
    materialised,
    tolerance_of,
)


def on_device(thing: Any) -> Any:
    """A tensor, or the tensors of a dataclass and of those inside it, on the device; the recipe's section as it is."""
    if isinstance(thing, torch.Tensor):
        return thing.to(DEVICE)
    if is_dataclass(thing) and not isinstance(thing, type):
        moved = {f.name: on_device(getattr(thing, f.name)) for f in fields(thing)}
        return replace(thing, **moved)
    return thing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_equals_the_materialised_loss(name: str, dtype: torch.dtype) -> None:
    problem: Problem = on_device(make_problem(OBJECTIVES[name], dtype=dtype))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 10 * tolerance_of(problem.config)
    expected = materialised(problem)
    for chunk in (7, 1000):
        result = fused(problem, layout_of(chunk))
        assert result.d_hidden.dtype == result.d_weight.dtype == dtype
        assert_same(result, expected, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_overwrites_logits_without_a_race(dtype: torch.dtype) -> None:
    """A vocabulary of many blocks, many rows at once, several times over."""
    from mugrpo_megatron.kernels import triton_ops

    for seed in range(5):
        torch.manual_seed(seed)
        logits = 5 * torch.randn(1024, 151_936, device="cuda")
        targets = torch.randint(151_936, (1024,), device="cuda")
        coefficient = torch.randn(1024, device="cuda")
        result = triton_ops.statistics(logits, 0.7, 151_900, targets)
        expected = torch_ops.statistics(logits, 0.7, 151_900, targets)
        assert distance(result, expected) < 1e-5
        lse = result[0] + result[1].log()
        expected = torch_ops.gradient(logits.clone(), 0.7, 151_900, targets, lse, coefficient, dtype)
        again = logits.clone()
        assert distance(triton_ops.gradient(logits, 0.7, 151_900, targets, lse, coefficient, dtype), expected) < 1e-2
        entropy = torch_ops.EntropyTerm(lse.abs() / 3, coefficient.flip(0))
        expected = torch_ops.gradient(again.clone(), 0.7, 151_900, targets, lse, coefficient, dtype, entropy)
        result = triton_ops.gradient(again, 0.7, 151_900, targets, lse, coefficient, dtype, entropy)
        assert distance(result, expected) < 1e-2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("heads", [28, 4])
def test_rotation_equals_float64(heads: int, dtype: torch.dtype, tolerance: float) -> None:
    """Queries and keys, which are parts of wider rows."""
    x = torch.randn(300, 36, 128, device=DEVICE).to(dtype)[:, :heads]
    angles = 1000 * torch.rand(300, 1, 64, device=DEVICE)
    exact = rotate_(x.double(), angles.double().cos(), angles.double().sin())
    result = rotate(x, angles.cos(), angles.sin())
    assert distance(result, exact) < tolerance
    assert distance(rotate(result, angles.cos(), angles.sin(), inverse=True), x) < 2 * tolerance


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_swiglu_equals_float64(dtype: torch.dtype, tolerance: float) -> None:
    from mugrpo_megatron.kernels import triton_ops

    x, dy = (torch.randn(300, width, device="cuda").to(dtype) for width in (2 * 2432, 2432))
    exact = x.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    (d_x,) = torch.autograd.grad(expected, exact, dy.double())
    assert distance(triton_ops.swiglu(x), expected.detach()) < tolerance
    assert distance(triton_ops.swiglu_gradient(dy, x), d_x) < tolerance
