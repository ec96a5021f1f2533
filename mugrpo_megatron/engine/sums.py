"""Checksums of an engine's weights, taken inside its own processes, where the weights are.

SGLang's own checksums need CUDA, and its `save_sharded_model` writes the whole model to a disk. Here a "loader of
weights" (`custom_weight_loader`) loads nothing and leaves the sums in the scratch folder that the host shares with the
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
    from sglang.srt.distributed import get_tensor_model_parallel_rank  # whoever names this function has no SGLang

    path = _file(get_tensor_model_parallel_rank())
    path.write_text(json.dumps(sums(model.named_parameters())), encoding="utf-8")


def read_sums(ranks: int) -> list[Sums]:
    """What the ranks of this host's engine left."""
    found = [json.loads(_file(rank).read_text(encoding="utf-8")) for rank in range(ranks)]
    return [{name: (dtype, sha256) for name, (dtype, sha256) in of_rank.items()} for of_rank in found]


def _file(rank: int) -> Path:
    return Path(tempfile.gettempdir()) / f"weight-sums-{rank}.json"
