"""The functions that fill SGLang's names for gated delta networks on CPU, each held to a loop over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.cpu import delta_kernels
from mugrpo_megatron.engine.sglang_compat import has_gated_delta
from mugrpo_megatron.kernels.gated_delta import EPSILON

KEY_HEADS, HEADS, KEY, VALUE, KERNEL, SLOTS = 2, 4, 6, 5, 4, 7
GENERATOR = torch.Generator().manual_seed(0)
A_LOG, DT_BIAS = torch.randn(HEADS, generator=GENERATOR), torch.randn(HEADS, generator=GENERATOR)
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE
WEIGHT = torch.randn(CHANNELS, KERNEL, generator=GENERATOR)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def state_after(state: torch.Tensor, q: Any, k: Any, v: Any, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of one request in float64: q, k [key heads, key], v [heads, value], a, b [heads] -> output, state."""
    q, k = (x.double() / (x.double().square().sum(-1, keepdim=True) + EPSILON).sqrt() for x in (q, k))
    new, out = state.double().clone(), torch.empty(HEADS, VALUE, dtype=torch.float64)
    for head in range(HEADS):
        key, query = (x[head // (HEADS // KEY_HEADS)] for x in (k, q))
        decay = torch.exp(-A_LOG[head].double().exp() * F.softplus(a[head].double() + DT_BIAS[head]))
        new[head] *= decay
        new[head] += torch.outer(b[head].double().sigmoid() * (v[head].double() - new[head] @ key), key)
        out[head] = new[head] @ query / KEY**0.5
    return out, new


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3), fresh=st.booleans())
def test_states_are_those_of_a_loop_over_tokens(lengths: list[int], fresh: bool) -> None:
    """A prompt in one call, then a token in the next, of requests in slots of a pool whose other slots stay."""
    pool = torch.zeros(SLOTS, HEADS, VALUE, KEY) if fresh else random(SLOTS, HEADS, VALUE, KEY)
    before, slots = pool.clone(), torch.tensor([5, 0, 3][: len(lengths)], dtype=torch.int32)
    tokens = sum(lengths) + len(lengths)
    q, k, v = random(tokens, KEY_HEADS, KEY), random(tokens, KEY_HEADS, KEY), random(tokens, HEADS, VALUE)
    a, b = random(tokens, HEADS), random(tokens, HEADS)
    prompts, first = torch.arange(sum(lengths)), sum(lengths)
    log_decay, beta = delta_kernels.fused_gdn_gating_cpu(A_LOG, a[prompts], b[prompts], DT_BIAS)
    prefilled, *_ = delta_kernels.chunk_gated_delta_rule_cpu(
        q=q[None, prompts], k=k[None, prompts], v=v[None, prompts], g=log_decay, beta=beta, initial_state=pool,
        initial_state_indices=slots, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    decoded = delta_kernels.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=A_LOG, dt_bias=DT_BIAS, q=q[None, first:], k=k[None, first:], v=v[None, first:], a=a[first:], b=b[first:],
        initial_state_source=pool, initial_state_indices=slots, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    start = 0
    for request, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
        state = before[slot]
        for token in range(start, start + length):
            out, state = state_after(state, q[token], k[token], v[token], a[token], b[token])
            torch.testing.assert_close(prefilled[0, token].double(), out, atol=1e-5, rtol=1e-4)
        token = first + request
        out, state = state_after(state, q[token], k[token], v[token], a[token], b[token])
        torch.testing.assert_close(decoded[0, request].double(), out, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pool[slot].double(), state, atol=1e-5, rtol=1e-4)
        start += length
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(pool[others], before[others])


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3), bias=st.booleans(), seed=st.integers(0, 7))
def test_the_convolution_is_that_of_a_loop_over_tokens(lengths: list[int], bias: bool, seed: int) -> None:
    pool, offset = random(SLOTS, CHANNELS, KERNEL - 1), random(CHANNELS) if bias else None
    before, slots = pool.clone(), torch.tensor([2, 6, 1][: len(lengths)], dtype=torch.int32)
    known = torch.tensor([bool(seed >> request & 1) for request in range(len(lengths))])
    prompts, following = random(CHANNELS, sum(lengths)), random(len(lengths), CHANNELS)
    result = delta_kernels.causal_conv1d_fn_cpu(
        prompts, WEIGHT, offset, conv_states=pool, has_initial_state=known, cache_indices=slots,
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0), activation="silu",
    )  # fmt: skip
    last = delta_kernels.causal_conv1d_update_cpu(following, pool, WEIGHT, offset, "silu", slots)
    start = 0
    for request, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
        window = before[slot] * known[request]
        inputs = torch.cat([window, prompts[:, start : start + length], following[request][:, None]], 1)
        for token in range(length + 1):
            expected = (inputs[:, token : token + KERNEL] * WEIGHT).sum(1) + (0 if offset is None else offset)
            got = result[:, start + token] if token < length else last[request]
            torch.testing.assert_close(got, F.silu(expected), atol=1e-5, rtol=1e-4)
        assert torch.equal(pool[slot], inputs[:, 1 - KERNEL :])
        start += length


