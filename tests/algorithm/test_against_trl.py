"""grpo, dapo, dr_grpo, gspo, cispo, sapo and vespo against TRL's own code, where it is installed."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.recipe import ObjectiveSection
from tests.algorithm.batches import LONGEST, Batch, random_batch

# name -> (TRL's loss_type, importance_sampling_level, epsilon_low, epsilon_high, off_policy_mask_threshold, delta)
CASES: dict[str, tuple[str, str, float, float, float | None, float | None]] = {
    "grpo": ("grpo", "token", 0.2, 0.2, None, None),
    "dapo": ("dapo", "token", 0.2, 0.28, None, None),
    "dr_grpo": ("dr_grpo", "token", 0.2, 0.2, None, None),
    "gspo": ("grpo", "sequence", 3e-4, 4e-4, None, None),
    "cispo": ("cispo", "token", 0.2, 5.0, None, None),
    "mu_grpo_without_veto": ("dapo", "token", 1.0, 4.0, None, None),
    "dual_clip": ("grpo", "token", 0.2, 0.2, None, 2.0),
    "sapo": ("sapo", "token", 0.2, 0.2, None, None),
    "vespo": ("vespo", "token", 0.2, 0.2, None, None),
}
FIELDS: dict[str, dict[str, Any]] = {
    "mu_grpo_without_veto": {"name": "mu_grpo", "veto": "none"},
    "dual_clip": {"name": "grpo", "dual_clip": 2.0},
}


def padded(values: Tensor, lengths: Tensor) -> Tensor:
    """[T] of responses one after another -> [B, LONGEST]; differentiable."""
    rows = [torch.nn.functional.pad(row, (0, LONGEST - len(row))) for row in values.split(lengths.tolist())]
    return torch.stack(rows)


def trl_loss(name: str, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """What `GRPOTrainer._compute_loss` returns, called without a model: the log-probabilities are given."""
    from trl import GRPOTrainer

    loss_type, level, low, high, threshold, delta = CASES[name]
    trainer = SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=low,
        epsilon_high=high,
        off_policy_mask_threshold=threshold,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        beta=0.0,
        max_completion_length=LONGEST,
        top_entropy_quantile=1.0,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(
            delta=delta,
            steps_per_generation=1,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": behaviour,
        "num_items_in_batch": mask.sum(),
    }
    compute_loss = GRPOTrainer._compute_loss
    return compute_loss(trainer, SimpleNamespace(training=True), inputs)


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("seed", range(2))
def test_equals_published_loss(seed: int, name: str) -> None:
    pytest.importorskip("trl")
    batch: Batch = random_batch(seed, [7, 1, LONGEST, 3, 12], spread=0.5 if name != "gspo" else 1e-3)
    config = ObjectiveSection(**FIELDS.get(name, {"name": name}))
    logprobs, inputs = batch.leaf(), batch.inputs(config)
    ours, _ = policy_loss(logprobs, inputs)
    logps, old_logps, mask = (
        padded(column, batch.lengths) for column in (logprobs, inputs.behaviour, torch.ones_like(inputs.behaviour))
    )
    theirs = trl_loss(name, logps, old_logps, inputs.advantages, mask)
    # TRL rounds SAPO's temperatures to float32.
    tolerance = 1e-6 if name == "sapo" else 1e-12
    assert ours.item() == pytest.approx(theirs.item(), rel=tolerance)
    torch.testing.assert_close(
        torch.autograd.grad(ours, logprobs)[0], torch.autograd.grad(theirs, logprobs)[0], rtol=tolerance, atol=1e-15
    )
