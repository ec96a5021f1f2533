"""Every model config goes through one reader: any value of a field is used or refused in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.checks.layouts import bundled_configs, check_layout
from mugrpo_megatron.engine.launch import kv_bytes_per_token
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.plan.case import find_model
from mugrpo_megatron.files.hf_config import ModelConfig, RopeParameters, check_config, read_config, read_model_config
from mugrpo_megatron.learner.operators import frequencies
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.families import FAMILIES, architecture, read_architecture
from tests.refusals import refuses

DENSE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ODD = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.sampled_from([2**31, 10**30, -(10**30)])
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["silu", "default", "linear", "llama3", "yarn", "full_attention", "false", "8"])
    | st.lists(st.integers(-1, 2) | st.text(max_size=2), max_size=2)
)
ROPE = st.dictionaries(st.sampled_from(sorted(RopeParameters.__annotations__)), ODD, max_size=6)
FIELDS = sorted(ModelConfig.__annotations__)


def write(directory: Path, config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return directory


def planned(directory: Path) -> object:
    return find_model(Recipe.model_validate({"model": {"path": str(directory)}}).model)


READERS: dict[str, Callable[[Path], object]] = {
    "recipe": read_model_config,
    "family": read_architecture,
    "plan": planned,
    "plain": read_config,
}
WRONG: list[tuple[Any, str]] = [
    ("{", r"config\.json is not JSON \(Expecting"),
    ('{"model_type": "\udcff"}'.encode("utf-8", "surrogateescape"), "is not JSON"),
    ("[" * 100_000, r"is not JSON \(lists or objects are nested too deep\)"),
    ("[1, 2]", "holds a JSON array where an object is needed"),
    ({}, "has no model_type"),
    ({"model_type": ["llama"]}, r"model_type is \['llama'\], it should be a valid string"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0, it should be greater than 0"),
    ({"num_attention_heads": "4"}, "num_attention_heads is '4', it should be a valid integer"),
    ({"hidden_size": True}, "hidden_size is True, it should be a valid integer"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, it should be less than or equal to 10000"),
    (
        {"num_hidden_layers": 10_000, "num_experts": 65_536},
        "its layers have 655,360,000 experts together, more than 1,",
    ),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', it should be a valid boolean"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x', it should be a valid number"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": -1}}, r"rope_scaling\.factor is -1, it should be greater than 0"),
    ({"layer_types": "full_attention"}, "layer_types is 'full_attention', it should be a valid list"),
    (dict.fromkeys(("head_dim", "vocab_size", "hidden_size", "num_experts"), "x"), "; and 1 more; correct this file$"),
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("number", range(len(WRONG)))
def test_every_reader_says_the_same_about_a_wrong_config(reader: str, number: int, tmp_path: Path) -> None:
    config, sentence = WRONG[number]
    if isinstance(config, dict) and config and "model_type" not in config:
        config = {"model_type": "llama", **DENSE, **config}
    if isinstance(config, bytes):
        tmp_path.joinpath("config.json").write_bytes(config)
    else:
        write(tmp_path, config)
    with pytest.raises(UserError, match=sentence) as refused:
        READERS[reader](tmp_path)
    assert str(refused.value).startswith(str(tmp_path / "config.json"))


def test_a_directory_without_a_config_is_named_with_the_key_it_was_given_as(tmp_path: Path) -> None:
    refuses(rf"^{tmp_path}: not a Hugging Face checkpoint \(no config\.json there\)$", read_config, tmp_path)
    refuses(r"^model\.path = .*no config\.json there\); make the bundled small model", read_model_config, tmp_path)
    write(tmp_path, {"model_type": "llama"})
    refuses(r"^model\.path = .*holds no \*\.safetensors", read_model_config, tmp_path)


@pytest.mark.parametrize("name", sorted(bundled_configs()))
def test_published_configs_are_taken_as_they_are(name: str) -> None:
    config = bundled_configs()[name]
    assert check_config(config, name) is config


@settings(max_examples=100)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    changes=st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3),
    rope=st.none() | ROPE,
    removed=st.none() | st.sampled_from(sorted(DENSE)),
    tensor=st.integers(1, 4),
)
def test_odd_values_are_honoured_or_refused_in_a_sentence(
    family: str, changes: dict[str, Any], rope: dict[str, Any] | None, removed: str | None, tensor: int
) -> None:
    """Never a traceback: a config that passes the reader works for the plan, the layout and the frequencies."""
    config = {"model_type": family, **DENSE, **(EXPERTS if "moe" in family or family == "mixtral" else {}), **changes}
    if rope is not None:
        config["rope_scaling"] = rope
    if removed is not None:
        config.pop(removed, None)
    try:
        model = architecture(config)
        recipe = Recipe.model_validate({"parallel": {"tensor": tensor}, "data": {"max_prompt_tokens": 8}})
        check_layout(recipe, check_config(config, "config.json"), tensor)
    except UserError:
        return
    assert frequencies(model.rope).shape == (model.rope.dim // 2,)
    assert all(size >= 0 for size in model.letters.values())
    assert kv_bytes_per_token(config, "bfloat16") > 0


@pytest.mark.process
def test_nothing_slow_is_imported_to_read_a_model() -> None:
    code = (
        "import sys, mugrpo_megatron.weights.families, mugrpo_megatron.checks.layouts\n"
        "print(*sorted({'torch', 'transformers', 'megatron', 'sglang', 'sympy'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == []
