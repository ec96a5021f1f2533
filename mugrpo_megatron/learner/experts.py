"""Megatron's local experts, with SwiGLU and the router's weight in one kernel on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP


class Experts(SequentialMLP):
    """One expert after the other: 3 kernels forward, where Megatron runs 7 or compiles its activation."""

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, probabilities: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """hidden [t, h], ordered by expert, and the router's probabilities [t] -> weighted outputs [t, h]."""
        if not hidden.is_cuda:
            return super().forward(hidden, tokens_per_expert, probabilities)
        return self.weighted(hidden, tokens_per_expert, probabilities), None

    def weighted(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, probabilities: torch.Tensor
    ) -> torch.Tensor:
        """`forward` with the weight inside the activation."""
        counts = tokens_per_expert.tolist()
        outputs = []
        for expert, tokens, weights in zip(
            self.local_experts, hidden.split(counts), probabilities.split(counts), strict=True
        ):
            inner, _ = expert.linear_fc1(tokens)
            outputs.append(expert.linear_fc2(_WeightedSwiGLU.apply(inner, weights))[0])
        return torch.cat(outputs)


class _WeightedSwiGLU(torch.autograd.Function):
    """x [t, 2 f], weights [t] -> silu(gate) * up * weights [t, f] in the type of x; saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weights)
        if x.is_cuda:
            from mugrpo_megatron.kernels.triton_swiglu import swiglu

            return swiglu(x, weights)
        return _weighted(x, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights = ctx.saved_tensors
        if x.is_cuda:
            from mugrpo_megatron.kernels.triton_swiglu import swiglu_gradient

            return swiglu_gradient(grads[0], x, weights)
        with torch.enable_grad():
            inputs = x.detach().requires_grad_(), weights.detach().requires_grad_()
            return torch.autograd.grad(_weighted(*inputs), inputs, grads[0])


def _weighted(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up * weights.unsqueeze(-1)).to(x.dtype)
