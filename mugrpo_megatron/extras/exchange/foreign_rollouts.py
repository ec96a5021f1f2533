"""Reads rollouts that another program wrote: rows of a file become groups of responses to one prompt.

A row has a prompt (`prompt_ids`, or `prompt` as text or messages) and a response (`response_ids`, or one of
`data.files.RESPONSES` as text or messages). TRL's `log_completions` files have such rows, and `traces.py` makes such
rows of agents' traces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mugrpo_megatron.data.fields import spoken_message
from mugrpo_megatron.data.files import RESPONSES, found_in, messages_of, rows
from mugrpo_megatron.data.prompts import Template, render, render_reply
from mugrpo_megatron.data.reading import kept_row
from mugrpo_megatron.data.tokenizer import prompt_end, without_repetition
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.exchange.traces import flatten_trace, trainable_traces
from mugrpo_megatron.recipe.load import short_repr
from mugrpo_megatron.rewards.items import fits_float32
from mugrpo_megatron.rewards.math.thoughts import opening_of
from mugrpo_megatron.samples import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # imported for the type alone: it takes a second

LOGPROBS = ("logprobs", "engine_logprobs")
ROUNDING = 1e-5
"""How far above 0 a logprob may be, in nats: kernels that approximate exp and log give about 1e-7 for probability 1."""


@dataclass(frozen=True, slots=True)
class ForeignRollout:
    location: str
    """Place of the row in messages, `file:line`."""
    row: Mapping[str, Any]
    """The whole row, as JSON values."""
    prompt_ids: np.ndarray
    """int32 [P]: token ids of the prompt."""
    response_ids: np.ndarray
    """int32 [R]: token ids of the response."""
    text: str
    logprobs: np.ndarray | None
    """float32 [R]: log-probabilities of these tokens, if the row has them."""
    loss_mask: np.ndarray | None
    """bool [R]: whether each token is trained on, if the row says so."""
    finish_reason: str
    opening: str = ""
    """The tag, such as `<think>`, with which the prompt begins the response's reasoning; empty if it does not."""


def read_rollouts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    limits: tuple[int, int],
    vocab_size: int | None = None,
) -> list[list[ForeignRollout]]:
    """Read the groups of a file, in the order of their first rows.

    Rows with the same `group` are a group; without that column, rows with the same prompt and `step`. Text prompts are
    taken as the model saw them, messages go through the chat template. A response that is text is tokenized, and ends
    with the end-of-sequence token unless its `finish_reason` is `length`. Raises UserError, which names the file and
    the line, for a row that cannot be taken, and for groups whose sizes, prompts or columns do not agree.

    Args:
        limits: most tokens of a prompt and of a response.
        vocab_size: the number of token ids that the model can sample; None: as many as the tokenizer has.
    """
    vocab_size = vocab_size or len(tokenizer)
    groups: dict[str, list[ForeignRollout]] = {}
    for line, row in rows(path):
        location = f"{path.name}:{line}"
        if isinstance(row, str):
            raise UserError(f"{location}: {row}")
        try:
            # A Parquet file may hold these columns as binary values, which are read as bytes and not as text.
            for name in ("prompt", *RESPONSES):
                if isinstance(row.get(name), bytes | bytearray | memoryview):
                    raise ValueError(f"{name} is binary; write the column as text (a string type)")
            rollouts = [
                _parse_row(kept_row(flatten_trace(trace)), location, tokenizer, template, limits, vocab_size)
                for trace in trainable_traces(row)
            ]
        except ValueError as error:
            raise UserError(f"{location}: {error}") from None
        for rollout in rollouts:
            prompt = rollout.prompt_ids.tolist()
            key = row["group"] if row.get("group") is not None else [row.get("step"), prompt]
            groups.setdefault(json.dumps([key, prompt] if len(rollouts) > 1 else key, default=str), []).append(rollout)
    _check_even(path, list(groups.values()))
    return list(groups.values())


