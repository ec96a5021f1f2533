"""Megatron's parallel linear layers, in which the GEMM of a weight's gradient adds to the float32 gradient buffer.

Megatron has this as `gradient_accumulation_fusion`, with a kernel of apex. Without apex it computes each micro-batch's
gradient in the weight's type and adds it afterwards: one more rounding, and 12 more bytes of traffic per parameter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from mugrpo_megatron.kernels.head import accumulate, gemm_input
from mugrpo_megatron.megatron_compat import grouped_mlp


class ColumnParallel(ColumnParallelLinear):
    """A linear layer with W split by rows. Backward sums x's gradient over the ranks while it computes that of W."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        return _product(input, weight, **options)


class RowParallel(RowParallelLinear):
    """A linear layer with W split by columns; Megatron's `forward` sums the output over ranks."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        return _product(input, weight, **options)


class Replicated(torch.nn.Module):
    """A linear layer x W^T without a bias, with the whole W on every tensor parallel rank.

    Under sequence parallelism a rank has some rows of x, and Megatron sums the gradients of W over the ranks.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(outputs, inputs, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]"""
        return _Product.apply(x, self.weight, None, False, False) if x.is_cuda else F.linear(x, self.weight)


class DirectLayers(LocalSpecProvider):
    def column_parallel_linear(self) -> type:
        return ColumnParallel

    def row_parallel_linear(self) -> type:
        return RowParallel

    def grouped_mlp_modules(self, *_: Any) -> Any:
        return grouped_mlp(SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallel, linear_fc2=RowParallel))


def _product(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
    **_: Any,
) -> torch.Tensor:
    """Compute x W^T, plus the bias if there is one; under sequence parallelism x is gathered first.

    The arguments are those of Megatron's `_forward_impl`.
    """
    output = _Product.apply(input, weight, tp_group, allreduce_dgrad, sequence_parallel)
    return output if bias is None else output + bias


class _Product(torch.autograd.Function):
    """Compute x [..., in] W^T, [..., out]; backward adds W's gradient to `W.main_grad`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup | None,
        reduced: bool,
        sequence: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.reduced, ctx.sequence = group, reduced, sequence
        return (_gathered(x, group)[0] if sequence else x) @ weight.T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy, full_x, gather = grads[0], x, None
        if ctx.sequence and weight.requires_grad:
            full_x, gather = _gathered(x, ctx.group, wait=False)
        dx, reduction = dy @ weight, None
        if gather:
            gather.wait()
        if ctx.sequence:
            full_dx, dx = dx, torch.empty_like(x)
            reduction = dist.reduce_scatter_tensor(dx, full_dx, group=ctx.group, async_op=True)
        elif ctx.reduced:
            reduction = dist.all_reduce(dx, group=ctx.group, async_op=True)
        if weight.requires_grad:
            accumulate(weight.main_grad, gemm_input(dy.flatten(0, -2)), gemm_input(full_x.flatten(0, -2)))
        if reduction:
            reduction.wait()
        return dx, _placeholder_grad(weight), None, None, None


class _PlaceholderGrad(torch.autograd.Function):
    """Return the weight unchanged; backward returns a placeholder for its gradient, which the loss path has already
    added to `main_grad`."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> torch.Tensor | None:
        return _placeholder_grad(ctx.weight)


def with_placeholder_grad(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself, whose backward gives it a placeholder gradient.

    DDP's hook is called only for a weight that gets a gradient, and the loss path has added the real one to
    `main_grad`.
    """
    return _PlaceholderGrad.apply(weight)


def _placeholder_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Uninitialised memory in place of a gradient that is already in `main_grad`; None for a frozen
    weight, or without Megatron's data parallel wrapper."""
    # As in Megatron's fused layers (tensor_parallel/layers.py): with the flag set, DDP's hook
    # (distributed_data_parallel.py) adds nothing, and registers the parameter as ready to be reduced.
    if not weight.requires_grad or not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def _gathered(x: torch.Tensor, group: dist.ProcessGroup | None, wait: bool = True) -> tuple[torch.Tensor, Any]:
    """Gather the rows of all ranks; returns them and, without `wait`, the handle of the gather, which still runs.

    With `wait` the handle is None.
    """
    rows = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    return rows, dist.all_gather_into_tensor(rows, x.contiguous(), group=group, async_op=not wait)
