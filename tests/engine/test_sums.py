"""What an engine reports of its weights, with SGLang's part replaced."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mugrpo_megatron.engine.engine_group import read_sums, write_sums
from mugrpo_megatron.files.tensors import sums


def test_scales_that_sglang_does_not_check_are_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed", SimpleNamespace(get_tp_group=lambda: alone))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    model = torch.nn.Linear(3, 2)
    wanted = sums(model.named_parameters())
    scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)
    model.k_scale = scale
    write_sums(model, [])
    assert read_sums()[0].keys() == {*wanted, "k_scale"}
    scale._skip_weight_check = True  # type: ignore[attr-defined]
    write_sums(model, [])
    assert read_sums() == [wanted]
