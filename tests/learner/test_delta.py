"""Gated delta networks: the rule against a loop over tokens, packed rows without leaks, gradients, replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.kernels.gated_delta import EPSILON, gated_delta_rule
from mugrpo_megatron.learner.attention import Packing, make_packing
from mugrpo_megatron.learner.delta import GatedDeltaNet
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.learner.update import update
from mugrpo_megatron.weights.families import read_architecture
from tests import models
from tests.algorithm.test_policy_loss import Called
from tests.learner.test_latent import gradients
from tests.learner.tiny import VOCAB, advantages, recipe, samples
from tests.ranks import run_ranks
from tests.weights import tiny
from tests.weights.ranks_work import build, enter

LENGTHS = np.array([70, 5, 130, 1, 33])
"""Segments of several chunks, of a part of one, and of a single token."""


def by_token(query: Any, key: Any, value: Any, log_decay: Any, beta: Any) -> torch.Tensor:
    """The rule as the paper's equation 10 has it, in float64, one token after another."""
    query, key, value, log_decay, beta = (x.double() for x in (query, key, value, log_decay, beta))
    query, key = (x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(value.shape[2] // x.shape[2], 2) for x in (query, key))
    state = value.new_zeros(len(value), value.shape[2], value.shape[3], key.shape[3])
    outputs = []
    for t in range(value.shape[1]):
        k, v = key[:, t], value[:, t]
        state = state * log_decay[:, t, :, None, None].exp()
        error = v - (state @ k.unsqueeze(-1)).squeeze(-1)
        state = state + (beta[:, t].unsqueeze(-1) * error).unsqueeze(-1) * k.unsqueeze(-2)
        outputs.append((state @ query[:, t].unsqueeze(-1)).squeeze(-1) * key.shape[3] ** -0.5)
    return torch.stack(outputs, 1)


@settings(max_examples=25)
@given(
    n=st.integers(1, 3), t=st.integers(1, 200), key_heads=st.integers(1, 2), per_key=st.integers(1, 2),
    key=st.integers(1, 9), value=st.integers(1, 9), decay=st.sampled_from([0.01, 1.0, 30.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_rule_is_that_of_a_loop_over_tokens(
    n: int, t: int, key_heads: int, per_key: int, key: int, value: int, decay: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(n, t, *shape, generator=generator)

    heads = key_heads * per_key
    arguments = (random(key_heads, key), random(key_heads, key), random(heads, value))
    log_decay, beta = -decay * random(heads).abs(), random(heads).sigmoid()
    result, _ = gated_delta_rule(*arguments, log_decay, beta)
    # A chunk sums logarithms of decays: where they are large, so is the rounding of the sum.
    atol = 1e-5 if decay <= 1 else 5e-4
    torch.testing.assert_close(result.double(), by_token(*arguments, log_decay, beta), atol=atol, rtol=1e-4)


def test_the_rule_needs_no_order_that_cuda_does_not_have() -> None:
    """As of the objectives: with deterministic algorithms torch raises for a running sum of floats on CUDA."""
    query, key, value = (torch.randn(2, 70, 2, 3).requires_grad_() for _ in range(3))
    with Called() as called:
        result, _ = gated_delta_rule(query, key, value, -torch.rand(2, 70, 2), torch.rand(2, 70, 2))
        result.sum().backward()
    assert ("sum", True) in called.functions, "it sees what is called"
    assert ("cumsum", True) not in called.functions


@contextmanager
def state_carried_over() -> Iterator[None]:
    """The fault of packing without boundaries: state and convolution go on from one segment to the next."""
    forward = GatedDeltaNet.forward

    def as_one_segment(self: Any, hidden: torch.Tensor, *, packed_seq_params: Packing, **options: Any) -> Any:
        joined = make_packing(np.array([packed_seq_params.lengths.sum()]), torch.device("cpu"))
        return forward(self, hidden, packed_seq_params=joined, **options)

    with patch.object(GatedDeltaNet, "forward", as_one_segment):
        yield


def packed(hf_dir: Path) -> dict[str, float]:
    """How far logits are from transformers', which sees one sequence at a time, and how far other tokens in earlier
    segments move those of later ones; both without and with the planted fault."""
    (chunk,), _ = build(hf_dir, {}, enter({}))
    chunk.eval()
    torch.set_grad_enabled(False)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (int(LENGTHS.sum()),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    other, start = ids.clone(), int(LENGTHS[:2].sum())
    other[:start] = torch.randint(0, VOCAB, (start,), generator=generator)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        packing = make_packing(LENGTHS, torch.device("cpu"))
        hidden = chunk(ids[None], positions, attention_mask=None, packed_seq_params=packing)
        return hidden.squeeze(1) @ chunk.output_weight().T

    theirs = tiny.load(hf_dir)
    expected = torch.cat([theirs(sequence[None]).logits[0] for sequence in ids.split(LENGTHS.tolist())])

    def differences() -> tuple[float, float]:
        ours = logits(ids)
        return float((ours - expected).abs().max()), float((logits(other)[start:] - ours[start:]).abs().max())

    apart, leak = differences()
    with state_carried_over():
        apart_with_fault, leak_with_fault = differences()
    return {"apart": apart, "leak": leak, "apart with fault": apart_with_fault, "leak with fault": leak_with_fault}


def gradients_of(model: str) -> dict[str, float]:
    return gradients(build_learner(recipe(Path(model))), model, LENGTHS)


def replicas_after_an_update(model: str) -> float:
    """How far apart two tensor parallel ranks' copies of the norms are."""
    learner = build_learner(recipe(Path(model), parallel={"tensor": 2}))
    data = samples()
    update(learner, data, advantages(len(data)))
    far = 0.0
    for name, weight in policy(learner.chunks[0]).named_parameters():
        if "norm" in name:
            copies = [torch.empty_like(weight) for _ in range(2)]
            dist.all_gather(copies, weight.detach())
            far = max(far, float((copies[0] - copies[1]).abs().max()))
    return far


@pytest.fixture(scope="module", params=["qwen3_5_text", "qwen3_5_moe_text"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    models.save_model(directory, request.param, vocab_size=VOCAB)
    return directory


@pytest.mark.process
def test_no_token_of_a_packed_row_sees_another_segment(hybrid: Path) -> None:
    [result] = run_ranks(1, packed, hybrid)
    assert result["apart"] < 1e-4
    assert result["leak"] == 0.0, "exactly"
    assert result["apart with fault"] > 0.1
    assert result["leak with fault"] > 0.1


@pytest.mark.process
def test_gradients_are_those_of_transformers(hybrid: Path) -> None:
    [apart] = run_ranks(1, gradients_of, str(hybrid))
    linear, full = 6, 4
    feed_forward = 1 + 2 * 4 + 3 if read_architecture(hybrid).experts else 2
    assert len(apart) == 3 + 3 * linear + full + 4 * (2 + feed_forward)
    assert max(apart.values()) < 1e-4, max(apart, key=lambda name: apart[name])


@pytest.mark.process
def test_replicated_norms_stay_equal_on_tensor_parallel_ranks(hybrid: Path) -> None:
    """Megatron's module sums only a part of `out_norm`'s gradient (NVIDIA/Megatron-LM#7452)."""
    assert set(run_ranks(2, replicas_after_an_update, str(hybrid))) == {0.0}