def _check_even(path: Path, groups: list[list[ForeignRollout]]) -> None:
    if not groups:
        raise UserError(f"{path}: holds no rows; name a file with one response a row")
    sizes = sorted({len(group) for group in groups})
    if len(sizes) > 1:
        odd = next(group for group in groups if len(group) != len(groups[0]))
        raise UserError(
            f"{path}: the group of {odd[0].location} has {len(odd)} responses and that of {groups[0][0].location} has "
            f"{len(groups[0])}, and all groups need the same number; leave rows out, or tell groups of one prompt "
            "apart with a column `group` or `step`"
        )
    for group in groups:
        if any(not np.array_equal(rollout.prompt_ids, group[0].prompt_ids) for rollout in group):
            raise UserError(
                f"{group[0].location}: the responses of its group have different prompts; give each prompt its own "
                "value of `group`"
            )
        for name in ("logprobs", "loss_mask"):
            have = {getattr(rollout, name) is not None for rollout in (group[0], groups[0][0], *group)}
            if len(have) > 1:
                raise UserError(
                    f"{path}: the rows of the group that begins at {group[0].location} and the file's first row do not "
                    f"all have {name}; give it to all rows or to none"
                )


def _parse_row(
    row: dict[str, Any],
    location: str,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    limits: tuple[int, int],
    vocab_size: int,
) -> ForeignRollout:
    finish = row.get("finish_reason") or "stop"
    if finish not in ("stop", "length"):
        raise ValueError(f"finish_reason {short_repr(finish)} is neither `stop` nor `length`")
    prompt = _prompt(row, location, tokenizer, template, limits[0], vocab_size)
    end = prompt_end(prompt.tolist(), tokenizer)
    given_ids = row.get("response_ids")
    if given_ids is not None:
        response = _ids(given_ids, "response_ids", vocab_size)
        text = str(tokenizer.decode(response.tolist(), skip_special_tokens=True))
    elif reply := spoken_message(_given_response(row)):
        problem = _chat_of(row, location)
        if problem is None:
            raise ValueError(
                f"the response has {', '.join(reply)}, which only a chat template renders: give the prompt as messages "
                "or give response_ids"
            )
        try:
            ids = render_reply(problem, reply, tokenizer, "chat", template)
        except UserError as error:
            raise ValueError(str(error)) from None
        response = np.array(ids[:-1] if finish == "length" else ids, dtype=np.int32)
        text = str(tokenizer.decode(response.tolist(), skip_special_tokens=True))
    else:
        text = without_repetition(_response(row), end, tokenizer)
        _check_characters("response", text, limits[1], tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False)
        response = np.array(ids if finish == "length" else [*ids, tokenizer.eos_token_id], dtype=np.int32)
    if not len(response):
        raise ValueError("the response has no tokens; leave the row out")
    given_logprobs = next((row[name] for name in LOGPROBS if row.get(name) is not None), None)
    given_mask = row.get("loss_mask")
    for name, values in (("logprobs", given_logprobs), ("loss_mask", given_mask)):
        if values is None:
            continue
        if given_ids is None:
            raise ValueError(f"{name} has a value for each token, so the row needs its response_ids too")
        if not isinstance(values, list) or len(values) != len(response):
            raise ValueError(f"{name} need one value for each of the {len(response)} response_ids")
    return ForeignRollout(
        location,
        row,
        prompt,
        response,
        text,
        None if given_logprobs is None else _logprobs(given_logprobs),
        None if given_mask is None else _mask(given_mask),
        finish,
        opening_of(end),
    )


def _logprobs(values: list[Any]) -> np.ndarray:
    """Returns a row's log-probabilities as float32 [R]; one that rounding has put above 0, by at most ROUNDING, becomes
    0. Raises ValueError for one further above 0, and for one that is no number or not finite."""
    if not all(type(value) in (int, float) for value in values):
        raise ValueError("logprobs hold something that is not a number; give one for each token")
    if (highest := max(values)) > ROUNDING:
        value_text = highest if fits_float32(highest) else "a number beyond float32"
        raise ValueError(f"logprobs hold {value_text}, and the logarithm of a probability is at most 0")
    if not all(map(fits_float32, values)):
        raise ValueError("logprobs hold a number that is not finite as float32; leave the row out")
    return np.minimum(np.array(values, dtype=np.float32), np.float32(0.0))


def _mask(values: list[Any]) -> np.ndarray:
    """Returns the loss mask of a response, bool [R]."""
    if not all(isinstance(value, bool | int | float) and value in (0, 1) for value in values):
        raise ValueError("loss_mask holds something that is not true, false, 0 or 1; give one of these for each token")
    return np.array(values, dtype=bool)


