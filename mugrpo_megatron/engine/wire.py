"""The messages between a learner rank and its engine's host process, and the parsing of SGLang's replies.

A message is `(kind, value)`, pickled over an anonymous socket pair that only the two processes hold (process.py).

    client -> host            value                          host -> client
    start                     (arguments, log)               ready | refused text
    load_bucket               [bytes], one a rank            result None
    set_version               int                            result None
    sleep, wake               memory tags                    result None
    checksums                 None                           result [TensorChecksums]
    generate                  Sampling                       then, until `close`:
      requests                [Request]                        groups PackedGroups, progress LoadReading
      abort                   [key]
      close                   None                             done None
    stop                      None                           the process ends

`error text` may come instead of any reply; the host ends after it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np

from mugrpo_megatron.samples import Prompt, Response, expert_type

CommandKind = Literal[
    "start", "load_bucket", "set_version", "sleep", "wake", "checksums", "generate", "requests", "abort", "close",
    "stop",
]  # fmt: skip
Command = tuple[CommandKind, Any]
"""A message from the client to the host: (kind, value)."""
ReplyKind = Literal["ready", "refused", "result", "groups", "progress", "done", "error"]
Reply = tuple[ReplyKind, Any]
"""A message from the host to the client: (kind, value)."""

FINISH_REASONS = ("stop", "length")
PADDING = -1
"""The value that fills rows of support ids up to the length of the longest row."""


class SampledGroup(NamedTuple):
    """The responses to one prompt, as an engine sampled them."""

    prompt: Prompt
    responses: list[Response]


@dataclass(frozen=True, slots=True)
class RouterShape:
    """The number of layers of a model, of experts in a layer, and of experts that a router chooses for a token."""

    layers: int
    top_k: int
    """Number of experts that a token is sent to in a layer."""
    experts: int
    """Number of experts of a layer."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, the same for every prompt of one generation."""

    temperature: float
    """Sampling temperature; 0 is greedy."""
    top_p: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    """Tokens that end a response, besides the end-of-sequence tokens in the model's own files."""
    routers: RouterShape | None = None
    """The sizes of the model's routers if the reply shall have the experts of every token; None if not."""
    stop: tuple[str, ...] = ()
    """Texts that end a response."""
    top_k: int = 0
    """Number of most likely tokens that are sampled from; 0 is the whole vocabulary."""
    support_ids: bool = False
    """Whether the reply has the ids of the tokens that could be sampled at each position, and log-probabilities that
    are normalised over them; needs `top_k`."""
    sampling_masks: bool = False
    """Whether the support ids come from the sampler's own masks instead of the top log-probabilities of each token."""
    stream: str | None = None
    """Name of a random stream. With it, the seed of a response follows from the weights' version, the prompt and the
    response's number; with None the engine draws from its own stream, in the order in which requests arrive."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer `n` times; `key` names it in the reply."""

    key: int
    ids: list[int]
    n: int
    seed_key: int | str = 0
    """Names the prompt in a random stream: its index in the stage or held-out set; for an episode, also the episode's
    number and turn."""
    max_tokens: int | None = None
    """The largest number of tokens of this request's responses; None for `Sampling.max_tokens`."""
    stop: tuple[str, ...] = ()
    """Texts that end its responses, besides `Sampling.stop`."""
    logprob_tokens: int = 0
    """If not 0, nothing is sampled: the log-probabilities of so many tokens at the end of `ids` are returned."""
    support_ids: np.ndarray | None = None
    """int32 [logprob_tokens, k]: tokens that each softmax runs over, -1 where fewer; None for the vocabulary."""


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Finished groups as flat arrays: group after group in the order of `keys`, response after response.

    One array for all responses of a message keeps the cost of a short response at a few microseconds.
    """

    keys: list[int]
    sizes: list[int]
    """Number of responses of each group."""
    lengths: np.ndarray
    """int32 [responses]: number of tokens of each response."""
    ids: np.ndarray
    """int32 [tokens]: token ids of all responses, one after the other."""
    logprobs: np.ndarray
    """float32 [tokens]: log-probabilities of these tokens."""
    finish: np.ndarray
    """uint8 [responses]: index into FINISH_REASONS."""
    weight_version: int
    routes: np.ndarray | None = None
    """uint8 or uint16 [routed tokens, layers, k]: the experts of each token, for all responses."""
    route_lengths: np.ndarray | None = None
    """int64 [responses]: number of tokens in `routes` of each response, those of its prompt included."""
    support_ids: np.ndarray | None = None
    """int32 [tokens, largest support]: tokens that could be sampled, PADDING where fewer."""

    def unpack(self) -> Iterator[tuple[int, list[Response]]]:
        """Yield (key, responses) of each group; the responses' arrays are views of those of this message."""
        ends = np.cumsum(self.lengths).tolist()
        routes: list[np.ndarray | None] = [None] * len(ends)
        if self.routes is not None and self.route_lengths is not None:
            chunks = np.split(self.routes, np.cumsum(self.route_lengths)[:-1])
            routes = [chunk.transpose(1, 0, 2) for chunk in chunks]
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

    def unsound(self) -> list[int]:
        """The keys of groups with a log-probability that is missing or not finite."""
        if np.isfinite(self.logprobs).all():
            return []
        return [key for key, group in self.unpack() if not all(np.isfinite(r.logprobs).all() for r in group)]


