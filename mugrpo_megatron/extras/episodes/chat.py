"""Turns chats into token ids: first the whole prompt, then, for each further request, only what follows the last turn.

For that the chat template renders the chat twice, with and without the new messages. Only the difference is tokenized,
so tokens that the model sampled are never decoded and tokenized again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.call_guard import TookTooLong, template_clock
from mugrpo_megatron.data.files import with_parsed_arguments
from mugrpo_megatron.data.prompts import Template, apply_template
from mugrpo_megatron.data.quoted import count_special, encode_quoting, mark_special
from mugrpo_megatron.engine import sglang_compat
from mugrpo_megatron.extras.episodes.request_size import MOST_BYTES, utf8_bytes
from mugrpo_megatron.files.json_text import as_text
from mugrpo_megatron.samples import Message

FORMATS = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜tool▁calls▁begin｜>", "deepseekv3"),
    ("<|tool_call_start|>", "lfm2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "qwen25"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3"),
)
"""Text that a template with tool calls contains -> name of SGLang's parser; the first match counts."""

RENDER_S, PARSE_S = 1.0, 0.5
"""CPU seconds in which a request has to be rendered, and a response parsed: the engine's leader waits meanwhile."""
MOST_CALLS = 128
"""Most tool calls of a response that is parsed: for each, SGLang's parsers search all of the text behind it."""
MOST_RENDERED = 2 * MOST_BYTES
"""Most bytes to which a template may render a request; templates may escape texts, or write them twice."""
PIECE = 2
"""The tokens of a long text are counted piece by piece. A piece has the longest context's tokens times so many
characters."""
CUT_TOKENS = 64
"""Most tokens that the cuts at its two ends may add to such a piece; so many tokens of each piece are not counted."""
REFUSAL_CHARS = 300
"""Most characters of a chat template's own error that a program reads."""
SHOWN_CHARS = 100
"""Most characters of an argument's name that an error shows."""
RESERVED = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
"""Names of arguments of `apply_chat_template` that are not arguments of the template itself."""
LONGEST = 1 << 20
"""Tokens of the longest context, where it is not given: more than any model has that the engine serves."""


class TooLong(ValueError):
    """Raised for a chat of more tokens than the longest context."""


