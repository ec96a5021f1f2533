"""Loads and calls functions named `module:function`: rewards, advantages, surrogates, diagnostics and episodes of
users."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from mugrpo_megatron import call_guard
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import as_text
from mugrpo_megatron.recipe.scoring import GYM_REWARD

T = TypeVar("T")
MAX_MESSAGE_CHARS = 300
PACKAGE = __name__.partition(".")[0]
CALL_S = 120.0
"""Most seconds that a call of a user's function may take; the first call may compile."""
IMPORT_S = 600.0


class ForeignFailure(Exception):
    """Raised when a user's code has failed; the message has its exception and line."""


def call_foreign(function: Callable[..., T], *arguments: Any, hidden: Sequence[str] = (), seconds: float = CALL_S) -> T:
    """Call a user's function in this process, guarded by `call_guard`, and return its result.

    Raises ForeignFailure when the function raises, exits (`os._exit` too) or takes longer than `seconds`. The message
    names the line of the user's code that failed; lines in the files `hidden` are not the user's.
    """
    try:
        with (
            call_guard.clock(seconds),
            call_guard.end_of_process(seconds + call_guard.DEAF_S),
            call_guard.without_exits(),
        ):
            return function(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ForeignFailure(describe_exception(error, *hidden)) from None


def load_function(key: str, name: str) -> Callable[..., Any]:
    """Import `module:function`, from an installed package or from a file in the current directory.

    Raises UserError if it cannot be imported or is not callable; `key` is the recipe's key that names the function.
    """
    module, _, attribute = name.partition(":")
    try:
        here = str(Path.cwd())
        if here not in sys.path and find_spec(module.partition(".")[0]) is None:
            sys.path.append(here)  # last, so that no file in the current directory hides a library's module
        if module.partition(".")[0] == PACKAGE:
            return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
        with call_guard.clock(IMPORT_S), call_guard.without_exits():
            function = getattr(import_module(module), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may fail in any way when it is imported
        raise _load_error(key, name, describe_exception(error)) from error
    if not callable(function):
        raise UserError(
            f"{key} {name!r} cannot be loaded: it is {str(function)[:MAX_MESSAGE_CHARS]}, not a function; "
            "name a function"
        )
    return function


def arguments_of(key: str, function: Callable[..., Any], known: Sequence[str]) -> tuple[str, ...]:
    """Returns the names among `known` by which a user's function is called: those of its parameters, or all of `known`
    if it has `**kwargs`.

    Raises UserError if the signature cannot be read, if a parameter without a default is not in `known` or can only be
    passed by position, and if the function takes none of `known`. `key`, the recipe's key, begins the message.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f"{key} has no signature that can be read ({error}): write it as a def") from None
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    taken = tuple(known) if takes_all else tuple(name for name in known if name in parameters)
    other = [
        name
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and (name not in known or parameter.kind is parameter.POSITIONAL_ONLY)
        and parameter.default is parameter.empty
    ]
    if other or not taken:
        raise UserError(
            f"{key} takes ({', '.join(parameters)}): arguments go by name, so take one or more of "
            f"{', '.join(known)}, none before a /, and give every other parameter a default"
        )
    return taken


def check_function(key: str, name: str) -> None:
    """Raise UserError when `module:function` does not exist, or its source is not valid Python. The source is not run.

    A module passes if it has no Python source, or if the source does not show all its names (`import *`,
    `__getattr__`).
    """
    module, _, attribute = name.partition(":")
    try:
        source = _source_of(module) if attribute else None
        tree = ast.parse(source.read_bytes()) if source else None
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        raise _load_error(key, name, f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]) from None
    if not attribute:
        raise _load_error(key, name, "it has no `:function`")
    if tree and (names := _names(tree)) is not None and attribute not in names:
        close = difflib.get_close_matches(attribute, names, n=1)
        raise _load_error(key, name, f"{module} has no {attribute}" + (f"; did you mean {close[0]}?" if close else ""))


def source_sum(name: str) -> str:
    """Returns the SHA-256 of the file that defines `module:function`; "" if there is no such file.

    Files that the module imports are not included. A built-in function has "" too, since it is not the user's.
    """
    if name == GYM_REWARD:  # no file is looked up, since `reasoning_gym` is also the name of an installed package
        return ""
    module, colon, _ = name.partition(":")
    try:
        source = _source_of(module) if colon else None
        return hashlib.sha256(source.read_bytes()).hexdigest() if source else ""
    except (ImportError, OSError, ValueError):
        return ""


def _load_error(key: str, name: str, why: str) -> UserError:
    return UserError(
        f"{key} {name!r} cannot be loaded ({why}): name a module:function that imports without an error, from an "
        "installed package or a file in the current directory"
    )


def _source_of(module: str) -> Path | None:
    """Returns the source file of a module without importing the module; None if it is not written in Python.

    It is searched where `load_function` searches. Raises ModuleNotFoundError if there is no such module.
    """
    first, *rest = module.split(".")
    spec = find_spec(first) or PathFinder.find_spec(first, [str(Path.cwd())])
    for name in rest:  # `find_spec` of a dotted name would import its packages
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations or ())) if spec else None
    if spec is None:
        raise ModuleNotFoundError(f"No module named {module!r}")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _names(tree: ast.Module) -> set[str] | None:
    """Returns the names that a module defines; None if the source does not show all (`import *`, `__getattr__`)."""
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


def describe_exception(error: BaseException, *own_files: str) -> str:
    """Returns an exception's type and text, and the place in the user's code that raised it: `(reward.py:12)`.

    The place is the innermost frame outside `own_files`, this file, `call_guard` and Python's import system.
    """
    hidden = (*own_files, __file__, call_guard.__file__, importlib.__file__)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in hidden and not frame.filename.startswith("<frozen")
    ]
    line = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return exception_text(error) + line


def exception_text(error: BaseException) -> str:
    """Returns an exception's type and text, in at most MAX_MESSAGE_CHARS characters that UTF-8 can encode."""
    try:
        text = str(error)  # `__str__` may be the user's code, which may raise too
    except Exception as failure:
        text = f"its text cannot be read ({type(failure).__name__})"
    return as_text(f"{type(error).__name__}: {text}"[:MAX_MESSAGE_CHARS])