def _check_characters(what: str, text: str, tokens: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for a text that has more than `tokens` tokens even if each is the tokenizer's longest.

    Called before the text is tokenized, which takes long for such a text.
    """
    if len(text) > _longest_token(tokenizer) * tokens:
        raise ValueError(
            f"the {what} has {len(text):,} characters, which are more than {tokens:,} tokens; leave the row out, or "
            f"raise {'data.max_prompt_tokens' if what == 'prompt' else 'rollout.max_response_tokens'}"
        )


@lru_cache(maxsize=1)
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(map(len, tokenizer.get_vocab()))


def _prompt(
    row: dict[str, Any],
    location: str,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    most: int,
    vocab_size: int,
) -> np.ndarray:
    content = row.get("prompt")
    if (ids := row.get("prompt_ids")) is not None:
        prompt = _ids(ids, "prompt_ids", vocab_size)
    elif isinstance(content, list):
        problem = _chat_of(row, location) or Problem(location, "", "")
        texts = [message["content"] or "" for message in problem.messages]
        _check_characters("prompt", "".join(texts), most, tokenizer)
        prompt = np.array(render(problem, tokenizer, "chat", template), dtype=np.int32)
    elif isinstance(content, str):
        _check_characters("prompt", content, most, tokenizer)
        has_start = bool(tokenizer.bos_token) and content.startswith(str(tokenizer.bos_token))
        ids = tokenizer.encode(content, add_special_tokens=False)
        starts = [] if has_start or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        prompt = np.array([*starts, *ids], dtype=np.int32)
    else:
        raise ValueError(f"needs a column prompt or prompt_ids {found_in(row)}")
    if not len(prompt):
        raise ValueError("the prompt has no token; leave the row out")
    if len(prompt) > most:
        raise ValueError(f"the prompt has {len(prompt)} tokens; raise data.max_prompt_tokens (now {most})")
    return prompt


def _chat_of(row: Mapping[str, Any], location: str) -> Problem | None:
    """The row's prompt as a chat, with the row's arguments for the chat template; None if the prompt is not a list."""
    content = row.get("prompt")
    if not isinstance(content, list):
        return None
    return Problem(location, "", "", messages=messages_of(content), row=row)


def prompt_chats(groups: Sequence[Sequence[ForeignRollout]]) -> list[Problem]:
    """The prompt of each group whose prompt went through the chat template."""
    chats = (_chat_of(group[0].row, group[0].location) for group in groups if group[0].row.get("prompt_ids") is None)
    return [replace(chat, source="prompts") for chat in chats if chat]


REPLACEMENT = "\ufffd"
"""What decoding writes for bytes that are no text."""


def decoded_with_loss(groups: Sequence[Sequence[ForeignRollout]]) -> int:
    """The number of responses that came as text in which bytes were lost: their tokens are not those sampled."""
    texts = (rollout.text for group in groups for rollout in group if rollout.row.get("response_ids") is None)
    return sum(REPLACEMENT in text for text in texts)


def _given_response(row: Mapping[str, Any]) -> Any:
    return next((row[name] for name in RESPONSES if row.get(name) is not None), None)


def _response(row: dict[str, Any]) -> str:
    response = _given_response(row)
    if isinstance(response, list):
        turns = messages_of(response)
        if [turn["role"] for turn in turns] != ["assistant"]:
            roles = short_repr([turn["role"] for turn in turns])
            raise ValueError(
                f"the response is a list of messages with the roles {roles}, and only a list of one message of the "
                "assistant can be read; give response_ids and a loss_mask instead, or leave the row out"
            )
        return str(turns[0]["content"] or "")
    if response is None:
        raise ValueError(f"needs a column response_ids or one of {', '.join(RESPONSES)} {found_in(row)}")
    if not isinstance(response, str):
        raise ValueError(f"the response is {short_repr(response)}, neither text nor a list of one message; write it so")
    return response


def _ids(values: Any, name: str, vocabulary: int) -> np.ndarray:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < vocabulary for value in values):
        raise ValueError(f"{name} are not a list of token ids below {vocabulary}")
    return np.array(values, dtype=np.int32)
