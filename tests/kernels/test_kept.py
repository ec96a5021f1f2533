"""Softmax over the tokens that a sampler kept: the fused loss against masked logits in float64."""

from __future__ import annotations

import pytest

from mugrpo_megatron.kernels.linear_logprob import token_logprobs
from tests.kernels.problems import KEPT, assert_same, fused, kept_of, layout_of, make_problem, materialised


@pytest.mark.parametrize("name", sorted(KEPT))
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_equals_masked_logits(name: str, chunk: int) -> None:
    problem = make_problem(KEPT[name])
    kept, layout = kept_of(problem), layout_of(chunk)
    found = fused(problem, layout, kept=kept)
    assert_same(found, materialised(problem, kept), 1e-5)
    logprobs, entropy = token_logprobs(problem.hidden, problem.weight, problem.targets, layout, kept)
    assert logprobs.equal(found.logprobs)
    assert entropy.equal(found.entropy)
