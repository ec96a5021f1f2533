"""Rope scalings and a recipe for the tiny models of every family (`tests.models`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from mugrpo_megatron.recipe import Recipe

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def recipe(hf_dir: Path, **parallel: Any) -> Recipe:
    """A float32 recipe on that checkpoint with the given layout."""
    return Recipe.model_validate(
        {"model": {"path": hf_dir, "dtype": "float32"}, "parallel": parallel, "learner": {"threads": 1}}
    )


def load(directory: Path) -> PreTrainedModel:
    """The checkpoint in transformers."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def assert_same_weights(expected: Path, result: Path) -> None:
    """Both directories hold one file with the same tensors, bit by bit."""
    ours, theirs = (load_file(directory / "model.safetensors") for directory in (expected, result))
    assert ours.keys() == theirs.keys(), result
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), f"{result}: {name}"
