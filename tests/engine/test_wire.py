"""Replies of SGLang on the wire: routed experts, support ids and prompt logprobs, whole or refused."""

from __future__ import annotations

import base64
import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.engine import wire
from mugrpo_megatron.engine.wire import (
    PADDING,
    LogprobRange,
    Request,
    RouterShape,
    Sampling,
    logprob_ranges,
    logprob_request,
    pack,
    range_logprobs,
    sampling_seeds,
    top_p_support,
)

PROMPT = 3


def output(experts: np.ndarray | None, tokens: int) -> dict[str, Any]:
    """What `async_generate` returns for a response: `experts` int [P + R - 1, L, k] as base64 of int32."""
    meta: dict[str, Any] = {
        "output_token_logprobs": [(-1.0, 0, None)] * tokens,
        "finish_reason": {"type": "stop"},
        "prompt_tokens": PROMPT,
    }
    if experts is not None:
        meta["routed_experts"] = base64.b64encode(experts.astype(np.int32).tobytes()).decode()
    return {"output_ids": [1] * tokens, "meta_info": meta}


@pytest.mark.parametrize(("total", "width"), [(4, 1), (300, 2)])
def test_every_response_gets_its_own_routes(total: int, width: int) -> None:
    """uint8 or uint16 [L, P + R - 1, k], in groups and responses of different lengths."""
    rng = np.random.default_rng(0)
    routers = RouterShape(layers=5, top_k=2, experts=total)
    lengths = [[1, 4], [2, 7]]
    sent = [[rng.integers(0, total, (PROMPT + n - 1, 5, 2)) for n in group] for group in lengths]
    groups = [
        (key, [output(experts, n) for experts, n in zip(sent[key], lengths[key], strict=True)]) for key in range(2)
    ]
    packed = pack(groups, 0, Sampling(1.0, 1.0, 9, (), routers))
    assert packed.routes is not None
    assert packed.routes.itemsize == width
    for key, responses in packed.unpack():
        for response, experts in zip(responses, sent[key], strict=True):
            assert response.routes is not None
            np.testing.assert_array_equal(response.routes, experts.transpose(1, 0, 2))


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (None, "returned 0 numbers$"),
        (np.zeros((4, 5, 2)), "returned 40 numbers$"),
        (np.full((5, 5, 2), 4), "routed experts are numbered 4 to 4, but a layer has 4"),
        (np.full((5, 5, 2), -1), "routed experts are numbered -1 to -1, but a layer has 4"),
    ],
)
def test_routes_that_are_not_whole_are_refused(experts: np.ndarray | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pack([(0, [output(experts, 3)])], 0, Sampling(1.0, 1.0, 9, (), RouterShape(layers=5, top_k=2, experts=4)))


def test_a_seed_is_of_the_stream_the_weights_the_prompt_and_the_response() -> None:
    """Not of the order in which prompts come; 63 bits, which SGLang keeps as int64."""
    one = Request(key=9, ids=[1], n=4, seed_key=3)
    found = sampling_seeds("0/train", 7, one)
    assert found == sampling_seeds("0/train", 7, Request(key=0, ids=[2], n=8, seed_key=3))[:4]
    every = {
        seed
        for stream in ("0/train", "1/train", "0/eval/a")
        for version in (0, 7)
        for place in (3, 4)
        for seed in sampling_seeds(stream, version, Request(0, [1], 4, place))
    }
    assert len(every) == 3 * 2 * 2 * 4
    assert all(0 <= seed < 1 << 63 for seed in every)


MASKS = Sampling(1.0, 0.9, 9, (), top_k=100, support_ids=True, sampling_masks=True)


def masked(masks: list[list[int]], logprobs: list[float]) -> dict[str, Any]:
    """A response whose sampled token is the first of each mask."""
    meta = {
        "output_token_logprobs": [(-9.0, mask[0], None) for mask in masks],
        "output_token_sampling_mask": masks,
        "output_token_sampling_logprobs": logprobs,
        "finish_reason": {"type": "stop"},
    }
    return {"output_ids": [mask[0] for mask in masks], "meta_info": meta}


def test_a_response_is_as_wide_as_its_longest_mask() -> None:
    narrow, wide = [[7], [8, 9]], [[5, 6, 7, 8], [3], [2, 1]]
    packed = pack([(4, [masked(narrow, [0.0, -0.5]), masked(wide, [-1.0, 0.0, -0.25])])], 0, MASKS)
    [(key, (first, second))] = packed.unpack()
    assert key == 4
    assert first.support_ids is not None
    assert second.support_ids is not None
    assert first.support_ids.tolist() == [[7, -1], [8, 9]]
    assert second.support_ids.tolist() == [[5, 6, 7, 8], [3, -1, -1, -1], [2, 1, -1, -1]]
    assert second.logprobs.tolist() == [-1.0, 0.0, -0.25], "those among the support ids"


def test_masks_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sampler masks and 1 logprobs"):
        pack([(0, [masked([[1], [2]], [0.0])])], 0, MASKS)


VOCABULARY = 12


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
@given(st.integers(0, 10**6), st.integers(1, VOCABULARY), st.floats(0.05, 1.0))
def test_the_kept_tokens_are_those_of_the_rules(seed: int, top_k: int, top_p: float) -> None:
    generator = np.random.default_rng(seed)
    logits = 2 * generator.standard_normal(VOCABULARY)
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
    logprobs = (2 * torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(0))).log_softmax(1)
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


