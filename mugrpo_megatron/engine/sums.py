"""Checksums of an engine's weights, taken in the engine's processes, which hold the weights.

SGLang's own checksums need CUDA, and its `save_sharded_model` writes the whole model to a disk. Here a "loader of
weights" (`custom_weight_loader`) loads nothing and writes the sums to the scratch folder that the host shares with the
engine's processes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from mugrpo_megatron.files.tensors import Sums, sums


def write_sums(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang calls this in each tensor parallel rank; `tensors` is empty."""
    from sglang.srt.distributed import get_tensor_model_parallel_rank  # here, as launch.py needs no SGLang

    path = _file(get_tensor_model_parallel_rank())
    path.write_text(json.dumps(sums(model.named_parameters())), encoding="utf-8")


def read_sums(ranks: int) -> list[Sums]:
    """Read what the ranks of this host's engine wrote."""
    found = [json.loads(_file(rank).read_text(encoding="utf-8")) for rank in range(ranks)]
    return [{name: (dtype, sha256) for name, (dtype, sha256) in of_rank.items()} for of_rank in found]


def _file(rank: int) -> Path:
    return Path(tempfile.gettempdir()) / f"weight-sums-{rank}.json"
