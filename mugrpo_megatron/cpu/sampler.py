"""SGLang's sampler on CPU, with a function in C that draws tokens from large vocabularies."""

from __future__ import annotations

from typing import Any

import torch

from mugrpo_megatron.cpu.kernels import Kernels, ready

LARGE_VOCABULARY = 1 << 14
"""The size of a vocabulary from which on the sampler uses the kernel; for smaller ones torch's sampler costs little."""
OTHER_SAMPLING = (
    "is_all_greedy",
    "need_top_p_sampling",
    "need_top_k_sampling",
    "need_min_p_sampling",
    "has_custom_logit_processor",
)
OTHER_SETTINGS = (
    "sampling_seed",
    "grammars",
    "sampling_mask_batch_indices",
    "sampling_support_logprobs_capture_indices",
)
"""Attributes of SGLang's SamplingBatchInfo under which its sampler does more than draw from the softmax."""


def use_sampling(sampler: Any, kernels: Kernels) -> None:
    """Let SGLang's sampler draw by `kernels.sample` from the softmax over a large vocabulary (`LARGE_VOCABULARY`).

    Every other way of sampling, and a request for more than the sampled tokens' logprobs, is left to SGLang. SGLang
    makes eight passes over the logits, and draws a random number for each token of the vocabulary.
    """
    before = sampler.forward

    def forward(output, info, return_logprob, top_logprobs, token_ids_logprobs, positions, **named):  # type: ignore[no-untyped-def]
        logits, temperatures = output.next_token_logits, info.temperatures
        other = any(getattr(info, name) for name in OTHER_SAMPLING)
        other = other or any(getattr(info, name, None) is not None for name in OTHER_SETTINGS)
        other = other or any(top_logprobs or ()) or any(ids is not None for ids in token_ids_logprobs or ())
        fitting = logits.shape[1] >= LARGE_VOCABULARY and logits.dtype == temperatures.dtype == torch.float32
        if other or any(value is not None for value in named.values()) or not (fitting and ready(logits, temperatures)):
            return before(output, info, return_logprob, top_logprobs, token_ids_logprobs, positions, **named)
        tokens, output.next_token_logprobs = kernels.sample(logits, temperatures)
        return tokens

    sampler.forward = forward
