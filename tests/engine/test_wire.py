"""Routed experts and masks on the wire: as SGLang returns them, as small as they are stored, and whole or refused."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.engine.wire import Request, RouterShape, Sampling, pack, sampling_seeds

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
        (None, "got 0$"),
        (np.zeros((4, 5, 2)), "got 40$"),
        (np.full((5, 5, 2), 4), "routed experts 4 to 4, of 4"),
        (np.full((5, 5, 2), -1), "routed experts -1 to -1, of 4"),
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
