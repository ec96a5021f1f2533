"""The user's own functions, named `module:function`: reward functions and surrogates."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError

SHOWN_CHARS = 300


def load_function(key: str, name: str) -> Callable[..., Any]:
    """The function that `module:function` names, from an installed package or from a file in the current directory.

    The current directory comes last on the import path, so that a file there never replaces a library's module.
    Raises UserError with what is wrong; `key` is the recipe's key that names the function.
    """
    module, _, attribute = name.partition(":")
    try:
        here = str(Path.cwd())
        if here not in sys.path and find_spec(module.partition(".")[0]) is None:
            sys.path.append(here)
        function = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way when it is imported
        raise UserError(
            f"{key} {name!r} cannot be loaded ({told(error)}): name it as module:function, importable from the "
            "current directory"
        ) from error
    if not callable(function):
        raise UserError(f"{key} {name!r} cannot be loaded: it is {str(function)[:SHOWN_CHARS]}, not a function")
    return function


def told(error: BaseException, *own: str) -> str:
    """An exception's type, text and place; no place when one of the files `own`, or this one, raised it."""
    hidden = (*own, __file__, importlib.__file__)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in hidden and not frame.filename.startswith("<frozen")
    ]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:SHOWN_CHARS] + place
