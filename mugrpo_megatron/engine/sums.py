"""Checksums of an engine's weights, taken in the engine's processes, which hold the weights.

SGLang's own checksums need CUDA, and its `save_sharded_model` writes the whole model to a disk. Here a "loader of
weights" (`custom_weight_loader`) loads nothing and writes the sums to the scratch folder that the host shares with the
engine's processes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from mugrpo_megatron.files.tensors import Sums, sums


def write_sums(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang calls this in each tensor parallel rank; `tensors` is empty. The first rank writes all ranks' sums.

    The others may be on nodes whose files the host does not see. Left out is what SGLang's own checks leave out: the
    scales of the KV cache in a quantised model, which are parameters there and no weights.
    """
    from sglang.srt.distributed import get_tp_group  # here, as launch.py needs no SGLang

    weights = ((name, one) for name, one in model.named_parameters() if not getattr(one, "_skip_weight_check", False))
    group, own = get_tp_group(), sums(weights)
    found = group.all_gather_object(own) if group.world_size > 1 else [own]
    if group.rank_in_group == 0:
        _file().write_text(json.dumps(found), encoding="utf-8")


def read_sums() -> list[Sums]:
    """Read what was written of each rank of this host's engine."""
    found = json.loads(_file().read_text(encoding="utf-8"))
    return [{name: (dtype, sha256) for name, (dtype, sha256) in of_rank.items()} for of_rank in found]


def _file() -> Path:
    return Path(os.environ["TMPDIR"]) / "weight-sums.json"  # `tempfile` names /tmp where that disk is full
