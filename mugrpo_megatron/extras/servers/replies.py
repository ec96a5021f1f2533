"""Turns a server's reply into responses, and checks all that can be checked without the learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mugrpo_megatron.extras.exchange.foreign_rollouts import ROUNDING
from mugrpo_megatron.extras.servers.connection import ServerRefusal, ServerTrouble
from mugrpo_megatron.recipe.load import short_repr
from mugrpo_megatron.samples import Prompt, Response

LEAST_LOGPROB = -110.0
"""Lowest log-probability that is accepted, in nats. No sampler draws a less likely token, since float32 has no positive
number below 2^-149."""
BYTES_PER_TOKEN = 640
"""Most bytes of JSON for one token: its id, its log-probability, its text and the fields around them."""
BYTES_PER_REPLY = 1 << 16
"""Most bytes of JSON around the prompts and tokens of a reply."""
ABORTED = ("abort", "error")
"""Finish reasons of a response that the server ended because it stops, or has run out of memory."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a server was asked for besides the prompt; every response has to fit it."""

    n: int
    """Number of responses to each prompt."""
    max_tokens: int
    vocab_size: int
    ends: frozenset[int]
    """Ids of the tokens that end a response."""
    stop: tuple[str, ...]
    """Texts that end a response."""
    version: int
    """Weight version: the number of updates after which the learner had the weights that the server has to serve."""
    greedy: bool = False
    """Whether the temperature is 0, at which no log-probability is used."""

    def most_bytes(self, prompt: Prompt) -> int:
        """Most bytes of the reply to `prompt`; vLLM repeats the prompt with each response."""
        return BYTES_PER_REPLY + self.n * (16 * len(prompt.ids) + BYTES_PER_TOKEN * self.max_tokens)


@dataclass(frozen=True, slots=True)
class Reply:
    """One response as it was found in a server's JSON, unchecked: the fields may have any values."""

    ids: Any
    logprobs: Any
    finish_reason: Any
    prompt_ids: Any = None
    """The prompt that the response answers; None where the dialect does not return the prompt."""
    prompt_tokens: Any = None
    """The prompt's length in tokens; None where the dialect does not return it."""


def responses_of(replies: Sequence[Reply], prompt: Prompt, asked: Asked) -> list[Response]:
    """The responses to one prompt. Raises ServerTrouble if one was aborted, and ServerRefusal if one does not fit what
    was asked or their number is another."""
    if len(replies) != asked.n:
        raise ServerRefusal(f"it returns {len(replies)} responses to a prompt, and {asked.n} were asked for")
    return [_response(reply, prompt, asked) for reply in replies]


def _response(reply: Reply, prompt: Prompt, asked: Asked) -> Response:
    if reply.finish_reason in ABORTED:
        raise ServerTrouble(f"a server has ended a response itself, with the finish reason `{reply.finish_reason}`")
    _check_prompt(reply, prompt)
    ids = _ids(reply.ids, asked)
    logprobs = _logprobs(reply.logprobs, len(ids), asked.greedy)
    _check_end(ids, reply.finish_reason, asked)
    return Response(np.array(ids, dtype=np.int32), logprobs, reply.finish_reason, asked.version)


def _check_prompt(reply: Reply, prompt: Prompt) -> None:
    if reply.prompt_ids is not None and reply.prompt_ids != prompt.ids:
        raise ServerRefusal(
            "the `prompt_token_ids` of its answer are not the prompt that it was sent: it adds or cuts tokens (a chat "
            "template, a begin-of-sequence token, its own limit), which has to be turned off"
        )
    if reply.prompt_tokens is not None and reply.prompt_tokens != len(prompt.ids):
        raise ServerRefusal(
            f"it counts {short_repr(reply.prompt_tokens)} tokens in a prompt of {len(prompt.ids)}: it adds or cuts "
            "tokens (a chat template, a begin-of-sequence token, its own limit), which has to be turned off"
        )


def _ids(value: Any, asked: Asked) -> list[int]:
    if not isinstance(value, list):
        raise ServerRefusal("its responses have no token ids")
    if not 0 < len(value) <= asked.max_tokens:
        raise ServerRefusal(f"it returns a response of {len(value)} tokens, and 1 to {asked.max_tokens} were asked for")
    for token in value:
        if type(token) is not int or not 0 <= token < asked.vocab_size:
            raise ServerRefusal(
                f"it returns the token id {short_repr(token)}, and the model's ids are 0 to "
                f"{asked.vocab_size - 1}: it serves another model, or reads ids with another tokenizer"
            )
    return value


def _logprobs(value: Any, tokens: int, greedy: bool) -> np.ndarray:
    if not isinstance(value, list):
        raise ServerRefusal("its responses have no log-probabilities of their tokens")
    if len(value) != tokens:
        raise ServerRefusal(f"it returns {len(value)} log-probabilities for {tokens} tokens")
    if greedy:
        return np.zeros(tokens, dtype=np.float32)
    for number in value:
        # The comparison refuses NaN too, and an integer that is too large for a float.
        if type(number) not in (int, float) or not LEAST_LOGPROB <= number <= ROUNDING:
            raise ServerRefusal(
                f"it returns a log-probability of {short_repr(number)}, and those of sampled tokens are "
                f"{LEAST_LOGPROB:g} to 0"
            )
    return np.minimum(np.array(value, dtype=np.float32), 0.0)


def _check_end(ids: list[int], finish_reason: Any, asked: Asked) -> None:
    if finish_reason not in ("stop", "length"):
        raise ServerRefusal(
            f"it returns the finish reason {short_repr(finish_reason)}, which is neither `stop` nor `length`"
        )
    if finish_reason == "length" and len(ids) < asked.max_tokens:
        raise ServerRefusal(
            f"it cuts a response after {len(ids)} tokens, and {asked.max_tokens} were asked for: raise its own limit "
            "(vLLM: --max-model-len, SGLang: --context-length)"
        )
    if not asked.ends:
        return
    if any(token in asked.ends for token in ids[:-1]):
        raise ServerRefusal(
            "it goes on after the model's end token: start it without an option that ignores the end token (ignore_eos)"
        )
    if finish_reason == "stop" and ids[-1] not in asked.ends and not asked.stop:
        raise ServerRefusal(
            f"a response ends with token {ids[-1]}, which is no end token of the model: the server has another "
            "tokenizer, stops at texts or tokens of its own, or leaves the end token out; start it without such an "
            "option"
        )
