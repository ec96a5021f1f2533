"""A micro-batch's loss never makes the host wait for the device, which would empty a GPU's queue of kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mugrpo_megatron.algorithm.segments import LossInputs, make_segments
from mugrpo_megatron.learner import loss as loss_path
from mugrpo_megatron.learner.loss import objective_loss
from mugrpo_megatron.learner.packing import pack, sequence_of
from tests.kernels.problems import OBJECTIVES
from tests.learner.tiny import VOCAB, advantages, recipe, samples

aten = torch.ops.aten
CPU = torch.device("cpu")


class Waits(TorchDispatchMode):
    """Collects the operations whose result, or whose size, the host would have to fetch from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.result: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counts = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        masks = func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        fetched = func in (aten._local_scalar_dense.default, aten.nonzero.default)
        # A Python list goes to the device from pageable memory, which the host waits for too; a number does not.
        listed = func is aten.lift_fresh.default and args[0].dim() > 0
        if counts or masks or fetched or listed:
            self.result.append(str(func))
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("wait", "operation"),
    [
        (lambda: bool(torch.ones(2).sum() > 1), "_local_scalar_dense"),
        (lambda: torch.ones(2)[[0, 1]], "lift_fresh"),
        (lambda: torch.repeat_interleave(torch.arange(2), torch.ones(2, dtype=torch.int64)), "repeat_interleave"),
        (lambda: torch.ones(2)[torch.ones(2) > 0], "index"),
    ],
    ids=["a number", "a list", "a count", "a mask"],
)
def test_a_wait_is_found(wait: Callable[[], Any], operation: str) -> None:
    with Waits() as waits:
        wait()
    assert operation in " ".join(waits.result)


@pytest.mark.parametrize("name", ["mu_grpo", "grpo", "gspo", "veto=response"])
def test_the_loss_waits_for_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, section = samples(), OBJECTIVES[name]
    sequences = [sequence_of(sample) for sample in data]
    batch = pack(sequences, [3, 1, 7], 160, CPU)
    lengths = torch.tensor([sequence.trained for sequence in sequences])
    behaviour = torch.from_numpy(np.concatenate([sample.engine_logprobs for sample in data]))
    segments = make_segments(lengths, torch.ones(24))
    inputs = LossInputs(section, behaviour, torch.from_numpy(advantages(len(data))), segments)
    monkeypatch.setattr(
        loss_path, "states_before_targets", lambda model, hidden, batch: hidden.index_select(0, batch.rows)
    )
    learner: Any = SimpleNamespace(
        recipe=recipe(Path("unused")),
        architecture=SimpleNamespace(vocab_size=VOCAB, experts=0),
        ranks=SimpleNamespace(tp_size=1, pp_size=1, cp_size=1, device=CPU),
        lanes=1,
        optimizer=SimpleNamespace(grad_scaler=None, is_stub_optimizer=False),
    )
    loss = objective_loss(learner, inputs, None)
    hidden = torch.randn(160, 8, requires_grad=True)
    weight = torch.randn(VOCAB, 8, requires_grad=True)
    weight.main_grad = torch.zeros(VOCAB, 8)  # type: ignore[attr-defined]  # Megatron's gradient buffer
    model: Any = SimpleNamespace(output_weight=lambda: weight, shares_weight=False)
    with Waits() as waits:
        value, _ = loss(model, hidden, batch)
        value.backward()
    assert waits.result == []
    assert hidden.grad is not None
    assert bool(weight.main_grad.any())  # type: ignore[attr-defined]
