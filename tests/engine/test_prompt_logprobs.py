"""Scores of given tokens: how a response is asked for in pieces, and what SGLang's answer says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.engine.wire import MOST_IDS, LogprobRange, answer, pieces, request

WORDS = 40


def sglang(ids: list[int], arguments: dict[str, Any], every: np.ndarray) -> dict[str, Any]:
    """What SGLang 0.5.15 returns, where the log-probabilities at each place are `every` [places, WORDS]."""
    start, end = arguments["logprob_start_len"], len(arguments["input_ids"][0])
    tokens = [(None, ids[start], None)] + [(every[p, ids[p]], ids[p], None) for p in range(start + 1, end)]
    among = arguments.get("token_ids_logprob", [[]])[0]
    others = [None] + [[(every[p, one], one, None) for one in among] for p in range(start + 1, end)]
    return {"meta_info": {"input_token_logprobs": tokens, "input_token_ids_logprobs": others}}


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 300), st.one_of(st.none(), st.integers(1, 20)))
def test_pieces_together_are_the_softmax_over_each_places_tokens(
    seed: int, prompt: int, scored: int, top: int | None
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((prompt + scored, WORDS))
    every = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = rng.integers(0, WORDS, prompt + scored)
    support_ids = None
    if top:
        support_ids = np.array([rng.permutation(WORDS)[:top] for _ in range(scored)], dtype=np.int32)
        support_ids[:, 0] = ids[prompt:]
        support_ids[:, 1:][rng.random((scored, top - 1)) < 0.3] = -1
    scores = []
    for piece in pieces(len(ids), scored, support_ids):
        assert piece.among is None or len(piece.among) <= MOST_IDS
        own = None if support_ids is None else support_ids[piece.start - prompt : piece.end - prompt]
        scores.append(answer(sglang(ids.tolist(), request(ids.tolist(), piece), every), piece, own))
    expected = every[np.arange(prompt, len(ids)), ids[prompt:]]
    if support_ids is not None:
        held = np.where(support_ids >= 0, np.exp(np.take_along_axis(every[prompt:], support_ids.clip(min=0), 1)), 0)
        expected = expected - np.log(held.sum(1))
    np.testing.assert_allclose(np.concatenate(scores), expected, atol=1e-5)


def test_another_number_of_places_is_an_error() -> None:
    output = {"meta_info": {"input_token_logprobs": [(None, 1, None), (-1.0, 2, None)]}}
    with pytest.raises(ValueError, match="a score of 1 tokens, where 2"):
        answer(output, LogprobRange(1, 3, None), None)