def sampling_seeds(stream: str, version: int, request: Request) -> list[int]:
    """A seed of 63 bits for each of the `request.n` responses, which depends on stream, version, prompt and number."""
    names = (f"{stream}/{version}/{request.seed_key}/{number}".encode() for number in range(request.n))
    # SGLang keeps `sampling_seed` as a signed int64 (sampling_batch_info.py).
    return [int.from_bytes(blake2b(name, digest_size=8).digest()) >> 1 for name in names]


def pack(groups: list[tuple[int, list[dict[str, Any]]]], weight_version: int, sampling: Sampling) -> PackedGroups:
    """Flatten finished groups: (key, outputs), with SGLang's `output_ids` and `meta_info` for each response.

    Raises ValueError for a response whose logprobs, masks or experts do not match its tokens.
    """
    outputs = [output for _, group in groups for output in group]
    # Each response is checked, because in the flat array one missing logprob would shift those of all later responses.
    for output in outputs:
        if len(output["output_ids"]) != len(output["meta_info"]["output_token_logprobs"]):
            raise ValueError(
                f"SGLang returned {len(output['meta_info']['output_token_logprobs'])} logprobs for "
                f"{len(output['output_ids'])} tokens of a response; they must be equally many"
            )
    routes = [decode_routes(output, sampling.routers) for output in outputs] if sampling.routers else None
    ids = np.array([token for output in outputs for token in output["output_ids"]], dtype=np.int32)
    logprobs = np.array(
        [entry[0] for output in outputs for entry in output["meta_info"]["output_token_logprobs"]], dtype=np.float32
    )
    support_ids = None
    if sampling.sampling_masks:
        support_ids, logprobs = _support_from_masks(outputs, len(ids))
    elif sampling.support_ids:
        support_ids, logprobs = _support_from_top_logprobs(outputs, ids, logprobs, sampling)
    return PackedGroups(
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
        route_lengths=np.array([len(experts) for experts in routes]) if routes else None,
        support_ids=support_ids,
    )


