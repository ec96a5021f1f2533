"""Messages over the socket between a learner rank and the engine's host process, and what SGLang's answers become.

Messages are `(kind, value)` pairs, pickled over an anonymous socket pair that only the two processes hold
(engine/process.py). Token ids and logprobs travel as one flat array for all responses of a message: that keeps the
cost of a short response at a few microseconds. So do the experts of a mixture's tokens, as small as they are stored.

Client to host:  `start` (arguments, log) · `call` (method, arguments) · `generate` Sampling · `prompts` list[Work]
                 · `close` · `stop`
Host to client:  `ready` · `result` value · `groups` Groups · `progress` Load · `done` · `error` text · `refused` text
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, pairwise
from typing import Any

import numpy as np

from mugrpo_megatron.samples import Response, expert_type

ABSENT = -1
"""Fills a row of support ids that are fewer than in the longest row."""


def support_of(
    ids: np.ndarray,
    logprobs: np.ndarray,
    sampled: np.ndarray,
    sampled_logprobs: np.ndarray,
    top_p: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Kept tokens int32 [R, k], `ABSENT` where there are fewer, and the sampled ones' logprobs among them float32 [R].

    SGLang's rule: top-p keeps a token when those before it have at most `top_p` of the whole vocabulary's probability.
    A sampled token that rounding or a tie has put outside takes the last place.

    Args:
        ids, logprobs: [R, k], k = top-k, most likely first.
        sampled, sampled_logprobs: [R].
    """
    ids, logs = ids.astype(np.int32), logprobs.astype(np.float64)
    outside = ~(ids == sampled[:, None]).any(1)
    ids[outside, -1], logs[outside, -1] = sampled[outside], sampled_logprobs[outside]
    probabilities = np.exp(logs)
    keep = np.cumsum(probabilities, axis=1) - probabilities <= top_p
    keep |= ids == sampled[:, None]
    mass = np.log(np.where(keep, probabilities, 0.0).sum(1))
    return np.where(keep, ids, np.int32(ABSENT)), (sampled_logprobs - mass).astype(np.float32)


Message = tuple[str, Any]
FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Routed:
    """The routers of a mixture of experts."""

    layers: int
    chosen: int
    """Experts of a token in a layer."""
    experts: int
    """Of a layer."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled; the same for every prompt of one generate call."""

    temperature: float
    """0 is greedy."""
    top_p: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    """Tokens that end a response, on top of the end-of-sequence tokens that the model's own files name."""
    routed: Routed | None = None
    """Return the experts that every token was sent to, of a model of this shape."""
    stop: tuple[str, ...] = ()
    """Texts that end a response."""
    top_k: int = 0
    """0 is the whole vocabulary."""
    support_ids: bool = False
    """Return the tokens that could be sampled, and logprobs among them; needs `top_k`."""
    sampling_masks: bool = False
    """Take them from the sampler's own masks; needs `support_ids`."""
    stream: str | None = None
    """Name of the random numbers: a response draws from this stream, for the weights, its prompt's place and its number
    alone. None: from the engine's, in the order in which requests meet."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer `n` times; `key` names it in the reply."""

    key: int
    ids: list[int]
    n: int
    place: int | str = 0
    """The prompt's index in the stage or the held-out set; of an episode, its number and its turn as well."""
    max_tokens: int | None = None
    """Fewer than the call's `Sampling.max_tokens`."""
    stop: tuple[str, ...] = ()
    """Texts that end its responses, besides the call's."""
    logprob_tokens: int = 0
    """Tokens at the end of `ids` whose logprobs are returned instead of sampling; 0 to sample."""
    support_ids: np.ndarray | None = None
    """int32 [logprob_tokens, k]: tokens that each softmax runs over, -1 where fewer; None for the vocabulary."""


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
    routes: np.ndarray | None = None
    """uint8 or uint16 [routed tokens, layers, k] of all responses."""
    routed: np.ndarray | None = None
    """int64 [responses]: tokens with routes of each, prompt included."""
    support_ids: np.ndarray | None = None
    """int32 [tokens, most of a token]: the tokens that could be sampled, where the client asked for them."""

    def unpack(self) -> Iterator[tuple[int, list[Response]]]:
        """Yield each group's key and responses; arrays are views of the message's."""
        ends = np.cumsum(self.lengths).tolist()
        routes: list[np.ndarray | None] = [None] * len(ends)
        if self.routes is not None and self.routed is not None:
            parts = np.split(self.routes, np.cumsum(self.routed)[:-1])
            routes = [part.transpose(1, 0, 2) for part in parts]
        responses = iter(
            Response(
                ids=self.ids[end - length : end],
                logprobs=self.logprobs[end - length : end],
                finish_reason=FINISH_REASONS[finish],
                weight_version=self.weight_version,
                support_ids=None if self.support_ids is None else _narrow(self.support_ids[end - length : end]),
                routes=experts,
            )
            for end, length, finish, experts in zip(
                ends, self.lengths.tolist(), self.finish.tolist(), routes, strict=True
            )
        )
        for key, size in zip(self.keys, self.sizes, strict=True):
            yield key, [next(responses) for _ in range(size)]


