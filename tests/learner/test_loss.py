"""The inputs of an update's loss; the host never waits for the device in it, which would empty a GPU's queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.algorithm.segments import LossInputs, make_segments
from mugrpo_megatron.learner import loss as loss_path
from mugrpo_megatron.learner.loss import make_loss_inputs, objective_loss
from mugrpo_megatron.learner.packing import pack, sequence_of
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.samples import Sample
from tests.kernels.problems import OBJECTIVES
from tests.learner.tiny import VOCAB, advantages, recipe, samples


def loss_and_gradients(
    section: ObjectiveSection, data: Sequence[Sample], advantages: np.ndarray
) -> tuple[float, list[list[float]]]:
    """The loss, and the gradient of each response's log-probabilities."""
    inputs = make_loss_inputs(section, 24, data, advantages, torch.device("cpu"))
    logprobs = torch.cat([torch.from_numpy(s.engine_logprobs + 0.1 * (s.response_ids % 5 - 2)) for s in data])
    logprobs.requires_grad_()
    loss, _ = policy_loss(logprobs, inputs, entropy=logprobs.detach().abs())
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), [row.tolist() for row in logprobs.grad.split([len(s.response_ids) for s in data])]


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("zero_variance", ["count", "mask"])
def test_a_masked_response_that_was_cut_is_in_the_baseline_and_nowhere_else(reduction: str, zero_variance: str) -> None:
    """Loss and gradients equal an update's that never had it, with the advantages of the groups that did."""
    section = ObjectiveSection(
        reduction=reduction, zero_variance=zero_variance, kl_ref="start", kl_coef=0.1, entropy_coef=0.01
    )
    data = [replace(s, ref_logprobs=s.engine_logprobs - np.float32(0.2)) for s in samples()]
    cut = [index % 3 == 1 for index in range(len(data))]
    data = [replace(s, finish_reason="length" if c else "stop") for s, c in zip(data, cut, strict=True)]
    # Rewards differ in every group but the first, also among its responses that were not cut.
    data = [replace(s, reward=float(s.group > 0 and index % 2)) for index, s in enumerate(data)]
    advantages = group_advantages(np.array([s.reward for s in data]), np.array([s.group for s in data]), section)
    loss, gradients = loss_and_gradients(section.model_copy(update={"truncated": "mask"}), data, advantages)
    left = [index for index, is_cut in enumerate(cut) if not is_cut]
    expected, others = loss_and_gradients(section, [data[index] for index in left], advantages[left])
    assert loss == pytest.approx(expected, rel=1e-6)
    for index, row in enumerate(gradients):
        assert row == pytest.approx([0.0] * len(row) if cut[index] else others[left.index(index)], rel=1e-6)
    counted, _ = loss_and_gradients(section, data, advantages)
    assert counted != pytest.approx(expected, rel=1e-3)


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
