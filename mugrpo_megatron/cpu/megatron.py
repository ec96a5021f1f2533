"""The learner on CPU: stand-ins for what megatron-core calls in `torch.cuda`, and lanes for small models.

With the stand-ins the same learner trains on CPU with gloo; they are used only where torch finds no CUDA device.
Megatron asks CUDA for four things that have an obvious meaning on CPU: the current device (the CPU), streams and
events (nothing runs asynchronously, so waiting is a no-op), `device="cuda"` in tensor factories (the CPU), and the
random state (the CPU's). Without Transformer Engine, Megatron's router lacks a name that it reads, on every device:
`complete_router` adds it. What Megatron decorates with `torch.compile` is compiled at its first call, not at its
import.

A lane is a thread that computes whole micro-batches, forward and backward, alone. A small model's update consists of
many operations of less than a millisecond. If the cores shared each operation, threads would have to be woken for each,
and on a busy machine every operation would wait for its slowest thread. A lane returns the gradients of its
micro-batch. They are added in the order of the micro-batches, so the sum does not depend on which lane was faster.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.utils._device import _device_constructors

from mugrpo_megatron.cpu.deferred import compiling_deferred

_CPU = torch.device("cpu")
_FACTORIES = ("empty", "empty_like", "ones", "tensor", "zeros")


class _Stream:
    """Takes the place of a CUDA stream on CPU, where nothing runs asynchronously."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        # On CPU everything runs in order, so an event has nothing to record, and this stream can be returned as one.
        return event or self

    def synchronize(self) -> None: ...


def install() -> None:
    """Put the stand-ins in place; does nothing where CUDA is available. Call before megatron is first imported."""
    if torch.cuda.is_available():
        return
    # At the first `with torch.device(...)` torch lists the functions whose device such a block sets. The list is made
    # now, before some of them are replaced.
    _device_constructors()
    stream = _Stream()
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream = _Stream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: stream  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, return-value, misc]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.type = _named_as_cuda(torch.Tensor.type)  # type: ignore[assignment, method-assign]
    with compiling_deferred():  # this is Megatron's first import, and it keeps the `torch.compile` that it finds
        _install_random_state()
    _keep_counts()


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a tensor factory so that it takes `device="cuda"` for the CPU."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if isinstance(device, str | torch.device) and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return make


def _named_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.type` so that Megatron's optimizers get a type's CUDA name, which they compare with."""

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        from_megatron = sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.")
        if from_megatron and not args and not kwargs:
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    return type_


def _install_random_state() -> None:
    """Let Megatron's tracker of CUDA random states read and set the state of the CPU's generator."""
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    from megatron.core.tensor_parallel import random as tracker

    tracker._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    tracker._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def complete_router() -> None:
    """Let experts run without Transformer Engine, on any device.

    `megatron.core.transformer.moe.moe_utils` has the name `te_general_gemm` only if its import of Transformer Engine
    succeeds, but the router's forward pass always compares it with None.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _keep_counts() -> None:
    """Let Megatron's dispatcher of tokens to experts convert token counts to numpy on CPU too.

    Megatron converts them when it copies them from a CUDA device. On CPU it copies nothing, and its all-to-all would
    get tensors instead of numbers.
    """
    from megatron.core.transformer.moe import token_dispatcher

    def as_counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = as_counts


MOST_LANES = 4
"""The largest number of lanes. Python runs in one thread at a time, so more lanes would wait for each other; two were
measured."""
LANES_FROM = 1024
"""The number of tokens of a rank's update from which on lanes share it. On two cores 900 to 5,000 tokens took 15 to
40 % less time in two lanes than as one micro-batch whose operations two threads share."""
MOST_PARAMETERS = 64 * 2**20
"""The largest number of parameters of a model that is trained in lanes. Larger ones keep the cores busy within each
operation, and each lane needs memory for gradients of its own."""

Batch = TypeVar("Batch")
Value = TypeVar("Value")


def run_lanes(
    chunk: torch.nn.Module,
    batches: Sequence[Batch],
    run: Callable[[Batch], tuple[torch.Tensor, Value]],
    threads: int,
    forward_only: bool,
) -> list[Value]:
    """Run every micro-batch in one of `threads` lanes, as Megatron's schedule without pipeline stages would.

    `run` returns the loss of a micro-batch and a second value; the second values are returned in order. Unless
    `forward_only`, the gradients are added to `chunk`'s buffers and reduced over data parallel ranks.
    """
    weights = [parameter for parameter in chunk.parameters() if parameter.requires_grad]

    def step(batch: Batch) -> tuple[Value, Sequence[torch.Tensor | None]]:
        with torch.set_grad_enabled(not forward_only):
            loss, value = run(batch)
            return value, [] if forward_only else torch.autograd.grad(loss, weights, allow_unused=True)

    values = []
    for value, gradients in _in_order(step, batches, threads):
        values.append(value)
        _accumulate(weights, gradients)
    if not forward_only:
        chunk.config.finalize_model_grads_func([chunk], None)  # type: ignore[union-attr, operator]  # Megatron's
    return values


def _in_order(step: Callable[[Batch], Value], batches: Sequence[Batch], threads: int) -> Iterator[Value]:
    """Yield the result of `step` for each micro-batch, in order, computed by `threads` threads.

    Each operation runs in the one thread of its micro-batch.
    """
    pool = ThreadPoolExecutor(threads, "lane", initializer=torch.set_num_threads, initargs=(1,))
    try:
        waiting: list[Future[Value]] = [pool.submit(step, batch) for batch in batches]
        while waiting:
            yield waiting.pop(0).result()
    finally:
        pool.shutdown(cancel_futures=True)


@torch.no_grad()
def _accumulate(weights: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add the gradients to Megatron's `main_grad` buffers, as its hooks do in a backward pass."""
    for weight, gradient in zip(weights, gradients, strict=False):
        if gradient is not None:
            weight.main_grad.add_(gradient)  # type: ignore[attr-defined]