class Chat:
    """Renders chats and parses the model's messages with one tokenizer's template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: Template,
        parser: str | None = None,
        longest: int = LONGEST,
    ) -> None:
        """`parser` names SGLang's parser of tool calls; None chooses it by the template. `longest` is the number of
        tokens of the longest context, a prompt with its response."""
        self._tokenizer, self._template, self._longest, self._parser = tokenizer, template, longest, parser
        self._closing = str(tokenizer.eos_token)

    def rendered(self, messages: Sequence[Message], tools: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        """A chat as text, up to where the model answers; `arguments` are further arguments of the template.

        Raises ValueError if the template refuses the chat.
        """
        return self._render(messages, tools, arguments, is_prompt=True)

    def prompt(self, rendered: str) -> list[int]:
        """Token ids of a rendered chat.

        Raises TooLong for more tokens than the longest context has, and ValueError for more than MOST_RENDERED bytes.
        """
        return self._encode_if_short(rendered)

    def continuation(
        self,
        rendered: str,
        earlier: Sequence[Message],
        tools: Sequence[Any],
        arguments: Mapping[str, Any],
        context: list[int],
    ) -> list[int] | None:
        """Token ids of a rendered chat; they begin with `context`, the token ids of its `earlier` messages.

        The model has sampled the last of the earlier messages. Returns None if the template renders the earlier
        messages differently once further messages follow. Raises ValueError if the template refuses the earlier
        messages, and TooLong for a chat of more tokens than the longest context.
        """
        begin = self._render(earlier, tools, arguments, is_prompt=False)
        last, closing, rest = begin.rpartition(self._closing)
        if not closing or rest.strip():
            raise ValueError(
                f"the chat template does not end the assistant's turn with {self._closing!r}, the tokenizer's "
                "end-of-sequence token; set data.chat_template to one that does"
            )
        if not rendered.startswith(last + closing):
            return None
        # Whether the model has sampled the token that closes its turn; if not, the token is encoded with what follows.
        closed = context[-1] == self._tokenizer.eos_token_id
        return context + self._encode_if_short(rendered[len(last) + closed * len(closing) :])

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any], arguments: Mapping[str, Any], is_prompt: bool
    ) -> str:
        try:
            with template_clock(RENDER_S):
                given = mark_special({**arguments, "tools": list(tools) or None}, self._tokenizer)
                chat = [dict(message) for message in messages]
                return apply_template(chat, self._tokenizer, self._template, given, is_prompt)
        except (Exception, TookTooLong) as error:
            why = str(error)[:REFUSAL_CHARS] or type(error).__name__
            raise ValueError(f"the chat template refuses the messages ({why})") from None

    def message(self, ids: Sequence[int], tools: Sequence[Any]) -> dict[str, Any]:
        """Parse sampled ids as the assistant's message, with `tool_calls` if it makes any.

        Raises ValueError, as `parser` does, if there are `tools` and the format of their calls is not known.
        """
        spoken = list(ids[:-1] if ids and ids[-1] == self._tokenizer.eos_token_id else ids)
        text = str(self._tokenizer.decode(spoken, skip_special_tokens=not tools))
        content, calls = self._parse(text, tools) if tools else (text, [])
        return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}

    def _parse(self, text: str, tools: Sequence[Any]) -> tuple[str, list[dict[str, Any]]]:
        parser = sglang_compat.tool_parser(tools, self.parser)
        opening = getattr(parser.detector, "bot_token", "")
        if not parser.has_tool_call(text) or (len(opening) > 1 and text.count(opening) > MOST_CALLS):
            return text, []
        try:
            with template_clock(PARSE_S):
                content, calls = parser.parse_non_stream(text)
        except (Exception, TookTooLong):  # a parser may fail in any way on text that a model wrote
            return text, []
        return content, [
            with_parsed_arguments({"type": "function", "function": {"name": call.name, "arguments": call.parameters}})
            for call in calls
        ]

    @cached_property
    def parser(self) -> str:
        """Name of SGLang's parser; raises ValueError if the template's format is not known."""
        if self._parser:
            return self._parser
        template = self._template.text or str(self._tokenizer.chat_template)
        name = next((name for mark, name in FORMATS if mark in template), None)
        if name is None:
            raise ValueError(
                "the chat template's format of tool calls is not known: name it with engine.extra.tool_call_parser"
            )
        return name

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError for an argument that the chat template does not read, or that only this program may set."""
        for name in arguments:
            if name in RESERVED or name not in self._words:
                raise ValueError(
                    f"chat_template_kwargs.{name[:SHOWN_CHARS]}: the chat template reads no such argument of a "
                    "request; leave it out"
                )

    @cached_property
    def _words(self) -> set[str]:
        """Words of the chat template, the names of its arguments among them."""
        return set(re.findall(r"\w+", self._template.text or str(self._tokenizer.chat_template)))

    def count_special(self, texts: Iterable[str]) -> int:
        """How often texts spell out a special token; tokenized, they have at least as many tokens."""
        return sum(count_special(text, self._tokenizer) for text in texts)

    def shown(self, ids: list[int]) -> str:
        """Token ids as text, special tokens included."""
        return str(self._tokenizer.decode(ids))

    def text(self, ids: Sequence[int]) -> str:
        """Token ids as text, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def encode(self, text: str, context: list[int] | None = None) -> list[int]:
        """Token ids of a text; if it begins with the tokens of `context`, only the rest is tokenized."""
        if context and text.startswith(shown := self.shown(context)):
            return context + self._encode(text[len(shown) :])
        return self._encode(text)

    def _encode_if_short(self, text: str) -> list[int]:
        # A tokenizer may take seconds for a megabyte, for instance where it first writes a character as several. So the
        # tokens of a long text are first counted piece by piece, and counting ends as soon as they are too many.
        size, tokens = PIECE * self._longest, 0
        for begin in range(0, len(text), size) if len(text) > size else ():
            tokens += max(0, len(self._encode(text[begin : begin + size])) - CUT_TOKENS)
            if tokens > self._longest:
                raise TooLong(f"the chat has more than {self._longest:,} tokens")
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if (size := utf8_bytes(text)) > MOST_RENDERED:
            raise ValueError(
                f"the chat template renders the request to {size:,} bytes, and at most {MOST_RENDERED:,} are allowed; "
                "shorten its messages"
            )
        return encode_quoting(as_text(text), self._tokenizer)