WORDS = 40


def sglang(ids: list[int], arguments: dict[str, Any], logprobs: np.ndarray) -> dict[str, Any]:
    """SGLang 0.5.15's reply, where the log-probabilities at each position are `logprobs` [positions, WORDS]."""
    start, end = arguments["logprob_start_len"], len(arguments["input_ids"][0])
    tokens = [(None, ids[start], None)] + [(logprobs[p, ids[p]], ids[p], None) for p in range(start + 1, end)]
    columns = arguments.get("token_ids_logprob", [[]])[0]
    others = [None] + [[(logprobs[p, word], word, None) for word in columns] for p in range(start + 1, end)]
    return {"meta_info": {"input_token_logprobs": tokens, "input_token_ids_logprobs": others}}


@patch.object(wire, "MOST_LOGPROBS", 500)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 300), st.one_of(st.none(), st.integers(1, 20)))
def test_ranges_together_are_the_softmax_over_each_token_s_support(
    seed: int, prompt: int, response: int, top: int | None
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((prompt + response, WORDS))
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = rng.integers(0, WORDS, prompt + response).tolist()
    support_ids = None
    if top:
        support_ids = np.array([rng.permutation(WORDS)[:top] for _ in range(response)], dtype=np.int32)
        support_ids[:, 0] = ids[prompt:]
        support_ids[:, 1:][rng.random((response, top - 1)) < 0.3] = -1
    parsed = []
    for tokens in logprob_ranges(len(ids), response, support_ids):
        count = tokens.end - tokens.start
        assert tokens.token_ids is None or count == 1 or count * len(tokens.token_ids) <= 500
        rows = None if support_ids is None else support_ids[tokens.start - prompt : tokens.end - prompt]
        parsed.append(range_logprobs(sglang(ids, logprob_request(ids, tokens), logprobs), tokens, rows))
    expected = logprobs[np.arange(prompt, len(ids)), ids[prompt:]]
    if support_ids is not None:
        mass = np.where(support_ids >= 0, np.exp(np.take_along_axis(logprobs[prompt:], support_ids.clip(0), 1)), 0)
        expected = expected - np.log(mass.sum(1))
    np.testing.assert_allclose(np.concatenate(parsed), expected, atol=1e-5)


@pytest.mark.parametrize(("width", "most"), [(64, 96), (5, 27), (1, 12)])
def test_a_long_response_takes_few_requests(width: int, most: int) -> None:
    """Of 1,520 tokens of which no two share a support: cuts at a fixed number of tokens took 190 at a top-k of 64."""
    support_ids = np.full((1520, 64), PADDING, dtype=np.int32)
    support_ids[:, :width] = np.arange(1520 * width).reshape(1520, width)
    assert len(list(logprob_ranges(1530, 1520, support_ids))) <= most


def test_another_number_of_tokens_is_an_error() -> None:
    output = {"meta_info": {"input_token_logprobs": [(None, 1, None), (-1.0, 2, None)]}}
    with pytest.raises(ValueError, match="expected 2 prompt logprobs, got 1"):
        range_logprobs(output, LogprobRange(1, 3, None), None)
