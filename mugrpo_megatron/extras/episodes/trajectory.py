"""The tokens of one episode: given and sampled ones, and a check that each request continues the last.

What the model sampled is never tokenized again. A later request has to begin with the ids of the earlier ones, token by
token; `Broken` says where it does not. Positions of the loss mask are those of the response, from the first sampled
token on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mugrpo_megatron.samples import Episode, Response

Shown = Callable[[list[int]], str]
"""Token ids as text, special tokens included."""


class Broken(Exception):
    """A request does not begin with the tokens so far; the sentence names the first difference."""


@dataclass(slots=True)
class Trajectory:
    """The tokens of one episode so far."""

    limit: int
    """Most tokens after the prompt, the environment's included."""
    prompt: list[int] = field(default_factory=list)
    """Tokens before the first sampled one."""
    ids: list[int] = field(default_factory=list)
    """The response: sampled tokens, and the environment's between them."""
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support_ids: list[np.ndarray] = field(default_factory=list)
    """Sampler support of each piece, int32 [tokens, k], if the stage stores it."""
    turns: int = 0
    finish_reason: str = "length"
    weight_version: int = 0

    @property
    def context(self) -> list[int]:
        """All tokens so far; the next request must begin with them."""
        return self.prompt + self.ids

    @property
    def room(self) -> int:
        """Tokens that may still be sampled, or given."""
        return self.limit - len(self.ids)

    def check(self, ids: Sequence[int], shown: Shown) -> None:
        """Raise Broken unless `ids` begin with the context."""
        context = self.context
        if not self.turns or list(ids[: len(context)]) == context:
            return
        position = next(
            (k for k, (ours, theirs) in enumerate(zip(context, ids, strict=False)) if ours != theirs), len(ids)
        )
        shown_theirs = f"{shown([ids[position]])!r} (id {ids[position]})" if position < len(ids) else "missing"
        sampled = position >= len(self.prompt) and self.mask[position - len(self.prompt)]
        raise Broken(
            f"turn {self.turns + 1} does not continue turn {self.turns}: its token {position} is {shown_theirs} where "
            f"{shown([context[position]])!r} (id {context[position]}) was {'sampled' if sampled else 'given'} before; "
            "pass on the ids, or the messages, as they were returned"
        )

    def extend(self, ids: Sequence[int], response: Response) -> None:
        """Add a turn: the request's `ids`, which `check` has passed, and the engine's response to them."""
        if not self.turns:
            self.prompt = list(ids)
        between = list(ids[len(self.context) :])
        k = 0 if response.support_ids is None else response.support_ids.shape[1]
        if k:
            # The softmax at a token that nobody sampled runs over that token alone: it takes no part in the loss.
            row = np.full((len(between), k), -1, dtype=np.int32)
            row[:, 0] = between
            self.support_ids += [row, np.asarray(response.support_ids)]
        self.ids += [*between, *response.ids.tolist()]
        self.mask += [False] * len(between) + [True] * len(response.ids)
        self.logprobs += [0.0] * len(between) + response.logprobs.tolist()
        self.turns += 1
        self.finish_reason, self.weight_version = response.finish_reason, response.weight_version

    def response(self, episode: Episode) -> Response:
        """The response as the stage stores it."""
        return Response(
            ids=np.array(self.ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            finish_reason=self.finish_reason,
            weight_version=self.weight_version,
            support_ids=np.concatenate(self.support_ids) if self.support_ids else None,
            episode=episode,
        )
