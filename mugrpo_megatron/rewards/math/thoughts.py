"""Finds the thoughts in a response, by the tags of models that think aloud, and the thought that a prompt opens."""

from __future__ import annotations

import re

_NAME = r"(?:[a-z]+[:_-]){0,2}(?:think(?:ing)?|thoughts?|reason(?:ing)?|reflection|scratchpad|analysis)(?:[_-][a-z]+)?"
"""Matches the names of tags around a thought, such as `think`, `seed:think`, `chain_of_thought` and
`thinking_process`."""
_MARKED = r"(?:thinking|reasoning|thoughts?)"
_OPENINGS = (
    rf"<{_NAME}(?:\s[^<>]*)?>"  # the tags of DeepSeek-R1, Qwen3 and Seed-OSS; some models write attributes
    r"|◁think▷"  # the tag of Kimi
    r"|(?-i:\[THINK\])"  # the tag of Magistral; below, those of OpenThinker, Command A and Apertus
    r"|<\|(?:begin_of_thought|START_THINKING|think(?:ing)?|inner_prefix)\|>"
    rf"|<\|(?:{_MARKED}_(?:start|begin)|(?:start|begin)_{_MARKED})\|>"
    r"|<\|channel>\s*thoughts?\b"
    r"|<unused94>"  # the tag of MedGemma
    r"|<\|channel\|>\s*(?:analysis|commentary)(?:\s[^<>]*)?<\|message\|>"  # gpt-oss with its special tokens
)
_CLOSINGS = (
    rf"</{_NAME}>|◁/think▷|(?-i:\[/THINK\])|<\|(?:end_of_thought|END_THINKING|/think(?:ing)?|inner_suffix)\|>|<unused95>"
    rf"|<\|(?:{_MARKED}_(?:end|stop)|(?:end|stop)_{_MARKED})\|>|<channel\|>"
    r"|<\|channel\|>\s*final(?:\s[^<>]*)?<\|message\|>"
)
_OPENING = re.compile(_OPENINGS, re.IGNORECASE)
_CLOSING = re.compile(rf".*(?:{_CLOSINGS})", re.IGNORECASE | re.DOTALL)
_TURN = re.compile(r".*(?:<[^<>\n]*assistant[^<>\n]*>|<[^<>\n]*>(?:assistant|model)\b|\[/INST\])", re.DOTALL | re.I)
_ANALYSIS = re.compile(r"\s*analysis(?![a-z:,.;-])")
_FINAL = re.compile(r".*assistant\s*final", re.DOTALL)
"""Matches gpt-oss's thought where its special tokens were left out: `analysisWe add ...assistantfinalThe answer is
7`."""
PROMPT_END_TOKENS = 32
"""Number of tokens at a prompt's end that are decoded to find a thought that it opens."""
_PROMPT_CHARS = 200
"""Number of characters at a prompt's end that are searched; tags before them belong to the question."""


def after_thoughts(response: str) -> str:
    """The text after the last thought that is closed; a thought that is not closed, and what follows it, is left out.

    A closing tag counts without an opening one. For a prompt that opens the thought, put `opening_of(prompt)` in front
    of the response.
    """
    if not any(sign in response for sign in ("<", "◁", "[", "analysis")):
        return response
    if _ANALYSIS.match(response):
        final = _FINAL.match(response)
        return response[final.end() :] if final else ""
    closing = _CLOSING.match(response)
    rest = response[closing.end() :] if closing else response
    opening = _OPENING.search(rest)
    return rest[: opening.start()] if opening else rest


def opening_of(prompt: str) -> str:
    """The tag with which a prompt opens the thought of its response; "" for other prompts.

    After the mark of the assistant's turn, the prompt may also have the first words of the thought.
    """
    end = prompt[-_PROMPT_CHARS:]
    if opening := re.search(rf"({_OPENINGS})\s*\Z", end, re.IGNORECASE):
        return opening[1]
    turn = _TURN.match(end)
    openings = list(_OPENING.finditer(end, turn.end())) if turn else []
    return openings[-1][0] if openings and not _CLOSING.match(end, openings[-1].end()) else ""
