"""The FLOP of a model against torch's own count of its matrix products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mugrpo_megatron.weights.families import model_flops, read_architecture, token_flops
from tests.models import save_model


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen2", {}), ("llama", {}), ("deepseek_v3", {}), ("deepseek_v3", {"q_lora_rank": None})]
)
def test_forward_flop_are_those_that_torch_counts(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = save_model(tmp_path, family, **changes)
    architecture = read_architecture(tmp_path)
    tokens = 24
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens)[None])
    work = token_flops(architecture, tokens)
    chosen = architecture.transformer.get("moe_router_topk", 0)
    routed = (architecture.layers - architecture.dense_layers) * chosen * architecture.letters["M"]
    layers = work.layers - 2 * 3 * architecture.letters["H"] * routed  # torch does not count the experts' products
    # Eager attention computes the full square, and torch counts it; causal attention needs half.
    assert counter.get_total_flops() == pytest.approx(tokens * (layers + 2 * work.attention + work.head), rel=0.01)


def test_flop_of_gated_delta_networks_are_those_that_torch_counts(tmp_path: Path) -> None:
    """Except for the rule itself, which transformers computes in chunks; it is held to the products of the recurrence:
    a key reads the state, the state gets key times value, a query reads it."""

    def without_rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> Any:
        return torch.zeros_like(value), None

    model, tokens = save_model(tmp_path, "qwen3_5_text"), 24
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):
            module.chunk_gated_delta_rule = without_rule  # type: ignore[assignment]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens)[None], use_cache=False)
    architecture = read_architecture(tmp_path)
    work, (linear, heads, key, value) = token_flops(architecture, tokens), (3, 8, 8, 12)
    layers = work.layers - 2 * linear * heads * 3 * key * value
    assert counter.get_total_flops() == pytest.approx(tokens * (layers + 2 * work.attention + work.head), rel=0.01)


def test_a_token_of_a_mixture_pays_for_its_experts_and_the_router(tmp_path: Path) -> None:
    """torch does not count the grouped products of experts, so they are held to the dense model of the same width."""
    save_model(tmp_path / "moe", "qwen3_moe", num_experts_per_tok=3, moe_intermediate_size=40)
    save_model(tmp_path / "dense", "qwen3", head_dim=8, intermediate_size=120)
    moe, dense = (read_architecture(tmp_path / name) for name in ("moe", "dense"))
    router = 2 * moe.layers * moe.letters["H"] * moe.experts
    assert token_flops(moe, 9.0).layers == token_flops(dense, 9.0).layers + router


def test_an_update_counts_every_sequence_and_only_trained_logits(tmp_path: Path) -> None:
    save_model(tmp_path)
    architecture = read_architecture(tmp_path)
    lengths, trained = [5, 17, 9], 12
    parts = [token_flops(architecture, length) for length in lengths]
    forward = sum(length * (flops.layers + flops.attention) for length, flops in zip(lengths, parts, strict=True))
    assert model_flops(architecture, lengths, trained) == pytest.approx(3 * (forward + trained * parts[0].head))
