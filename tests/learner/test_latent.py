"""Latent attention and sigmoid routers: gradients, replay, and the bias of the routers, which stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mugrpo_megatron.learner.attention import make_packing
from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.learner.update import token_logprobs, update
from mugrpo_megatron.weights.table import local_parameters, merge_from_hf
from tests import models
from tests.learner.test_routing import replay
from tests.learner.tiny import VOCAB, advantages, recipe, samples
from tests.ranks import run_ranks
from tests.weights import tiny

pytestmark = pytest.mark.process

REPLAY = {"learner": {"routing_replay": "learner"}}
LENGTHS = np.array([14, 9, 1])


def gradients(learner: Learner, model: str, lengths: np.ndarray = LENGTHS) -> dict[str, float]:
    """Largest difference of each parameter's gradient from transformers', as a share of its largest value.

    The learner packs the sequences into one row; the loss is a random sum of log-probabilities.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (int(lengths.sum()),), generator=generator)
    slopes = torch.randn(len(ids), VOCAB, generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    (wrapped,) = learner.chunks
    chunk, packing = policy(wrapped), make_packing(lengths, torch.device("cpu"))
    wrapped.zero_grad_buffer()
    hidden = chunk(ids[None], positions[None], attention_mask=None, packed_seq_params=packing).squeeze(1)
    ((hidden @ chunk.output_weight().T).log_softmax(-1) * slopes).sum().backward()

    proximal = tiny.load(Path(model))
    for sequence, slope in zip(ids.split(lengths.tolist()), slopes.split(lengths.tolist()), strict=True):
        (proximal(sequence[None]).logits[0].log_softmax(-1) * slope).sum().backward()
    theirs = {name: parameter.grad for name, parameter in proximal.named_parameters()}
    apart = {}
    for entry, parameter in local_parameters([chunk], learner.architecture):
        if not entry.row.frozen:
            expected = merge_from_hf(entry, [of_expert(theirs, name) for name in entry.hf], learner.architecture)
            gradient = parameter.main_grad  # type: ignore[attr-defined]  # Megatron's
            apart[entry.megatron] = float((gradient - expected).abs().max() / expected.abs().max())
    return apart


def of_expert(tensors: dict[str, Any], name: str) -> torch.Tensor:
    """A tensor by its name in a checkpoint; transformers computes with the experts of a layer in two tensors."""
    if ".mlp.experts." not in name:
        return tensors[name]
    layer, suffix = name.split(".experts.")
    number, kind, _ = suffix.split(".")
    if kind == "down_proj":
        return tensors[f"{layer}.experts.down_proj"][int(number)]
    return tensors[f"{layer}.experts.gate_up_proj"][int(number)].chunk(2)[kind == "up_proj"]


def biases(learner: Learner) -> dict[str, torch.Tensor]:
    named = local_parameters([policy(chunk) for chunk in learner.chunks], learner.architecture)
    return {entry.megatron: tensor.detach().clone() for entry, tensor in named if entry.row.frozen}


def whole(model: str) -> dict[str, Any]:
    learner = build_learner(recipe(Path(model)))
    before, apart, data = biases(learner), gradients(learner, model), samples()
    logprobs = token_logprobs(learner, data)
    for _ in range(2):
        update(learner, data, advantages(len(data)))
    after = biases(learner)
    return {
        "gradients": apart,
        "moved": max(float(np.abs(a - b).max()) for a, b in zip(logprobs, token_logprobs(learner, data), strict=True)),
        "biases": [float(bias.abs().max()) for bias in before.values()],
        "frozen": before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before),
        "replayed": replay(build_learner(recipe(Path(model), **REPLAY), learner.ranks), None),
    }


def save_latent(directory: Path) -> None:
    few = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    models.save_model(directory, "deepseek_v3", vocab_size=VOCAB, **few)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = tmp_path_factory.mktemp("latent")
    save_latent(model)
    return run_ranks(1, whole, str(model))[0]


def test_gradients_are_those_of_transformers(alone: dict[str, Any]) -> None:
    apart = alone["gradients"]
    assert len(apart) == 3 + 4 * 8 + 2 + 3 * (1 + 2 * 4 + 2)
    assert max(apart.values()) < 1e-4, max(apart, key=lambda name: apart[name])


def test_the_bias_of_the_routers_stays(alone: dict[str, Any]) -> None:
    assert len(alone["biases"]) == 3
    assert min(alone["biases"]) > 0
    assert alone["frozen"]
    assert alone["moved"] > 1e-3, "the updates moved the policy"


def test_a_pass_replays_what_was_recorded(alone: dict[str, Any]) -> None:
    result = alone["replayed"]
    first, second = result["updates"]
    assert result["bitwise"]
    assert first["ratio_neg_min"] == first["ratio_neg_max"] == first["ratio_pos_max"] == 1.0
    assert first["routes_flipped"] == 0.0 < second["routes_flipped"] < 1.0
