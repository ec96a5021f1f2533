"""The user's own functions, named `module:function`: reward functions and surrogates."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError

MAX_MESSAGE_CHARS = 300


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
        raise _unnamed(key, name, describe_exception(error)) from error
    if not callable(function):
        raise UserError(f"{key} {name!r} cannot be loaded: it is {str(function)[:MAX_MESSAGE_CHARS]}, not a function")
    return function


def check_function(key: str, name: str) -> None:
    """Raise UserError when `module:function` names nothing; the module is read, and neither imported nor run.

    A module that is not a file of Python source, or defines names as it runs, is taken for right.
    """
    module, _, attribute = name.partition(":")
    try:
        source = _source_of(module) if attribute else None
        tree = ast.parse(source.read_bytes()) if source else None
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        raise _unnamed(key, name, f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]) from None
    if not attribute:
        raise _unnamed(key, name, "it has no `:function`")
    if tree and (names := _names(tree)) is not None and attribute not in names:
        close = difflib.get_close_matches(attribute, names, n=1)
        raise _unnamed(key, name, f"{module} has no {attribute}" + (f"; did you mean {close[0]}?" if close else ""))


def source_sum(name: str) -> str:
    """SHA-256 of the file that defines `module:function`; empty for another name, and without Python source.

    What the module imports is not part of it.
    """
    module, colon, _ = name.partition(":")
    try:
        source = _source_of(module) if colon else None
        return hashlib.sha256(source.read_bytes()).hexdigest() if source else ""
    except (ImportError, OSError, ValueError):
        return ""


def _unnamed(key: str, name: str, why: str) -> UserError:
    return UserError(
        f"{key} {name!r} cannot be loaded ({why}): name it as module:function, importable from the current directory"
    )


def _source_of(module: str) -> Path | None:
    """The file of a module, found as `load_function` finds it; None where it has no Python source."""
    first, *rest = module.split(".")
    spec = find_spec(first) or PathFinder.find_spec(first, [str(Path.cwd())])
    for part in rest:  # `find_spec` of a dotted name would import its packages
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ())) if spec else None
    if spec is None:
        raise ModuleNotFoundError(f"No module named {module!r}")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _names(tree: ast.Module) -> set[str] | None:
    """The names that a module's top level gives; None where they are not all written there."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return None if "__getattr__" in names else names


def describe_exception(error: BaseException, *own: str) -> str:
    """An exception's type, text and place; no place when one of the files `own`, or this one, raised it."""
    hidden = (*own, __file__, importlib.__file__)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in hidden and not frame.filename.startswith("<frozen")
    ]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS] + place