def decode_routes(output: dict[str, Any], routed: Routed) -> np.ndarray:
    """uint8 or uint16 [P + R - 1, layers, k] of a response as SGLang 0.5.15 returns it: base64 of int32.

    The last token has none, since the engine has not run it. The experts are counted inside the model's layer, before
    any placement. Raises ValueError when they are missing or not of this shape.
    """
    meta = output["meta_info"]
    tokens = meta["prompt_tokens"] + len(output["output_ids"]) - 1
    shape = tokens, routed.layers, routed.chosen
    whole = np.frombuffer(base64.b64decode(meta.get("routed_experts") or ""), dtype="<i4")
    if whole.size != tokens * routed.layers * routed.chosen:
        raise ValueError(f"a response with {whole.size} routed experts, where its {shape} have to be")
    if whole.size and not 0 <= whole.min() <= whole.max() < routed.experts:
        raise ValueError(f"a response with an expert {whole.min()} or {whole.max()}, of {routed.experts}")
    return whole.astype(expert_type(routed.experts)).reshape(shape)


def seeds(stream: str, version: int, work: Request) -> list[int]:
    """A random seed of 63 bits for each response to a prompt, under the weights of this version."""
    names = (f"{stream}/{version}/{work.place}/{number}".encode() for number in range(work.n))
    return [int.from_bytes(blake2b(name, digest_size=8).digest()) >> 1 for name in names]


def pack(groups: list[tuple[int, list[dict[str, Any]]]], weight_version: int, sampling: Sampling) -> Groups:
    """Flatten finished groups as SGLang returns them: per response `output_ids` and `meta_info`.

    Where `sampling.support_ids` asks for it, with the support ids and with logprobs among them; where `sampling.routed`
    does, with the experts.
    """
    outputs = [output for _, group in groups for output in group]
    for output in outputs:  # flat, one logprob less would shift those of all later responses
        if len(output["output_ids"]) != len(output["meta_info"]["output_token_logprobs"]):
            raise ValueError("a response with another number of logprobs than of token ids")
    routes = [decode_routes(output, sampling.routed) for output in outputs] if sampling.routed else None
    ids = np.array([token for output in outputs for token in output["output_ids"]], dtype=np.int32)
    logprobs = np.array(
        [entry[0] for output in outputs for entry in output["meta_info"]["output_token_logprobs"]], dtype=np.float32
    )
    support_ids = None
    if sampling.sampling_masks:
        support_ids, logprobs = _masks(outputs, len(ids))
    elif sampling.support_ids:
        support_ids, logprobs = _support_ids(outputs, ids, logprobs, sampling)
    return Groups(
        keys=[key for key, _ in groups],
        sizes=[len(group) for _, group in groups],
        lengths=np.array([len(output["output_ids"]) for output in outputs], dtype=np.int32),
        ids=ids,
        logprobs=logprobs,
        finish=np.array(
            [FINISH_REASONS.index(output["meta_info"]["finish_reason"]["type"]) for output in outputs], dtype=np.uint8
        ),
        weight_version=weight_version,
        routes=np.concatenate(routes) if routes else None,
        routed=np.array([len(part) for part in routes]) if routes else None,
        support_ids=support_ids,
    )


def _narrow(support_ids: np.ndarray) -> np.ndarray:
    """A response's support ids, without columns that hold none: a message is as wide as its longest row."""
    columns = np.flatnonzero((support_ids != ABSENT).any(0))
    return support_ids[:, : columns[-1] + 1] if len(columns) else support_ids[:, :1]


