"""Layers with Transformer Engine's names: chosen where it is installed, and the same model as local layers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider

from mugrpo_megatron.checks.layouts import check_layers
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner import model as layers
from mugrpo_megatron.learner.groups import initialize
from mugrpo_megatron.learner.linear import DirectLayers
from mugrpo_megatron.learner.model import transformer_config
from mugrpo_megatron.learner.operators import SwiGLU
from mugrpo_megatron.learner.passes import row_multiple
from mugrpo_megatron.megatron_compat import mlp_parts
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import architecture, read_architecture
from mugrpo_megatron.weights.table import NORMS, entries, table_name
from tests import models
from tests.learner.fused import fused
from tests.learner.tiny import recipe
from tests.ranks import run_ranks
from tests.weights.ranks_work import Layout, round_trips, stored_shapes
from tests.weights.tiny import assert_same_weights

LAYER = "decoder.layers.0."
DENSE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
    "self_attention.linear_qkv.weight": "self_attention.linear_qkv.weight",
}
ROUTED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.experts.local_experts.3.linear_fc1.weight": "mlp.experts.linear_fc1.weight3",
    "mlp.experts.local_experts.0.linear_fc2.weight": "mlp.experts.linear_fc2.weight0",
}
LATENT = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.linear_qkv_down_proj.weight": "self_attention.linear_qkv_down_proj.weight",
}
"""Of a first layer, which has no experts."""
DELTA = {name: name for name in ("input_layernorm.weight", "self_attention.in_proj.weight", "self_attention.A_log")}
WITHOUT_EXPERTS = ("qwen2", "qwen3", "llama", "mistral", "qwen3_5_text")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for family in models.FAMILIES:
        models.save_model(directory / family, family)
    return directory


def fused_name(name: str, model: Architecture) -> str:
    """Transformer Engine's name of the table's parameter `name`: norms before experts and latents are not fused."""
    layer = int(result[1]) if (result := re.match(r"decoder\.layers\.(\d+)\.", name)) else 0
    linear = model.delta is not None and model.delta.linear_layers[layer]
    apart = {"pre_mlp_layernorm.": layer >= model.dense_layers, "input_layernorm.": bool(model.latent or linear)}
    for plain, fused_norm in NORMS.items():
        if not apart[plain]:
            name = name.replace(f".{plain}", f".{fused_norm}")
    return re.sub(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r".experts.\2.weight\1", name)


@pytest.mark.process
def test_names_are_those_of_the_modules_and_come_back_and_checkpoints_have_those_of_local_layers(
    checkpoints: Path,
) -> None:
    """Keys and shapes are the table's, which `tests/weights/test_table.py` finds in Megatron's own layers."""
    [result] = run_ranks(1, fused, stored_shapes, [checkpoints / family for family in models.FAMILIES])
    for family, (table, megatrons, names) in zip(models.FAMILIES, result, strict=True):
        model = architecture(json.loads((checkpoints / family / "config.json").read_text()))
        known = {fused_name(name, model): name for name in entries(model)}
        names_of_layer = LATENT if model.latent else DELTA if model.delta else DENSE if model.dense_layers else ROUTED
        for name, expected in names_of_layer.items():
            assert known[LAYER + expected] == LAYER + name
        assert {name: table_name(name) for name in known} == known
        assert all(table_name(name) == name for name in known.values())
        assert sorted(names) == sorted(known)
        assert table == megatrons, family


LAYOUTS: dict[str, Layout] = {"tp2 pp2": {"tensor": 2, "pipeline": 2}, "pp2 ep2": {"pipeline": 2, "expert": 2}}


@pytest.mark.process
@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip_is_bitwise(checkpoints: Path, tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    families = [family for family in models.FAMILIES if ("expert" in layout) == (family not in WITHOUT_EXPERTS)]
    run_ranks(4, fused, round_trips, [(checkpoints / family, tmp_path / family) for family in families], layout)
    for family in families:
        assert_same_weights(checkpoints / family, tmp_path / family)


def test_what_the_machine_lacks_is_refused_before_anything_starts(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    section = recipe(Path(model), learner={"layers": "transformer_engine"}).learner
    with pytest.raises(UserError, match='needs CUDA, and this learner runs on CPU; set it to "local"'):
        check_layers(section, "bfloat16", cuda=False)
    monkeypatch.setattr("mugrpo_megatron.checks.layouts.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"is not installed: run `run_scripts/setup.sh --cuda --with-te`"):
        check_layers(section, "bfloat16", cuda=True)
    for layers_ in ("local", "auto"):
        check_layers(recipe(Path(model), learner={"layers": layers_}).learner, "float32", cuda=True)


def test_fp8_in_another_type_than_bfloat16_is_refused(model: str) -> None:
    with pytest.raises(UserError, match=r'needs model\.dtype = "bfloat16"'):
        check_layers(recipe(Path(model), learner={"layers": "fp8_tensorwise"}).learner, "float32", cuda=True)


@pytest.mark.process
@pytest.mark.parametrize(("kind", "asked"), [("model", "tensorwise"), ("model", "blockwise"), ("routed", "tensorwise")])
def test_fp8_is_what_megatron_is_told_and_rows_are_whole_blocks(
    kind: str, asked: str, request: pytest.FixtureRequest
) -> None:
    expected = {"tensorwise": ("hybrid", 16), "blockwise": ("e4m3", 128)}
    told, multiple = run_ranks(2, told_in_fp8, request.getfixturevalue(kind), kind, asked)[0]
    assert told == (expected[asked][0], asked, kind == "routed")
    assert multiple == {"model": 2, "routed": 4}[kind] * expected[asked][1]


def told_in_fp8(model: str, kind: str, asked: str) -> tuple[tuple[str, str, bool], int]:
    """Megatron's settings, and what a packed row that two ranks share is a multiple of."""
    shared = {"model": {"tensor": 2}, "routed": {"context": 2}}[kind]
    chosen = recipe(Path(model), model={"dtype": "bfloat16"}, learner={"layers": f"fp8_{asked}"}, parallel=shared)
    ranks = initialize(chosen.run, chosen.parallel)
    sections = chosen.model, chosen.parallel, chosen.learner
    with patch("megatron.core.transformer.transformer_config.is_te_min_version", lambda version: True):
        config = transformer_config(*sections, read_architecture(Path(model)), ranks, grouped_experts=True)
    settings = config.fp8, config.fp8_recipe, config.moe_router_padding_for_quantization
    return settings, row_multiple(chosen.learner.fp8, ranks)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_swiglu_is_fused_on_cuda(checkpoints: Path, family: str) -> None:
    """In dense layers by this project's kernels, which need no compiler at the first update; in experts by Megatron."""
    model = architecture(json.loads((checkpoints / family / "config.json").read_text()))
    sizes = dict.fromkeys(("tp_size", "pp_size", "cp_size"), 1)
    ranks: Any = SimpleNamespace(device=torch.device("cuda"), **sizes)
    chosen = recipe(checkpoints / family)
    sections = chosen.model, chosen.parallel, chosen.learner
    config = transformer_config(*sections, model, ranks, grouped_experts=False)
    mlp = mlp_parts(layers.layer_spec(config, LocalSpecProvider(), model, 0).submodules.mlp)
    if not model.experts:
        assert mlp.activation_func is SwiGLU
    assert config.use_te_activation_func == (not model.experts), "Megatron takes the spec's activation"
    assert config.bias_activation_fusion == bool(model.experts)
    assert not config.bias_dropout_fusion


def test_auto_is_local_on_cpu_and_fused_on_cuda_where_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for installed in (False, True):
        monkeypatch.setattr(layers, "HAVE_TE", installed)
        assert type(layers.choose_backend("auto", cpu)) is LocalSpecProvider
        assert type(layers.choose_backend("local", cuda)) is DirectLayers
        assert layers.choose_backend("auto", cuda).fuse_layernorm_and_linear() is installed
    monkeypatch.setattr(layers, "HAVE_TE", False)
    with pytest.raises(UserError, match="does not load here: `mugrpo doctor` says why"):
        layers.choose_backend("transformer_engine", cuda)
