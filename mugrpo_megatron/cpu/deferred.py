"""`torch.compile` that waits for a function's first call.

Decorating a function imports torch's compiler, Inductor: two seconds of a core. Megatron-core and SGLang decorate
dozens of functions when they are imported, of which a run on CPU calls few or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch


@contextmanager
def compiling_deferred() -> Iterator[None]:
    """Functions that are decorated with `torch.compile` inside the block are compiled when they are first called."""
    compile_now = torch.compile

    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda decorated: compile_later(decorated, **options)
        if isinstance(model, torch.nn.Module):
            return compile_now(model, **options)
        return _deferred(model, lambda: compile_now(model, **options))

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


def _deferred(function: Callable[..., Any], make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    made: Callable[..., Any] | None = None

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal made
        if torch.compiler.is_compiling():  # the caller is being compiled, and this function with it
            return function(*arguments, **named)
        if made is None:
            made = make()
        return made(*arguments, **named)

    return call
