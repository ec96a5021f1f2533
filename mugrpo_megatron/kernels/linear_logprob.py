"""Log-probabilities of tokens directly from hidden states and the output weight, a chunk of tokens at a time.

For any function of the log-probabilities: 1 GEMM forward; backward recomputes the logits, 4 GEMMs in total. Losses of
`algorithm` use `fused_loss`, which mostly needs 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mugrpo_megatron.kernels.head import HeadLayout, head_backward, make_head, of, project, scan


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, layout: HeadLayout, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution; differentiable in `hidden` and `weight`.

    Args:
        hidden: [T, H], the same on every rank of `layout.tp_group` (gathered before, under sequence parallelism).
        weight: [V / tp, H], this rank's rows of the output weight.
        targets: int64 [T] global token ids below `layout.vocab_size`.
        kept: int64 [T, k] global token ids that each softmax runs over, -1 where fewer; None for the vocabulary.

    Returns:
        logprobs float32 [T]; entropy float32 [T] in nats, not differentiable.

    The gradient of `hidden` is this rank's PART: the caller sums it over the group, as the backward of
    `copy_to_tensor_model_parallel_region` (all-reduce) or of
    `gather_from_sequence_parallel_region(tensor_parallel_output_grad=True)` (reduce-scatter) does.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, layout, kept)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, layout: HeadLayout, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        head = make_head(weight, layout, len(targets))
        logprobs, entropy, lse = torch.empty(3, len(targets), dtype=torch.float32, device=hidden.device)
        for part in head.chunks(len(targets)):
            logprobs[part], entropy[part], lse[part] = scan(head, hidden[part], targets[part], of(kept, part))
        ctx.layout = layout
        ctx.save_for_backward(hidden, weight, targets, lse, kept)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, kept = ctx.saved_tensors
        head = make_head(weight, ctx.layout, len(targets))
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in head.chunks(len(targets)):
            project(head, hidden[part], of(kept, part))
            d_hidden[part] = head_backward(head, hidden[part], targets[part], lse[part], grads[0][part], d_weight)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None
