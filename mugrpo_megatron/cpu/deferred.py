"""Defers the import of torch's compiler until a function that is to be compiled is called.

Decorating a function with `torch.compile` imports Inductor, which takes two CPU seconds, and the first use of Dynamo
takes another. Megatron-core, SGLang, transformers and torchvision do both when they are imported, for functions of
which a run on CPU calls few or none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch


@contextmanager
def compiling_deferred() -> Iterator[None]:
    """Let functions that the block decorates with `torch.compile` be compiled at their first call, not at once."""
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


@contextmanager
def compiler_deferred() -> Iterator[None]:
    """In a block that only imports modules, defer torch's compiler and its import.

    Compiling is deferred as by `compiling_deferred`. Unless torch._dynamo is imported already, placeholders take the
    place of it and of two of its modules. One thing is lost: a function that is decorated with `torch._dynamo.disable`
    in the block is compiled with its caller.
    """
    if "torch._dynamo" not in sys.modules:
        sys.modules.update(_placeholders())
    try:
        with compiling_deferred():
            yield
    finally:
        _remove_placeholders()


class _Placeholder(ModuleType):
    """Takes the place of a module of torch's compiler, with a few of its names; any other name imports the module."""

    def __init__(self, module: str, **names: Any) -> None:
        super().__init__(module)
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        # The import system asks a module for names such as `__path__`, and expects an AttributeError for a missing one.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


def _placeholders() -> dict[str, ModuleType]:
    """The placeholders, by module name; they have the names that transformers and torchvision use at their import."""
    unchanged = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _unchanged)
    utils, indexing = "torch._dynamo.utils", "torch._dynamo._trace_wrapped_higher_order_op"
    modules = [
        _Placeholder("torch._dynamo", **unchanged),
        _Placeholder(utils, is_compile_supported=lambda device: _real(utils).is_compile_supported(device)),
        _Placeholder(indexing, TransformGetItemToIndex=lambda: _real(indexing).TransformGetItemToIndex()),
    ]
    return {module.__name__: module for module in modules}


def _unchanged(function: Any = None, *arguments: Any, **options: Any) -> Any:
    """A decorator, used with options or without, that returns the function unchanged."""
    return _unchanged if function is None else function


def _real(name: str) -> Any:
    _remove_placeholders()
    return import_module(name)


def _remove_placeholders() -> None:
    for name, module in list(sys.modules.items()):
        if isinstance(module, _Placeholder):
            del sys.modules[name]