def decode_routes(output: dict[str, Any], routers: RouterShape) -> np.ndarray:
    """Decode the experts of a response's P prompt and R response tokens: uint8 or uint16 [P + R - 1, layers, k].

    SGLang returns base64 of int32 (state_capturer/routed_experts.py), without the last token, which the engine has not
    run. Experts are numbered over all of a layer, not over those of one rank. Raises ValueError when the reply has too
    few or too many numbers, or one that no expert has.
    """
    meta = output["meta_info"]
    tokens = meta["prompt_tokens"] + len(output["output_ids"]) - 1
    shape = tokens, routers.layers, routers.top_k
    experts = np.frombuffer(base64.b64decode(meta.get("routed_experts") or ""), dtype="<i4")
    if experts.size != tokens * routers.layers * routers.top_k:
        raise ValueError(
            f"SGLang has to return the experts of each token, an array {shape} of tokens, layers and experts, but it "
            f"returned {experts.size} numbers"
        )
    if experts.size and not 0 <= experts.min() <= experts.max() < routers.experts:
        raise ValueError(
            f"routed experts are numbered {experts.min()} to {experts.max()}, but a layer has {routers.experts} "
            "experts, numbered from 0"
        )
    return experts.astype(expert_type(routers.experts)).reshape(shape)


