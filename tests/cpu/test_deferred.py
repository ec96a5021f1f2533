"""`torch.compile` that waits for the first call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mugrpo_megatron.cpu.deferred import compiler_deferred, compiling_deferred


@pytest.fixture
def compiled() -> list[str]:
    """What has been compiled, by graph."""
    return []


@pytest.fixture
def backend(compiled: list[str]) -> Callable[..., Any]:
    def compile_graph(graph: Any, inputs: Any) -> Any:
        compiled.append(graph.code)
        return graph.forward

    return compile_graph


def test_a_function_is_compiled_at_its_first_call_and_once(compiled: list[str], backend: Callable[..., Any]) -> None:
    with compiling_deferred():

        @torch.compile(backend=backend)
        def double(x: torch.Tensor) -> torch.Tensor:
            """Twice x."""
            return x + x

    assert not compiled
    assert double.__name__ == "double"
    assert double.__doc__ == "Twice x."
    for _ in range(3):
        assert double(torch.ones(2)).tolist() == [2, 2]
    assert len(compiled) == 1


def test_a_method_and_a_function_without_options_are_decorated_alike() -> None:
    with compiling_deferred():

        class Scale:
            by = 3

            @torch.compile
            def scale(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.by

    assert Scale.scale.__qualname__.endswith("Scale.scale")
    assert list(vars(Scale)["scale"].__wrapped__.__code__.co_varnames) == ["self", "x"]


def test_a_deferred_function_is_compiled_with_its_caller(compiled: list[str], backend: Callable[..., Any]) -> None:
    with compiling_deferred():

        @torch.compile(backend=backend)
        def inner(x: torch.Tensor) -> torch.Tensor:
            return x + 1

    @torch.compile(backend=backend, fullgraph=True)
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    assert outer(torch.ones(2)).tolist() == [4, 4]
    assert len(compiled) == 1


def test_the_block_leaves_torch_as_it_was_and_compiles_models_at_once(backend: Callable[..., Any]) -> None:
    before = torch.compile
    with compiling_deferred():
        model = torch.compile(torch.nn.Linear(2, 2), backend=backend)
    assert torch.compile is before
    assert isinstance(model, torch.nn.Module)
    with pytest.raises(KeyError), compiling_deferred():
        raise KeyError
    assert torch.compile is before


IMPORTING = """
import sys
import torch
from mugrpo_megatron.cpu.deferred import compiler_deferred

with compiler_deferred():
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._dynamo.utils import is_compile_supported

    @torch.compiler.disable
    def double(x):
        return 2 * x

    @torch.compiler.disable(recursive=False)
    def triple(x):
        return 3 * x

    {inside}
assert {deferred} == ("torch._dynamo" not in sys.modules)
assert (double(2), triple(2)) == (4, 6)
with TransformGetItemToIndex():
    pass
assert is_compile_supported("cpu") in (True, False)
import torch._dynamo.utils
assert is_compile_supported("cpu") == torch._dynamo.utils.is_compile_supported("cpu")
assert torch._dynamo.__file__
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("inside", "deferred"),
    [("pass", True), ("torch._dynamo.config.verbose", False)],
    ids=["nothing uses it", "something does"],
)
def test_the_compiler_is_imported_when_something_uses_it(inside: str, deferred: bool) -> None:
    code = IMPORTING.format(inside=inside, deferred=deferred)
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_compiler_that_is_there_stays() -> None:
    import torch._dynamo

    with compiler_deferred():
        assert sys.modules["torch._dynamo"] is torch._dynamo
    assert sys.modules["torch._dynamo"] is torch._dynamo
