"""Reads the scores in a judge's answers with a user's function, in a worker process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.functions import describe_exception
from mugrpo_megatron.rewards.items import ScoringInput, Verdict, fits_float32


def parser_of(key: str, name: str, function: Callable[..., Any]) -> Callable[[Sequence[ScoringInput]], list[Verdict]]:
    """Returns a reward function that reads scores from judges' answers with the user's `function`.

    Raises UserError unless `function(answer=TEXT)` is a valid call. A function that was not written for answers, such
    as `os:system`, must not get one.
    """
    try:
        inspect.signature(function).bind(answer="")
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{key} {name!r} does not take one parameter `answer` ({error}); write it as def function(answer)"
        ) from None

    def parse(items: Sequence[ScoringInput]) -> list[Verdict]:
        scores = [parse_score(function, item.response) for item in items]
        return [Verdict(score, "", why) for score, why in scores]

    return parse


def parse_score(parse: Callable[[str], Any], answer: str) -> tuple[float | None, str]:
    """The score in a judge's answer and "", or None and the reason, such as an exception of the user's function."""
    try:
        value = parse(answer)
        if value is None:
            return None, "no score in the answer"
        score = float(value)
    except MemoryError:  # ends the worker, which is then replaced
        raise
    except Exception as error:
        return None, describe_exception(error, __file__)
    return (score, "") if fits_float32(score) else (None, f"the score is {score}")