def test_gates_norms_and_projections_are_those_of_a_loop_over_tokens() -> None:
    tokens, heads, width = 3, 2, 4
    x, gate = random(tokens, heads * width), random(tokens, heads * width)
    expected = torch.stack([row * g.sigmoid() for row, g in zip(x, gate, strict=True)])
    delta_kernels.fused_sigmoid_mul_cpu(x, gate.view(tokens, heads, width))
    torch.testing.assert_close(x, expected)

    q_gate, k, q_weight, k_weight = (
        random(tokens, 2 * heads * width),
        random(tokens, width),
        random(width),
        random(width),
    )
    q, normed, gates = delta_kernels.fused_qk_gemma_rmsnorm_with_gate_cpu(
        q_gate, k, q_weight, k_weight, 1e-6, width, heads
    )
    for token in range(tokens):
        for head in range(heads):
            query, of_head = q_gate[token].view(heads, 2, width)[head]
            wanted = query / (query.square().mean() + 1e-6).sqrt() * (1 + q_weight)
            torch.testing.assert_close(q[token * heads + head], wanted)
            assert torch.equal(gates[token * heads + head], of_head)
        torch.testing.assert_close(normed[token], k[token] / (k[token].square().mean() + 1e-6).sqrt() * (1 + k_weight))
    alone = delta_kernels.fused_qk_gemma_rmsnorm_with_gate_cpu(
        torch.cat([q_gate, k], 1)[:1, : 2 * heads * width], k[:1], q_weight, k_weight, 1e-6, width, heads
    )
    assert torch.equal(alone[2].view(1, -1), gates[:heads].view(1, -1))

    qkvz, ba = random(tokens, CHANNELS + HEADS * VALUE), random(tokens, 2 * HEADS)
    parts = delta_kernels.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, KEY_HEADS, HEADS, KEY, VALUE)
    for token in range(tokens):
        assert torch.equal(torch.cat([parts[0][token], parts[1][token].flatten()]), qkvz[token])
        assert torch.equal(torch.cat([parts[2][token], parts[3][token]]), ba[token])

    norm: Any = torch.nn.Module()
    norm.eps, norm.weight = 1e-6, random(width)
    values, z = random(tokens, width), random(tokens, width)
    for row, value, gate_row in zip(delta_kernels._gated_norm(norm, values, z), values, z, strict=True):
        wanted = value / (value.square().mean() + 1e-6).sqrt() * norm.weight * F.silu(gate_row)
        torch.testing.assert_close(row, wanted)

    hidden, weight, shared, routed = random(tokens, width), random(width), random(tokens, width), random(tokens, width)
    wanted = torch.stack([r + (h @ weight).sigmoid() * s for h, s, r in zip(hidden, shared, routed, strict=True)])
    delta_kernels._gated_sum(hidden, weight, shared, routed)
    torch.testing.assert_close(routed, wanted)


@pytest.mark.skipif(not has_gated_delta(), reason="the pinned SGLang has no class for the text of Qwen3.5")
def test_the_names_are_those_that_sglang_reads() -> None:
    """Of the source, because an import of it would fill this process with SGLang's own."""
    from importlib.util import find_spec
    from pathlib import Path

    package = find_spec("sglang")
    assert package
    assert package.origin
    root = Path(package.origin).parent
    readers = (
        "srt/models/qwen3_5.py",
        *(f"srt/layers/attention/linear/{n}.py" for n in ("gdn_backend", "kernels/gdn_triton")),
    )
    text = "".join((root / name).read_text(encoding="utf-8") for name in readers)
    assert [
        function.__name__ for function in delta_kernels.OPERATORS if f"sgl_kernel.{function.__name__}" not in text
    ] == []
    assert [function.__name__ for function in delta_kernels.MAMBA if function.__name__ not in text] == []
