"""Gated delta networks in an engine on CPU: the kernels that SGLang takes from `sgl_kernel`, in torch's operations.

SGLang's own kernels need AMX. Names and arguments are SGLang 0.5.23's (srt/models/qwen3_5.py,
srt/layers/attention/linear). Every request has a slot in SGLang's pools, which hold its state, float32 [heads, value,
key], and its window, the last inputs of the convolution.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from mugrpo_megatron.kernels.gated_delta import gated_delta_rule, unit_heads


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply x, the output of attention, by sigmoid(gate), in place."""
    x.mul_(gate.reshape(x.shape).float().sigmoid().to(x.dtype))


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS-normalise each head of q and k; then multiply it by its weight, `q_weight` or `k_weight`, plus 1.

    Takes [tokens, heads x width], returns [tokens x heads, width] of both.
    """
    return _norm(q.reshape(-1, width), q_weight, eps), _norm(k.reshape(-1, width), k_weight, eps)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], 1.0 + weight.float(), eps).to(x.dtype)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    width: int,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `fused_qk_gemma_rmsnorm_cpu` does, for a q in which a gate follows each head.

    Also returns the gates, [tokens x heads, width].
    """
    q, gate = q_gate.reshape(len(q_gate), heads, 2, width).unbind(2)
    # Without `contiguous` the gates of a single token would be a view with gaps, which SGLang cannot flatten.
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, width), gate.reshape(-1, width).contiguous()


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, key_heads: int, heads: int, key: int, value: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the projections `qkvz` and `ba` [tokens, ...] into qkv, z, beta and alpha.

    qkv has the queries, keys and values of all heads one after another; z is [tokens, heads, value]; beta and
    alpha are [tokens, heads].
    """
    qkv, z = qkvz.split([2 * key_heads * key + heads * value, heads * value], -1)
    b, a = ba.split(heads, -1)
    return qkv.contiguous(), z.unflatten(-1, (heads, value)).contiguous(), b.contiguous(), a.contiguous()


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log(decay), and beta; both are float32 [1, tokens, heads], from a and b [tokens, heads]."""
    log_decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return log_decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Convolve x [channels, tokens], the tokens of one request after another, and apply SiLU; returns the same shape.

    The requests' windows in `conv_states` are updated.
    """
    slots = cache_indices.long()
    windows = conv_states[slots].to(x.dtype) * has_initial_state.view(-1, 1, 1)
    outputs, last = [], []
    for window, tokens in zip(windows, x.split(query_start_loc.diff().tolist(), 1), strict=True):
        inputs = torch.cat([window, tokens], 1)
        outputs.append(F.conv1d(inputs[None], weight.unsqueeze(1), bias, groups=len(x))[0])
        last.append(inputs[:, 1 - weight.shape[1] :])
    conv_states[slots] = torch.stack(last).to(conv_states.dtype)
    return F.silu(torch.cat(outputs, 1))


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Any,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve x [requests, channels], one token of each request, and apply SiLU; returns the same shape.

    The requests' windows in `conv_states` are updated.
    """
    slots = conv_state_indices.long()
    inputs = torch.cat([conv_states[slots].to(x.dtype), x.unsqueeze(-1)], -1)
    conv_states[slots] = inputs[..., 1:].to(conv_states.dtype)
    out = torch.linalg.vecdot(inputs, weight)
    return F.silu(out if bias is None else out + bias)


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """Apply the gated delta rule to q, k, v [1, tokens, heads, ...], the tokens of one request after another.

    Returns [1, tokens, heads, value], and updates the requests' states.
    """
    slots, lengths = initial_state_indices.long(), cu_seqlens.diff().tolist()
    # Requests are padded with zeros: a log-decay of 0 and a beta of 0 leave the state as it is.
    query, key, value, log_decay, rate = (
        pad_sequence(list(x[0].float().split(lengths)), batch_first=True) for x in (q, k, v, g, beta)
    )
    out, initial_state[slots] = gated_delta_rule(query, key, value, log_decay, rate, initial_state[slots])
    tokens = torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)])
    return tokens.unsqueeze(0).to(v.dtype), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Apply the gated delta rule to q, k, v [1, requests, heads, ...], one token of each request.

    Returns [1, requests, heads, value], and updates the requests' states.
    """
    slots = initial_state_indices.long()
    log_decay, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    query, key = unit_heads(q[0], k[0], v.shape[2])
    state = initial_state_source[slots] * log_decay[0].exp()[..., None, None]
    error = (v[0].float() - torch.linalg.vecdot(state, key.unsqueeze(-2))) * beta[0].unsqueeze(-1)
    state += error.unsqueeze(-1) * key.unsqueeze(-2)
    initial_state_source[slots] = state
    return torch.linalg.vecdot(state, query.unsqueeze(-2)).unsqueeze(0).to(v.dtype)


def _gated_norm(self: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    normed = F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype) * self.weight
    return (normed * F.silu(z.float())).to(x.dtype)


def _gated_sum(
    hidden: torch.Tensor, gate_weight: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor, *_: Any, **__: Any
) -> None:
    """Add the shared expert's output, times its gate, to the routed experts' output, in place."""
    routed.add_(F.linear(hidden, gate_weight.view(1, -1)).sigmoid() * shared)


OPERATORS = (
    fused_sigmoid_mul_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
)
"""Stand-ins for operators of `torch.ops.sgl_kernel`, which is not installed on CPU."""
MAMBA = (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu)
"""Stand-ins for functions of the module `sgl_kernel.mamba`."""


def install(dtype: str) -> None:
    """Put the functions where SGLang looks for them; call it before SGLang imports the model's module.

    Two functions of SGLang itself are replaced too, because without AMX they would need Triton: the gated norm, and the
    sum with the shared expert's output.
    """
    # Without this variable SGLang rounds the convolution's window to bfloat16 (srt/configs/mamba_utils.py).
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = dtype
    for operator in OPERATORS:
        setattr(torch.ops.sgl_kernel, operator.__name__, operator)
    mamba = ModuleType("sgl_kernel.mamba")
    vars(mamba).update({function.__name__: function for function in MAMBA})
    sys.modules["sgl_kernel.mamba"] = vars(sys.modules["sgl_kernel"])["mamba"] = mamba
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.kernels.ops.elementwise import elementwise

    layernorm_gated.RMSNorm.forward = _gated_norm
    elementwise.fused_gate_sigmoid_mul_add = _gated_sum
