"""The responses of an episode: a request continues the response whose chat it extends, or begins another.

Continued are the recorded tokens, never text that is tokenized again. A request that does not extend a chat, as after a
compaction, a retry or beside a parallel one, begins a response with its own prompt; that takes over the tokens of the
longest chat that both begin with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mugrpo_megatron.extras.episodes.chat import Chat
from mugrpo_megatron.extras.episodes.trajectory import Trajectory
from mugrpo_megatron.samples import Episode, Message, Response


@dataclass(slots=True)
class Conversation:
    """A response of an episode, and the chat that its tokens hold, if any."""

    so_far: Trajectory
    tools: Sequence[Any] = ()
    messages: list[Any] = field(default_factory=list)
    """Messages of the last chat request, and its answer."""
    ends: dict[int, int] = field(default_factory=dict)
    """Messages up to the end of each answer -> tokens."""
    busy: bool = False
    """Whether the engine works on it."""

    def answered(self, messages: Sequence[Any], answer: Mapping[str, Any]) -> None:
        """Add the answer to a chat request, whose tokens `so_far` holds."""
        self.messages = [*messages, answer]
        self.ends[len(self.messages)] = len(self.so_far.context)

    def response(self, episode: Episode, others: bool) -> Response:
        """The response as the stage stores it; `others` for one that the scored response of the episode precedes."""
        mask = np.array(self.so_far.mask, dtype=bool) if others else episode.mask
        prompt = np.array(self.so_far.prompt, dtype=np.int32)
        return self.so_far.response(replace(episode, prompt_ids=prompt, mask=mask, scored_with_previous=others))


def continued(
    conversations: Sequence[Conversation],
    messages: Sequence[Message],
    tools: Sequence[Any],
    arguments: Mapping[str, Any],
    chat: Chat,
) -> tuple[Conversation | None, list[int]]:
    """The conversation that a chat request continues, None for a new one; and the request's token ids.

    `arguments` are the row's own for the chat template.
    """
    shared = [
        (count, count == len(earlier.messages) and not earlier.busy, earlier)
        for earlier in conversations
        if earlier.tools == tools
        for count in earlier.ends
        if count < len(messages) and _said(earlier.messages[:count]) == _said(messages[:count])
    ]
    for count, continues, earlier in sorted(shared, key=lambda entry: entry[:2], reverse=True):
        ids = chat.continuation(messages, tools, arguments, count, earlier.so_far.context[: earlier.ends[count]])
        if ids is not None:
            return earlier if continues else None, ids
    return None, chat.prompt(messages, tools, arguments)


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
