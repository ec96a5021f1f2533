"""Triton's row kernels under Triton's interpreter; `test_triton_ops` runs these with it switched on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.kernels import torch_ops, triton_ops
from mugrpo_megatron.learner.operators import rotate_
from tests.kernels.problems import (
    OBJECTIVES,
    TRIED,
    assert_same,
    fused,
    layout_of,
    make_problem,
    materialised,
    tolerance_of,
)

WIDE = 2 * triton_ops.BLOCK + 24
"""Columns that need more than two blocks."""


def case(seed: int, tokens: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(tokens, columns, generator=generator)
    targets = torch.randint(-columns, 2 * columns, (tokens,), generator=generator)
    return logits, targets, torch.randn(tokens, generator=generator)


@settings(max_examples=8)
@given(st.integers(0, 1000), st.integers(0, 4), st.sampled_from([40, triton_ops.BLOCK, WIDE]), st.floats(0, 1))
def test_statistics_equal_those_of_torch(seed: int, tokens: int, columns: int, share: float) -> None:
    logits, targets, _ = case(seed, tokens, columns)
    valid = round(share * columns)
    result = triton_ops.statistics(logits, 1.3, valid, targets)
    torch.testing.assert_close(result, torch_ops.statistics(logits, 1.3, valid, targets), rtol=1e-5, atol=1e-5)


@settings(max_examples=8)
@given(
    st.integers(0, 1000),
    st.integers(0, 4),
    st.sampled_from([40, triton_ops.BLOCK, WIDE]),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_gradient_equals_that_of_torch(
    seed: int, tokens: int, columns: int, share: float, dtype: torch.dtype, with_entropy: bool
) -> None:
    logits, targets, coefficient = case(seed, tokens, columns)
    valid = round(share * columns)
    lse = logits.logsumexp(1) * 1.3
    entropy = torch_ops.EntropyTerm(lse.abs() / 3, coefficient.flip(0)) if with_entropy else None
    expected = torch_ops.gradient(logits.clone(), 1.3, valid, targets, lse, coefficient, dtype, entropy)
    result = triton_ops.gradient(logits, 1.3, valid, targets, lse, coefficient, dtype, entropy)
    assert result.dtype == dtype
    assert result.data_ptr() == logits.data_ptr()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=8)
@given(
    st.integers(0, 1000),
    st.integers(0, 4),
    st.sampled_from([1, 40, triton_ops.LAYER_BLOCK, 2 * triton_ops.LAYER_BLOCK + 24]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_swiglu_and_its_gradient_equal_autograd_in_float64(
    seed: int, rows: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (4 * torch.randn(rows, 1, 2 * width, generator=generator)).to(dtype)
    dy = torch.randn(rows, 1, width, generator=generator).to(dtype)
    exact = x.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    value = torch.nn.functional.silu(gate) * up
    (d_exact,) = torch.autograd.grad(value, exact, dy.double())
    for result, expected in ((triton_ops.swiglu(x), value), (triton_ops.swiglu_gradient(dy, x), d_exact)):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected.detach(), rtol=tolerance, atol=tolerance)


@settings(max_examples=8)
@given(
    st.integers(0, 1000),
    st.integers(0, 4),
    st.integers(1, 35),
    st.sampled_from([2, 16, 64, 80, 96, 128]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rotation_and_its_inverse_equal_those_in_float64(
    seed: int, tokens: int, heads: int, size: int, dtype: torch.dtype, of_tables: torch.dtype
) -> None:
    """Of heads that are a part of wider rows, as queries are; and rotated back, the same."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads + 3, size, generator=generator).to(dtype)[:, 1 : heads + 1]
    angles = 1000 * torch.rand(tokens, 1, size // 2, generator=generator)
    cos, sin = angles.cos().to(of_tables), angles.sin().to(of_tables)
    exact = rotate_(x.double(), cos.double(), sin.double())
    back = rotate_(exact.clone(), cos.double(), -sin.double())
    rotated = triton_ops.rotate(x, cos, sin)
    assert rotated.dtype == dtype
    assert rotated.is_contiguous()
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(rotated.double(), exact, rtol=tolerance, atol=tolerance)
    again = triton_ops.rotate(exact.to(dtype), cos, sin, inverse=True)
    torch.testing.assert_close(again.double(), back, rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("name", TRIED)
def test_fused_loss(name: str) -> None:
    problem = make_problem(OBJECTIVES[name])
    assert_same(fused(problem, layout_of(16, backend="triton")), materialised(problem), tolerance_of(problem.config))
