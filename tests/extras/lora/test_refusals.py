"""Recipes with `[lora]` that cannot work: one sentence each, without a slow import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.lora.targets import target_kinds
from mugrpo_megatron.weights.families import read_architecture
from tests.extras.lora.adapted import ALPHA, RANK, write_adapter
from tests.hostile.outcome import command, refused
from tests.models import save_model as save_hybrid
from tests.tiny import save_model, write_recipe

LORA = {"rank": RANK, "alpha": ALPHA}


def dry(folder: Path, model: Path, lora: dict[str, Any], **sections: Any) -> list[object]:
    """The arguments of a dry run."""
    recipe = write_recipe(folder / "recipe.toml", model, folder / "run", lora=lora, **sections)
    return ["train", recipe, "--dry-run"]


def test_a_dry_run_says_what_is_trained(tmp_path: Path, model: Path) -> None:
    said = command(*dry(tmp_path, model, {**LORA, "targets": ["q_proj", "down_proj"]}))
    assert said.code == 0, said
    assert f"lora: rank 4 on q_proj, down_proj, {4 * 4 * (32 + 32 + 64 + 32):,} trained parameters" in said.err


@pytest.mark.parametrize(
    ("lora", "says", "sections"),
    [
        ({"rank": 0}, "`lora.rank` = 0: Input should be greater than 0", {}),
        ({**LORA, "rank": 2147483647}, "is above 32, the largest rank of a layer that gets an adapter; lower it", {}),
        ({"alpha": 16.0}, "without a rank all weights are trained", {}),
        (
            {**LORA, "targets": ["q_proj", "wq"]},
            "qwen2 has no linear layer 'wq' that can have an adapter; name some of ['q_proj'",
            {},
        ),
        ({**LORA, "targets": []}, "leaves nothing to train", {}),
        (
            {**LORA, "start": "nowhere"},
            "lora.start = nowhere: not an adapter in PEFT's format (no adapter_config.json",
            {},
        ),
        (LORA, "does not divide the model's 2 key/value heads", {"parallel": {"tensor": 4}}),
        (LORA, 'learner.layers = "auto" may fuse norms', {"learner": {"layers": "auto"}}),
    ],
)
def test_wrong_keys_and_layouts_are_refused(
    lora: dict[str, Any], says: str, sections: dict[str, Any], tmp_path: Path, model: Path
) -> None:
    refused(*dry(tmp_path, model, lora, **sections), says=says)


def test_experts_have_adapters_by_the_names_of_transformers(tmp_path: Path) -> None:
    moe = save_model(tmp_path / "moe", "qwen3_moe")
    said = command(*dry(tmp_path, moe, LORA))
    experts = 4 * (32 + 2 * 64 + 64 + 32)
    assert f"o_proj, gate_up_proj, down_proj, {4 * 4 * (2 * 64 + 2 * 48 + experts):,} trained" in said.err, said
    refused(*dry(tmp_path, moe, {**LORA, "targets": ["gate_proj"]}), says="has no linear layer 'gate_proj'")
    start = write_adapter(tmp_path / "start", moe)
    keys = {**LORA, "start": str(start)}
    assert command(*dry(tmp_path, moe, keys)).code == 0
    edited(lambda config: config.update(target_parameters="mlp.experts.down_proj"))(start)
    refused(*dry(tmp_path, moe, keys), says="target_parameters = 'mlp.experts.down_proj' is not a list of names")
    edited(lambda config: config.update(target_parameters=["mlp.experts.down_proj"]))(start)
    refused(*dry(tmp_path, moe, keys), says="is not of a qwen3_moe model of this config: it has")


def test_latent_attention_has_none(tmp_path: Path) -> None:
    latent = save_model(tmp_path / "latent", "deepseek_v3")
    refused(*dry(tmp_path, latent, {**LORA, "targets": ["o_proj"]}), says="adapters do not fit deepseek_v3")


def test_gated_delta_networks_have_none(tmp_path: Path) -> None:
    save_hybrid(tmp_path, "qwen3_5_text")
    with pytest.raises(UserError, match=r"adapters do not fit qwen3_5_text, whose gated delta networks"):
        target_kinds(read_architecture(tmp_path), "all-linear")


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "adapter_config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return edit


def renamed(directory: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = directory / "adapter_model.safetensors"
    save_file({name.replace("q_proj", "wq"): tensor for name, tensor in load_file(path).items()}, path)


def retyped(directory: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    path = directory / "adapter_model.safetensors"
    save_file({name: tensor.astype(np.int8) for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_with_a_value_that_is_no_number_is_not_read(value: float, tmp_path: Path, model: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from mugrpo_megatron.extras.lora.peft_files import read_adapter
    from mugrpo_megatron.weights.families import read_architecture

    path = write_adapter(tmp_path / "start", model) / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = value
    save_file(tensors, path)
    with pytest.raises(UserError, match="holds NaN or infinity, so the adapter is damaged"):
        read_adapter(path.parent, read_architecture(model)).read()


def cut(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (edited(lambda c: c.update(r=8)), "lora_A.weight has shape [4, 32], and the model needs [8, 32]"),
        (edited(lambda c: c.update(r="4")), "r = '4' and lora_alpha = 8.0 are not those of an adapter"),
        (
            edited(lambda c: c.update(use_dora=True)),
            "only plain LoRA adapters are read: train one whose use_dora is false or null",
        ),
        (edited(lambda c: c.update(lora_alpha=4)), "has alpha 4.0, and lora.alpha gives 8.0; set it to the adapter's"),
        (renamed, "start: qwen2 has no linear layer 'wq' that can have an adapter; name some of ['q_proj'"),
        (edited(lambda c: c.update(init_lora_weights="pissa")), "init_lora_weights = 'pissa', and only plain LoRA"),
        (retyped, "has type I8; save the adapter as F32 or BF16 or F16"),
        (cut, "adapter_model.safetensors is truncated or not a safetensors file"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    spoil: Callable[[Path], None], says: str, tmp_path: Path, model: Path
) -> None:
    start = write_adapter(tmp_path / "start", model)
    keys = {**LORA, "start": str(start)}
    assert command(*dry(tmp_path, model, keys)).code == 0
    spoil(start)
    refused(*dry(tmp_path, model, keys), says=says)


def test_an_adapter_of_another_base_or_model_is_refused(tmp_path: Path, model: Path) -> None:
    other = write_adapter(tmp_path / "other", model, base="0" * 64)
    refused(*dry(tmp_path, model, {**LORA, "start": str(other)}), says="was trained on other weights than")
    some = write_adapter(tmp_path / "some", model, ["q_proj"])
    refused(*dry(tmp_path, model, {**LORA, "start": str(some)}), says="has targets ['q_proj'], and lora.targets gives")
    shallow = save_model(tmp_path / "qwen3", "qwen3")
    start = write_adapter(tmp_path / "start", shallow)
    refused(*dry(tmp_path, model, {**LORA, "start": str(start)}), says="has shape")


@pytest.mark.process
def test_nothing_slow_is_imported_for_it() -> None:
    line = "import sys, mugrpo_megatron.extras.lora.lora_checks; print({'torch', 'megatron'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True).stdout == "set()\n"
