"""Logprobs of given tokens: the ranges that a response is requested in, and parsing of SGLang's replies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.engine.wire import MOST_IDS, LogprobRange, logprob_ranges, logprob_request, range_logprobs

WORDS = 40


def sglang(ids: list[int], arguments: dict[str, Any], logprobs: np.ndarray) -> dict[str, Any]:
    """SGLang 0.5.15's reply, where the log-probabilities at each position are `logprobs` [positions, WORDS]."""
    start, end = arguments["logprob_start_len"], len(arguments["input_ids"][0])
    tokens = [(None, ids[start], None)] + [(logprobs[p, ids[p]], ids[p], None) for p in range(start + 1, end)]
    columns = arguments.get("token_ids_logprob", [[]])[0]
    others = [None] + [[(logprobs[p, word], word, None) for word in columns] for p in range(start + 1, end)]
    return {"meta_info": {"input_token_logprobs": tokens, "input_token_ids_logprobs": others}}


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
        assert tokens.token_ids is None or len(tokens.token_ids) <= MOST_IDS
        rows = None if support_ids is None else support_ids[tokens.start - prompt : tokens.end - prompt]
        parsed.append(range_logprobs(sglang(ids, logprob_request(ids, tokens), logprobs), tokens, rows))
    expected = logprobs[np.arange(prompt, len(ids)), ids[prompt:]]
    if support_ids is not None:
        mass = np.where(support_ids >= 0, np.exp(np.take_along_axis(logprobs[prompt:], support_ids.clip(0), 1)), 0)
        expected = expected - np.log(mass.sum(1))
    np.testing.assert_allclose(np.concatenate(parsed), expected, atol=1e-5)


def test_another_number_of_tokens_is_an_error() -> None:
    output = {"meta_info": {"input_token_logprobs": [(None, 1, None), (-1.0, 2, None)]}}
    with pytest.raises(ValueError, match="expected 2 prompt logprobs, got 1"):
        range_logprobs(output, LogprobRange(1, 3, None), None)
