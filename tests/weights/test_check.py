"""Whether an engine holds the learner's weights: engines of several kinds, some of them wrong in one tensor."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mugrpo_megatron.errors import EngineFailure, TrainingFailure
from mugrpo_megatron.files.tensors import TensorChecksums
from mugrpo_megatron.weights.check import (
    WeightMismatch,
    compare_weights,
    engine_name,
    engine_shards,
    uncheckable_reason,
)
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.sync import build_weight_sync
from mugrpo_megatron.weights.table import entries
from tests import models
from tests.ranks import run_ranks
from tests.weights.ranks_work import build, enter

pytestmark = pytest.mark.process

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
FUSED["up_proj"] = "gate_up_proj"
ORDER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


class FakeEngine:
    """Tensor parallel ranks that hold a checkpoint as SGLang would; nothing here is shared with the code under test."""

    def __init__(self, hf: Path, dtype: torch.dtype, ranks: int = 1) -> None:
        self.parts = [self._rank(load_file(hf / "model.safetensors"), dtype, rank, ranks) for rank in range(ranks)]

    @staticmethod
    def _rank(tensors: dict[str, torch.Tensor], dtype: torch.dtype, rank: int, ranks: int) -> dict[str, torch.Tensor]:
        result: dict[str, torch.Tensor] = {}
        for name in sorted(
            tensors, key=lambda n: next((i for i, tensors_of_rank in enumerate(ORDER) if tensors_of_rank in n), 9)
        ):
            tensor, parts = tensors[name].to(dtype), name.split(".")
            if "norm" not in name:
                tensor = tensor.chunk(ranks, dim=1 if parts[-2] in ("o_proj", "down_proj") else 0)[rank]
            parts[-2] = FUSED.get(parts[-2], parts[-2])
            fused = ".".join(parts)
            result[fused] = torch.cat([result[fused], tensor]) if fused in result else tensor
        return result

    def checksums(self) -> list[TensorChecksums]:
        return [
            {
                name: (
                    str(t.dtype).split(".")[1],
                    hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
                )
                for name, t in tensors_of_rank.items()
            }
            for tensors_of_rank in self.parts
        ]


class DeadEngine:
    def checksums(self) -> list[TensorChecksums]:
        raise EngineFailure("it died")


def told(weight_sync: Any, engine: Any) -> int | str:
    try:
        return compare_weights(weight_sync, engine)
    except (WeightMismatch, EngineFailure) as error:
        return f"{type(error).__name__}: {error}"


def engines_of_two_ranks(hf: Path) -> dict[str, int | str]:
    """Two data parallel ranks with an engine each; what each case says on this rank."""
    chunks, architecture = build(hf, {}, enter({}))
    weight_sync = build_weight_sync(chunks, architecture, 16 * 1024)
    rank = dist.get_rank()
    good, half = FakeEngine(hf, torch.float32), FakeEngine(hf, torch.bfloat16)
    wrong, lacking, strange = (FakeEngine(hf, torch.float32) for _ in range(3))
    wrong.parts[0]["model.layers.1.self_attn.qkv_proj.weight"][-1, -1] += 1e-3
    del lacking.parts[0]["model.layers.0.mlp.down_proj.weight"]
    strange.parts[0]["model.layers.0.self_attn.attn.k_scale"] = torch.ones(1)
    alone = None if rank else good
    return {
        "equal": told(weight_sync, good),
        "in bfloat16": told(weight_sync, half),
        "one engine": told(weight_sync, alone),
        "wrong": told(weight_sync, wrong if rank else good),
        "lacking": told(weight_sync, good if rank else lacking),
        "strange": told(weight_sync, strange),
        "dead": told(weight_sync, DeadEngine() if rank else good),
        "after": told(weight_sync, good),
    }


def engine_of_two_ranks(hf: Path) -> list[int | str]:
    """An engine of two tensor parallel ranks on a learner of two others."""
    layout = {"tensor": 2}
    chunks, architecture = build(hf, layout, enter(layout))
    weight_sync = build_weight_sync(chunks, architecture, 16 * 1024, engine_tensor=2)
    good, wrong = (FakeEngine(hf, torch.float32, 2) for _ in range(2))
    wrong.parts[1]["model.layers.0.mlp.gate_up_proj.weight"][0, 0] += 1e-3
    leads = dist.get_rank() == 0
    return [told(weight_sync, good if leads else None), told(weight_sync, wrong if leads else None)]


def engine_with_padded_heads(hf: Path) -> tuple[int | str, str]:
    chunks, architecture = build(hf, {}, enter({}))
    weight_sync = build_weight_sync(chunks, architecture, 16 * 1024, engine_tensor=3)
    return told(weight_sync, DeadEngine()), uncheckable_reason(weight_sync)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "hf"
    models.save_model(directory, "qwen2", tie_word_embeddings=True)
    return directory


def test_what_differs_ends_every_rank_with_the_tensor_s_name(hf: Path) -> None:
    first, second = run_ranks(2, engines_of_two_ranks, hf)
    tensors = len(FakeEngine(hf, torch.float32).parts[0])
    assert first["equal"] == second["equal"] == tensors
    assert first["in bfloat16"] == second["in bfloat16"] == tensors
    assert (first["one engine"], second["one engine"]) == (tensors, 0)
    for case, clause in (
        ("wrong", r"rank 1 leads .* differs in model.layers.1.self_attn.qkv_proj.weight \(1 of"),
        ("lacking", r"rank 0 leads .* lacks model.layers.0.mlp.down_proj.weight \(1 of"),
        ("strange", r"rank 0 leads .* was never sent model.layers.0.self_attn.attn.k_scale \(1 of"),
    ):
        assert first[case] == second[case]
        assert re.search(rf"^WeightMismatch: the engine that {clause}.*engine.check_weights", str(first[case]))
    assert (first["dead"], second["dead"]) == (tensors, "EngineFailure: it died")
    assert first["after"] == second["after"] == tensors  # the ranks are still in step
    assert issubclass(WeightMismatch, TrainingFailure)  # one sentence and exit code 1


def test_an_engine_of_several_ranks_is_compared_rank_by_rank(hf: Path) -> None:
    (equal, differs), (_, elsewhere) = run_ranks(2, engine_of_two_ranks, hf)
    assert isinstance(equal, int)
    assert equal > 0
    assert "differs in model.layers.0.mlp.gate_up_proj.weight on its tensor parallel rank 1" in str(differs)
    assert elsewhere == differs


def test_a_layout_that_cannot_be_compared_says_so(hf: Path) -> None:
    ((compared, reason),) = run_ranks(1, engine_with_padded_heads, hf)
    assert compared == 0
    assert "engine.tensor = 3" in reason


def test_gated_delta_networks_have_the_engine_s_names_and_a_shard_of_each_section(tmp_path: Path) -> None:
    """SGLang fuses the projections in pairs (srt/models/qwen3_5.py); a rank has its heads' queries, keys and values."""
    models.save_model(tmp_path, "qwen3_5_text")
    model = read_architecture(tmp_path)
    table = entries(model)
    entry = table["decoder.layers.0.self_attention.in_proj.weight"]
    assert [engine_name(name, model).split("linear_attn.")[1] for name in entry.hf] == [
        *2 * ["in_proj_qkvz.weight"],
        *2 * ["in_proj_ba.weight"],
    ]
    attention = table["decoder.layers.3.self_attention.linear_qkv.weight"]
    assert {engine_name(name, model) for name in attention.hf} == {"model.layers.3.qkv_proj.weight"}
    qkv = torch.arange(4 * 8 + 4 * 8 + 8 * 12).unsqueeze(1)
    first, second = engine_shards(entry, entry.hf[0], qkv, 2, model)
    assert first.flatten().tolist() == [*range(16), *range(32, 48), *range(64, 112)]
    assert second.flatten().tolist() == [*range(16, 32), *range(48, 64), *range(112, 160)]
