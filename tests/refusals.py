"""A refusal is a row: the sentence, what is called, and with what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mugrpo_megatron.errors import UserError


def refuses(
    words: str, act: Callable[..., object], *given: Any, error: type[Exception] = UserError, **named: Any
) -> None:
    """The call ends with an error whose sentence matches `words`."""
    with pytest.raises(error, match=words):
        act(*given, **named)
