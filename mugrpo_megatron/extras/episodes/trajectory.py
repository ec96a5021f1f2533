"""The responses of an episode as tokens, given and sampled; a request continues one of them, or begins another.

What the model sampled is never tokenized again. A request of token ids has to begin with all ids so far, given and
sampled; `Broken` says where a request does not. A chat that does not extend an earlier chat (after a compaction or a
retry, or in a parallel conversation) begins a new response with its own prompt. That prompt takes over the tokens of
the longest beginning that it shares with an earlier chat. The loss mask covers a response from its first sampled token
on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mugrpo_megatron.extras.episodes.chat import Chat
from mugrpo_megatron.samples import Episode, Message, Response

Shown = Callable[[list[int]], str]
"""Function that shows token ids as text, special tokens included."""


class Broken(Exception):
    """Raised for a request that does not begin with the tokens so far; the sentence names the first difference."""


@dataclass(slots=True)
class Trajectory:
    """The tokens of a response so far, and the chat that they hold, if any."""

    limit: int
    """Most tokens after the prompt, those of tools included."""
    tools: Sequence[Any] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The request's own arguments for the chat template."""
    messages: list[Any] = field(default_factory=list)
    """Messages of the last chat request, and its answer."""
    ends: dict[int, int] = field(default_factory=dict)
    """For each answer of the model: number of messages up to it, itself included -> number of tokens up to its end."""
    busy: bool = False
    """Whether the engine is working on a request that continues this response."""
    prompt: list[int] = field(default_factory=list)
    """Ids of the tokens before the first sampled token."""
    ids: list[int] = field(default_factory=list)
    """Token ids of the response: sampled tokens, and between them tokens of the texts of tools or users."""
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support_ids: list[np.ndarray] = field(default_factory=list)
    """Ids of the tokens that could be drawn, int32 [tokens, k], for one piece of the response after another; empty
    unless the stage stores them."""
    turns: int = 0
    finish_reason: str = "length"
    weight_version: int = 0

    @property
    def context(self) -> list[int]:
        """Ids of all tokens so far, with which the next request must begin."""
        return self.prompt + self.ids

    @property
    def room(self) -> int:
        """Number of tokens that the response may still get, sampled or given."""
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
            # A token that was not sampled has a support of itself alone; it takes no part in the loss.
            row = np.full((len(between), k), -1, dtype=np.int32)
            row[:, 0] = between
            self.support_ids += [row, np.asarray(response.support_ids)]
        self.ids += [*between, *response.ids.tolist()]
        self.mask += [False] * len(between) + [True] * len(response.ids)
        self.logprobs += [0.0] * len(between) + response.logprobs.tolist()
        self.turns += 1
        self.finish_reason, self.weight_version = response.finish_reason, response.weight_version

    def answered(self, messages: Sequence[Any], answer: Mapping[str, Any]) -> None:
        """Add the message that answers a chat request; its tokens were added by `extend`."""
        self.messages = [*messages, answer]
        self.ends[len(self.messages)] = len(self.context)

    def response(self, episode: Episode, others: bool) -> Response:
        """The response as the stage stores it. `episode` is the outcome of the whole episode.

        `others` says that this is one of the episode's other responses, not the last: it keeps its own mask, and takes
        over the last one's score.
        """
        mask = np.array(self.mask, dtype=bool) if others else episode.mask
        prompt = np.array(self.prompt, dtype=np.int32)
        return Response(
            ids=np.array(self.ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            finish_reason=self.finish_reason,
            weight_version=self.weight_version,
            support_ids=np.concatenate(self.support_ids) if self.support_ids else None,
            episode=replace(episode, prompt_ids=prompt, mask=mask, scored_with_previous=others),
        )


def continued(
    trajectories: Sequence[Trajectory],
    messages: Sequence[Message],
    tools: Sequence[Any],
    row: Mapping[str, Any],
    arguments: Mapping[str, Any],
    chat: Chat,
) -> tuple[Trajectory | None, list[int]]:
    """The response that a chat request continues (None if it begins a new response), and the request's token ids.

    `row` and `arguments` are the row's and the request's own arguments for the chat template; the latter win.
    """
    given = {**row, **arguments}
    shared = [
        (count, count == len(earlier.messages) and not earlier.busy, earlier)
        for earlier in trajectories
        if earlier.tools == tools and earlier.arguments == arguments
        for count in earlier.ends
        if count < len(messages) and _said(earlier.messages[:count]) == _said(messages[:count])
    ]
    # Rendered here, once, and not for each entry of `shared`: it may have one for each turn of the session.
    rendered = chat.rendered(messages, tools, given)
    for count, continues, earlier in sorted(shared, key=lambda entry: entry[:2], reverse=True):
        ids = chat.continuation(rendered, messages[:count], tools, given, earlier.context[: earlier.ends[count]])
        if ids is not None:
            return earlier if continues else None, ids
    return None, chat.prompt(rendered)


def _said(messages: Sequence[Message]) -> list[Any]:
    """Messages without what programs add or leave out when they send them again, such as the ids of calls."""
    return [
        (
            message["role"],
            message.get("content") or "",
            [(call["function"]["name"], call["function"].get("arguments")) for call in message.get("tool_calls") or ()],
        )
        for message in messages
    ]
