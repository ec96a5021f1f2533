"""A validation error of a recipe as one sentence: the key, its value, what is wrong, and the key that was meant."""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from mugrpo_megatron.recipe.other_trainers import translated
from mugrpo_megatron.recipe.sections import Recipe

SHOWN_CHARS = 60
"""Characters of a wrong value that a message shows."""


def sentence(error: ErrorDetails) -> str:
    """What is wrong with a value; for an unknown key also the nearest one, and what another trainer's is here."""
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"`{place}` is not a recipe key; {_meant(error['loc'], error['input'])}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        if close := difflib.get_close_matches(str(error["input"]), choices, n=1):
            message = f"did you mean `{close[0]}`? {message}"
    value = "" if isinstance(error["input"], dict) else f" = {shown(error['input'])}"
    return f"`{place}`{value}: {message}" if place else message


def shown(value: Any) -> str:
    """The value as text of a readable length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more than 4,300 digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


def _meant(loc: tuple[int | str, ...], value: Any) -> str:
    """The keys that an unknown one may stand for."""
    *sections, key = map(str, loc)
    known = _known_keys(loc[:-1])
    close = difflib.get_close_matches(key, known, n=1)
    near = f"did you mean `{'.'.join([*sections, *close])}`?" if close else ""
    other = translated(".".join([*sections, key]), value) or _elsewhere(key)
    return " ".join(filter(None, (near, other))) or f"known keys: {', '.join(sorted(known))}"


def _elsewhere(key: str) -> str:
    """A sentence on the sections that have a key of this name; empty without any."""
    homes = [name for name in Recipe.model_fields if key in _known_keys((name,))]
    return f"it belongs into a section: {' or '.join(f'`{name}.{key}`' for name in homes)}" if homes else ""


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Recipe
    parts = iter(loc)
    for part in parts:
        annotation = model.model_fields[str(part)].annotation
        if get_origin(annotation) is dict:  # tables whose names the user chooses
            next(parts)
            annotation = get_args(annotation)[1]
        assert isinstance(annotation, type)
        model = annotation
    return list(model.model_fields)
