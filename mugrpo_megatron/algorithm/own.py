"""The user's own diagnostics: scalars of an update's tokens, under the names that the function gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mugrpo_megatron.algorithm.surrogates import Tokens
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.functions import load_function
from mugrpo_megatron.recipe.objective import ObjectiveSection

PREFIX = "own/"
NAME = re.compile(r"[A-Za-z0-9_-]+")


def own_metrics(tokens: Tokens, config: ObjectiveSection) -> dict[str, float]:
    """What the function of `config.diagnostics` says of an update's tokens, as `own/NAME`; without gradients.

    Raises UserError when the function fails or returns something else than numbers by name.
    """
    source = config.diagnostics
    if source is None:
        return {}
    function = load_function("objective.diagnostics", source)
    given = replace(tokens, **{name: getattr(tokens, name).detach() for name in ("logprobs", "log_ratio", "ratio")})
    try:
        with torch.no_grad():
            found: Any = function(given, config)
    except Exception as error:
        raise UserError(f"objective.diagnostics = {source} failed: {type(error).__name__}: {error}") from error
    return _checked(found, source)


def _checked(found: Any, source: str) -> dict[str, float]:
    if not isinstance(found, Mapping):
        raise UserError(f"objective.diagnostics = {source} returned {type(found).__name__}, not a mapping of numbers")
    metrics = {}
    for name, value in found.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise UserError(f"objective.diagnostics = {source}: {name!r} is not a name of letters, digits, - and _")
        try:
            metrics[PREFIX + name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers
            raise UserError(
                f"objective.diagnostics = {source}: {name} is not a number but {type(value).__name__}"
            ) from None
    return metrics
