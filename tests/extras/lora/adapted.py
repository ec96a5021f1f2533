"""A tiny model with adapters: in the learner, and in transformers with PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.update import token_logprobs, update
from tests.learner.tiny import advantages, left_behind, recipe, samples

LORA = {"rank": 4, "alpha": 8.0}


def trained(learner: Learner) -> dict[str, torch.Tensor]:
    """The gathered factors by PEFT's names; collective."""
    from mugrpo_megatron.extras.lora.adapters import gather

    return gather(learner.models)


def updates(model: str, sections: dict[str, Any]) -> tuple[list[dict[str, float]], np.ndarray, dict[str, np.ndarray]]:
    """Three updates: their metrics, the log-probabilities after them, and the adapter."""
    sections = {**sections, "lora": {**LORA, **sections.get("lora", {})}}
    learner = build_learner(recipe(Path(model), **sections))
    data = left_behind(samples())
    metrics = [update(learner, data, advantages(len(data))) for _ in range(3)]
    logprobs = np.concatenate(token_logprobs(learner, data))
    return metrics, logprobs, {name: tensor.numpy() for name, tensor in trained(learner).items()}
