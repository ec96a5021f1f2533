"""A small Qwen3 whose shapes the CUDA kernels take, a recipe for it, and the device that the tests run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from run_scripts.dev.bench.ten_learner import attention
from tests import models

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = "bfloat16" if CUDA else "float32"
"""An engine on a CPU is exact in float32 only."""


def save_model(directory: Path) -> Path:
    """Two layers with heads of 64, random weights, the bundled tokenizer."""
    tokenizer = build_arithmetic_tokenizer()
    models.save_model(
        directory,
        "qwen3",
        scale=1.0,
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        head_dim=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(directory)
    return directory


def sections(**more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of a recipe that runs the model on this device, merged with `more`."""
    table: dict[str, dict[str, Any]] = {
        "model": {"dtype": DTYPE},
        "data": {"max_prompt_tokens": 32},
        "rollout": {"max_response_tokens": 16},
        "engine": {"memory_fraction": 0.3, "max_running_requests": 32, "extra": attention()},
    }
    return {name: {**table.get(name, {}), **more.get(name, {})} for name in {*table, *more}}
