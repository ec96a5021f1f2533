"""Log-probabilities of given tokens under the engine's model: what SGLang is asked, and what its answer says.

SGLang gives log-probabilities of a prompt's tokens over the whole vocabulary, and of further tokens at each of them
that are the same for one request. Where every place has kept tokens of its own, a response is asked for in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

MOST_IDS = 512
"""Tokens that a piece asks for at each of its places, at most, unless a single place has more."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A request for the tokens `start` to `end` of a sequence."""

    start: int
    end: int
    among: list[int] | None
    """The tokens whose log-probabilities are asked for besides."""


def pieces(length: int, scored: int, kept: np.ndarray | None) -> Iterator[Piece]:
    """Requests that together score the last `scored` of `length` tokens; `kept` is int32 [scored, k], or None."""
    first = length - scored
    if kept is None:
        yield Piece(first, length, None)
        return
    size = max(1, MOST_IDS // kept.shape[1])
    for start, end in pairwise([*range(0, scored, size), scored]):
        ids = np.unique(kept[start:end])
        yield Piece(first + start, first + end, ids[ids >= 0].tolist())


def request(ids: Sequence[int], piece: Piece) -> dict[str, Any]:
    """The arguments of SGLang's `generate`; nothing is sampled."""
    others = {} if piece.among is None else {"token_ids_logprob": [piece.among]}
    return {
        "input_ids": [list(ids[: piece.end])],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": piece.start - 1,  # the first that SGLang returns has none: it is the token before
        **others,
    }


def answer(output: dict[str, Any], piece: Piece, kept: np.ndarray | None) -> np.ndarray:
    """Log-probabilities float32 of the piece's tokens; with `kept`, int32 [tokens, k], among those of each place.

    Raises ValueError when SGLang's answer has another number of places.
    """
    meta, tokens = output["meta_info"], piece.end - piece.start
    entries = meta["input_token_logprobs"][1:]
    if len(entries) != tokens:
        raise ValueError(f"a score of {len(entries)} tokens, where {tokens} were asked for")
    logprobs = np.array([entry[0] for entry in entries], dtype=np.float32)
    if kept is None:
        return logprobs
    among = np.array(piece.among)
    places = [place for place in meta["input_token_ids_logprobs"] if place][-tokens:]
    values = np.array([[entry[0] for entry in place] for place in places], dtype=np.float64)
    if values.shape != (tokens, len(among)):
        raise ValueError(f"scores of {values.shape} kept tokens, where {(tokens, len(among))} were asked for")
    own = np.take_along_axis(values, np.searchsorted(among, kept.clip(min=among[0])), axis=1)
    mass = np.log(np.where(kept >= 0, np.exp(own), 0.0).sum(1))
    return (logprobs - mass).astype(np.float32)