def _masks(outputs: list[dict[str, Any]], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Kept tokens and logprobs among them, from the masks of SGLang's sampler, most likely first."""
    masks = [mask for output in outputs for mask in output["meta_info"]["output_token_sampling_mask"]]
    logprobs = [one for output in outputs for one in output["meta_info"]["output_token_sampling_logprobs"]]
    if not len(masks) == len(logprobs) == tokens:
        raise ValueError("a response with another number of masks than of token ids")
    lengths = np.array([len(mask) for mask in masks], dtype=np.int64)
    support_ids = np.full((tokens, int(lengths.max(initial=1))), ABSENT, dtype=np.int32)
    support_ids[np.arange(support_ids.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(masks), np.int32)
    return support_ids, np.array(logprobs, dtype=np.float32)


def _support_ids(
    outputs: list[dict[str, Any]], ids: np.ndarray, logprobs: np.ndarray, sampling: Sampling
) -> tuple[np.ndarray, np.ndarray]:
    """Kept tokens and logprobs among them, from the most likely tokens that SGLang returns with each position."""
    tops = [entries for output in outputs for entries in output["meta_info"]["output_top_logprobs"]]
    if len(tops) != len(ids):
        raise ValueError("a response with another number of most likely tokens than of token ids")
    values = np.array([[entry[0] for entry in entries] for entries in tops], dtype=np.float32)
    tokens = np.array([[entry[1] for entry in entries] for entries in tops], dtype=np.int32)
    shape = (len(ids), sampling.top_k)
    return support_of(tokens.reshape(shape), values.reshape(shape), ids, logprobs, sampling.top_p)


MOST_IDS = 512
"""Tokens that a piece of a score asks for at each of its places, at most, unless a single place has more."""


@dataclass(frozen=True, slots=True)
class LogprobRange:
    """A request for the log-probabilities of the tokens `start` to `end` of a sequence.

    SGLang gives them over the whole vocabulary, and those of further tokens, the same at all places of a request. Where
    every place has support ids of its own, a response is asked for in pieces.
    """

    start: int
    end: int
    among: list[int] | None
    """The tokens whose log-probabilities are asked for besides."""


def pieces(length: int, scored: int, support_ids: np.ndarray | None) -> Iterator[LogprobRange]:
    """Requests that together score the last `scored` of `length` tokens; `support_ids` is int32 [logprob_tokens, k], or
    None."""
    first = length - scored
    if support_ids is None:
        yield LogprobRange(first, length, None)
        return
    size = max(1, MOST_IDS // support_ids.shape[1])
    for start, end in pairwise([*range(0, scored, size), scored]):
        ids = np.unique(support_ids[start:end])
        yield LogprobRange(first + start, first + end, ids[ids >= 0].tolist())


def request(ids: Sequence[int], piece: LogprobRange) -> dict[str, Any]:
    """The arguments of SGLang's `generate`; nothing is sampled."""
    others = {} if piece.among is None else {"token_ids_logprob": [piece.among]}
    return {
        "input_ids": [list(ids[: piece.end])],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": piece.start - 1,  # the first that SGLang returns has none: it is the token before
        **others,
    }


def answer(output: dict[str, Any], piece: LogprobRange, support_ids: np.ndarray | None) -> np.ndarray:
    """Log-probabilities float32 of the piece's tokens; with `support_ids`, int32 [tokens, k], among those of each
    place.

    Raises ValueError when SGLang's answer has another number of places.
    """
    meta, tokens = output["meta_info"], piece.end - piece.start
    entries = meta["input_token_logprobs"][1:]
    if len(entries) != tokens:
        raise ValueError(f"a score of {len(entries)} tokens, where {tokens} were asked for")
    logprobs = np.array([entry[0] for entry in entries], dtype=np.float32)
    if support_ids is None:
        return logprobs
    among = np.array(piece.among)
    places = [place for place in meta["input_token_ids_logprobs"] if place][-tokens:]
    values = np.array([[entry[0] for entry in place] for place in places], dtype=np.float64)
    if values.shape != (tokens, len(among)):
        raise ValueError(f"scores of {values.shape} support ids, where {(tokens, len(among))} were asked for")
    own = np.take_along_axis(values, np.searchsorted(among, support_ids.clip(min=among[0])), axis=1)
    mass = np.log(np.where(support_ids >= 0, np.exp(own), 0.0).sum(1))
    return (logprobs - mass).astype(np.float32)
