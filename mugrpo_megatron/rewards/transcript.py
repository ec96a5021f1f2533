"""The parts of a response that a model marks with tags: its thoughts, and its answer.

Reasoning models write `<think>...</think>` first, and the template of R1-Zero asks for `<answer>...</answer>` behind it
(arXiv 2501.12948, table 1). A thought is not an answer, whatever it contains. An answer in tags is the only answer of
its response.
"""

from __future__ import annotations

import re

_THOUGHT = r"(?:think|thinking|thought|reasoning)"
_OPENING = re.compile(rf"<{_THOUGHT}>", re.IGNORECASE)
_CLOSING = re.compile(rf".*</{_THOUGHT}>", re.IGNORECASE | re.DOTALL)
_ANSWER = re.compile(
    r"<(?P<tag>answer|final_answer)>(?P<inside>(?:(?!<(?P=tag)>).)*?)</(?P=tag)>", re.IGNORECASE | re.DOTALL
)


def after_thoughts(response: str) -> str:
    """What follows the last thought that ends; a thought that does not end is left out up to the end of the response.

    The prompt may hold the opening tag, so a closing tag needs none.
    """
    if "<" not in response:
        return response
    closing = _CLOSING.match(response)
    rest = response[closing.end() :] if closing else response
    opening = _OPENING.search(rest)
    return rest[: opening.start()] if opening else rest


def tagged_answers(text: str, connective: re.Pattern[str]) -> list[str]:
    """The insides of the last group of `<answer>...</answer>`; empty without a complete pair.

    Pairs form a group when only a connective stands between them, as boxes do.
    """
    if "<" not in text:
        return []
    pairs = list(_ANSWER.finditer(text))
    group = pairs[-1:]
    for pair in reversed(pairs[:-1]):
        if not connective.fullmatch(text, pair.end(), group[0].start()):
            break
        group.insert(0, pair)
    return [pair["inside"].strip() for pair in group]
