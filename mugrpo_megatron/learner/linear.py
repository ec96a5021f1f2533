"""Megatron's parallel linear layers, whose weight gradient is added to the float32 buffer by its GEMM.

Megatron has this as `gradient_accumulation_fusion`, with a kernel of apex. Otherwise it computes the gradient of each
micro-batch in the weight's type and adds it afterwards: a rounding more, and 12 more bytes of traffic a parameter.
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
    """W is split by rows; the gradient of the input is reduced while that of W is computed."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        return _product(input, weight, **options)


class RowParallel(RowParallelLinear):
    """W is split by columns; Megatron's `forward` reduces the output."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        return _product(input, weight, **options)


class Replicated(torch.nn.Module):
    """x W^T without a bias, W whole on every tensor parallel rank.

    Under sequence parallelism a rank has a part of x, and Megatron sums the gradients of W over the ranks.
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
    """Megatron's local layers with these linear ones."""

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
    """x W^T (+ bias), under sequence parallelism of the whole sequence; arguments as Megatron's implementation has."""
    output = _Product.apply(input, weight, tp_group, allreduce_dgrad, sequence_parallel)
    return output if bias is None else output + bias


class _Product(torch.autograd.Function):
    """x [..., in] W^T -> [..., out]; in backward W's gradient goes into `W.main_grad`."""

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
        dy, whole, gathering = grads[0], x, None
        if ctx.sequence and weight.requires_grad:
            whole, gathering = _gathered(x, ctx.group, wait=False)
        dx, reducing = dy @ weight, None
        if gathering:
            gathering.wait()
        if ctx.sequence:
            parts, dx = dx, torch.empty_like(x)
            reducing = dist.reduce_scatter_tensor(dx, parts, group=ctx.group, async_op=True)
        elif ctx.reduced:
            reducing = dist.all_reduce(dx, group=ctx.group, async_op=True)
        if weight.requires_grad:
            accumulate(weight.main_grad, gemm_input(dy.flatten(0, -2)), gemm_input(whole.flatten(0, -2)))
        if reducing:
            reducing.wait()
        return dx, _stand_in(weight), None, None, None


class _Added(torch.autograd.Function):
    """The weight; in backward the stand-in for a gradient that the loss path has added to `main_grad`."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> torch.Tensor | None:
        return _stand_in(ctx.weight)


def with_stand_in(weight: torch.Tensor) -> torch.Tensor:
    """A weight whose gradient goes directly into `main_grad`, so that its hook still tells when that is done."""
    return _Added.apply(weight)


def _stand_in(weight: torch.Tensor) -> torch.Tensor | None:
    """Memory in place of a gradient that is in `main_grad` already, as Megatron's own fusion returns it.

    Megatron's hook then adds nothing, and counts the parameter as ready to be reduced. None without Megatron's wrapper.
    """
    if not weight.requires_grad or not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def _gathered(x: torch.Tensor, group: dist.ProcessGroup | None, wait: bool = True) -> tuple[torch.Tensor, Any]:
    """The parts of all ranks, and what to wait for if not waited for here."""
    whole = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=not wait)
