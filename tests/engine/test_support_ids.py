"""The tokens that SGLang's sampler keeps, against its own function for a device without FlashInfer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.engine.wire import PADDING, top_p_support

WORDS = 12


def by_the_rules(probabilities: list[float], top_k: int, top_p: float) -> set[int]:
    """Most likely first, one token at a time."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])[:top_k]
    found, before = set(), 0.0
    for token in order:
        if before <= top_p:
            found.add(token)
        before += probabilities[token]
    return found


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, WORDS), st.floats(0.05, 1.0))
def test_the_kept_tokens_are_those_of_the_rules(seed: int, top_k: int, top_p: float) -> None:
    generator = np.random.default_rng(seed)
    logits = 2 * generator.standard_normal(WORDS)
    every = logits - np.log(np.exp(logits).sum())
    expected = by_the_rules(np.exp(every).tolist(), top_k, top_p)
    order = np.argsort(-every)[:top_k]
    for token in expected:
        support_ids, logprobs = top_p_support(order[None], every[order][None], np.array([token]), every[[token]], top_p)
        assert {int(other) for other in support_ids[0] if other != PADDING} == expected
        assert logprobs[0] == pytest.approx(
            every[token] - math.log(sum(math.exp(every[i]) for i in expected)), abs=1e-6
        )


def test_sglang_samples_exactly_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sampler with the draw taken out: what it would draw from is what is kept."""
    sampler = pytest.importorskip("sglang.srt.layers.sampler")
    seen: list[torch.Tensor] = []

    def draw(weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        seen.append(weights.clone())
        return weights.argmax(1, keepdim=True)

    monkeypatch.setattr(sampler.torch, "multinomial", draw)
    logprobs = (2 * torch.randn(50, WORDS, generator=torch.Generator().manual_seed(0))).log_softmax(1)
    same = torch.ones(50)
    sampled = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        logprobs.exp(), (7 * same).int(), 0.8 * same, 0 * same, False, None, torch.arange(50)
    )
    top, own = logprobs.topk(7), logprobs.gather(1, sampled[:, None].long())[:, 0]
    support_ids, _ = top_p_support(top.indices.numpy(), top.values.numpy(), sampled.numpy(), own.numpy(), 0.8)
    np.testing.assert_array_equal((support_ids != PADDING).sum(1), (seen[0] > 0).sum(1).numpy())
    assert len(set((support_ids != PADDING).sum(1).tolist())) > 3


def test_a_sampled_token_that_a_tie_put_outside_is_kept() -> None:
    support_ids, logprobs = top_p_support(np.array([[4, 2]]), np.log([[0.5, 0.25]]), np.array([9]), np.log([0.25]), 1.0)
    assert support_ids.tolist() == [[4, 9]]
    assert logprobs[0] == pytest.approx(math.log(0.25 / 0.75))