def top_p_support(
    ids: np.ndarray,
    logprobs: np.ndarray,
    sampled: np.ndarray,
    sampled_logprobs: np.ndarray,
    top_p: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the tokens that SGLang's sampler could draw under top-k and top-p (layers/sampler.py).

    Top-p keeps a token when the more likely tokens together have at most `top_p` of the whole vocabulary's probability.
    The sampled token is always kept.

    Args:
        ids, logprobs: [R, k], the k = top-k most likely tokens at each position, most likely first.
        sampled, sampled_logprobs: [R], the tokens that were sampled.

    Returns:
        Support ids int32 [R, k], padded with PADDING; log-probabilities of the sampled tokens among them, float32 [R].
    """
    ids, logs = ids.astype(np.int32), logprobs.astype(np.float64)
    # Rounding or a tie can put the sampled token outside the top k. It then replaces the k-th.
    outside = ~(ids == sampled[:, None]).any(1)
    ids[outside, -1], logs[outside, -1] = sampled[outside], sampled_logprobs[outside]
    probabilities = np.exp(logs)
    keep = np.cumsum(probabilities, axis=1) - probabilities <= top_p
    keep |= ids == sampled[:, None]
    mass = np.log(np.where(keep, probabilities, 0.0).sum(1))
    return np.where(keep, ids, np.int32(PADDING)), (sampled_logprobs - mass).astype(np.float32)


def _narrow(support_ids: np.ndarray) -> np.ndarray:
    """Cut off the last columns of a response's support ids that are PADDING in every row; at least one column stays.

    In a message all rows have the length of the longest row of any response.
    """
    columns = np.flatnonzero((support_ids != PADDING).any(0))
    return support_ids[:, : columns[-1] + 1] if len(columns) else support_ids[:, :1]


def _support_from_masks(outputs: list[dict[str, Any]], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Read support ids int32 [tokens, k], most likely first, from the masks of SGLang's sampler.

    Returns also the log-probability of each sampled token among its support ids, float32 [tokens].
    """
    masks = [mask for output in outputs for mask in output["meta_info"]["output_token_sampling_mask"]]
    logprobs = [value for output in outputs for value in output["meta_info"]["output_token_sampling_logprobs"]]
    if not len(masks) == len(logprobs) == tokens:
        raise ValueError(
            f"SGLang returned {len(masks)} sampler masks and {len(logprobs)} logprobs for {tokens} tokens; each token "
            "needs a mask and a logprob"
        )
    lengths = np.array([len(mask) for mask in masks], dtype=np.int64)
    support_ids = np.full((tokens, int(lengths.max(initial=1))), PADDING, dtype=np.int32)
    support_ids[np.arange(support_ids.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(masks), np.int32)
    return support_ids, np.array(logprobs, dtype=np.float32)


def _support_from_top_logprobs(
    outputs: list[dict[str, Any]], ids: np.ndarray, logprobs: np.ndarray, sampling: Sampling
) -> tuple[np.ndarray, np.ndarray]:
    """Compute support ids and logprobs, as `top_p_support` returns them, from SGLang's top logprobs of each token."""
    tops = [entries for output in outputs for entries in output["meta_info"]["output_top_logprobs"]]
    if len(tops) != len(ids):
        raise ValueError(
            f"SGLang returned {len(tops)} rows of top logprobs for {len(ids)} tokens; each token needs one"
        )
    values = np.array([[entry[0] for entry in entries] for entries in tops], dtype=np.float32)
    tokens = np.array([[entry[1] for entry in entries] for entries in tops], dtype=np.int32)
    shape = (len(ids), sampling.top_k)
    return top_p_support(tokens.reshape(shape), values.reshape(shape), ids, logprobs, sampling.top_p)


MOST_LOGPROBS = 1 << 14
"""The largest number of logprobs in the reply to one `LogprobRange`, unless a single token has a larger support. SGLang
makes a Python object of each, and so many take 3 ms."""


@dataclass(frozen=True, slots=True)
class LogprobRange:
    """Describes a request for the logprobs of the tokens of a sequence from `start` up to `end`, exclusive.

    Each token has its own support, but SGLang takes only one list `token_ids_logprob` for a request. So a response is
    cut into ranges, and a range asks for the union of its tokens' supports.
    """

    start: int
    end: int
    token_ids: list[int] | None
    """The union of the tokens' supports, whose logprobs are returned at every position; None for the vocabulary."""


def logprob_ranges(length: int, logprob_tokens: int, support_ids: np.ndarray | None) -> Iterator[LogprobRange]:
    """Yield ranges that cover the last `logprob_tokens` of `length` tokens.

    `support_ids` is int32 [logprob_tokens, k], with PADDING where a token has fewer than k, or None for the whole
    vocabulary.
    """
    first = length - logprob_tokens
    if support_ids is None:
        yield LogprobRange(first, length, None)
        return
    start, union = 0, set[int]()
    for index, row in enumerate(support_ids.tolist()):
        support = {token for token in row if token != PADDING}
        if (index + 1 - start) * len(union | support) > MOST_LOGPROBS and index > start:
            yield LogprobRange(first + start, first + index, sorted(union))
            start, union = index, set()
        union |= support
    yield LogprobRange(first + start, length, sorted(union))


def logprob_request(ids: Sequence[int], tokens: LogprobRange) -> dict[str, Any]:
    """The arguments of SGLang's `generate` for the logprobs of the range `tokens` of `ids`; nothing is sampled."""
    others = {} if tokens.token_ids is None else {"token_ids_logprob": [tokens.token_ids]}
    return {
        "input_ids": [list(ids[: tokens.end])],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # SGLang returns no logprob for the token at `logprob_start_len` itself, so that is the token before the range.
        "logprob_start_len": tokens.start - 1,
        **others,
    }


def range_logprobs(output: dict[str, Any], tokens: LogprobRange, support_ids: np.ndarray | None) -> np.ndarray:
    """Read the logprobs, float32 [tokens], of a range from SGLang's reply.

    With `support_ids` int32 [tokens, k], each is normalised over its token's support. Raises ValueError when the reply
    has another number of tokens or of support ids.
    """
    meta, count = output["meta_info"], tokens.end - tokens.start
    entries = meta["input_token_logprobs"][1:]
    if len(entries) != count:
        raise ValueError(f"SGLang's reply: expected {count} prompt logprobs, got {len(entries)}")
    logprobs = np.array([entry[0] for entry in entries], dtype=np.float32)
    if support_ids is None:
        return logprobs
    columns = np.array(tokens.token_ids)
    rows = [row for row in meta["input_token_ids_logprobs"] if row][-count:]
    values = np.array([[entry[0] for entry in row] for row in rows], dtype=np.float64)
    if values.shape != (count, len(columns)):
        raise ValueError(
            f"SGLang's reply: expected logprobs of {len(columns)} support ids for each of {count} tokens, got an array "
            f"{list(values.shape)}"
        )
    support = np.take_along_axis(values, np.searchsorted(columns, support_ids.clip(min=columns[0])), axis=1)
    mass = np.log(np.where(support_ids >= 0, np.exp(support), 0.0).sum(1))
    return (logprobs - mass).astype(np.float32)
