"""What travels over the socket between a learner rank and the engine's host process.

Messages are `(kind, value)` pairs, pickled over an anonymous socket pair that only the two processes hold
(engine/channel.py). Token ids and logprobs travel as one flat array for all responses of a message: that keeps the
cost of a short response at a few microseconds.

Client to host:  `start` arguments · `call` (method, arguments) · `generate` Sampling · `prompts` list[Work] · `close`
                 · `stop`
Host to client:  `ready` · `result` value · `groups` Groups · `progress` Load · `done` · `error` text
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mugrpo_megatron.samples import Response

Message = tuple[str, Any]
FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled; the same for every prompt of one generate call."""

    temperature: float
    """0 is greedy."""
    top_p: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    """Tokens that end a response, on top of the end-of-sequence tokens that the model's own files name."""


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt to answer `n` times; `key` names it in the reply."""

    key: int
    ids: list[int]
    n: int


@dataclass(frozen=True, slots=True)
class Groups:
    """Finished groups, flattened: responses of a group are consecutive, groups follow `keys`."""

    keys: list[int]
    sizes: list[int]
    """Responses of each group."""
    lengths: np.ndarray
    """int32 [responses]"""
    ids: np.ndarray
    """int32 [tokens]"""
    logprobs: np.ndarray
    """float32 [tokens]"""
    finish: np.ndarray
    """uint8 [responses]: index into FINISH_REASONS."""
    weight_version: int

    def unpack(self) -> Iterator[tuple[int, list[Response]]]:
        """Yield each group's key and responses; arrays are views of the message's."""
        ends = np.cumsum(self.lengths).tolist()
        responses = iter(
            Response(
                ids=self.ids[end - length : end],
                logprobs=self.logprobs[end - length : end],
                finish_reason=FINISH_REASONS[finish],
                weight_version=self.weight_version,
            )
            for end, length, finish in zip(ends, self.lengths.tolist(), self.finish.tolist(), strict=True)
        )
        for key, size in zip(self.keys, self.sizes, strict=True):
            yield key, [next(responses) for _ in range(size)]


def pack(groups: list[tuple[int, list[dict[str, Any]]]], weight_version: int) -> Groups:
    """Flatten finished groups as SGLang returns them: per response `output_ids` and `meta_info`."""
    outputs = [output for _, group in groups for output in group]
    for output in outputs:  # flat, one logprob less would shift those of all later responses
        if len(output["output_ids"]) != len(output["meta_info"]["output_token_logprobs"]):
            raise ValueError("a response with another number of logprobs than of token ids")
    return Groups(
        keys=[key for key, _ in groups],
        sizes=[len(group) for _, group in groups],
        lengths=np.array([len(output["output_ids"]) for output in outputs], dtype=np.int32),
        ids=np.array([token for output in outputs for token in output["output_ids"]], dtype=np.int32),
        logprobs=np.array(
            [entry[0] for output in outputs for entry in output["meta_info"]["output_token_logprobs"]], dtype=np.float32
        ),
        finish=np.array(
            [FINISH_REASONS.index(output["meta_info"]["finish_reason"]["type"]) for output in outputs], dtype=np.uint8
        ),
        weight_version=weight_version,
    )
