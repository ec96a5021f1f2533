"""The user's own functions, named `module:function`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError


def load_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names, from an installed package or from a file in the current directory.

    The current directory comes last on the import path, so that a file there never replaces a library's module.
    Raises UserError with what is wrong.
    """
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and find_spec(module.partition(".")[0]) is None:
        sys.path.append(here)
    try:
        function = getattr(import_module(module), attribute)
    except Exception as error:
        raise UserError(f"{name} could not be loaded: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UserError(f"{name} is {function!r}, not a function")
    return function
