"""The table of fields that SGLang reads is that of the installed version, and finds what its code reads."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mugrpo_megatron.checks.engines import ENGINE_CLASSES
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.config import CLASSES, FIELDS_OF_ENGINES, WITHOUT_EFFECT, changes_engine, engine_fields
from mugrpo_megatron.weights.families import FAMILIES, architecture
from tests import models
from tests.weights.engine_fields import installed, table

READ_WITHOUT_EFFECT = {
    "architectures": "checked beside the family (checks.engines)",
    "auto_map": "code of a checkpoint never runs",
    "bos_token_id": "tokens of requests",
    "dtype": "an argument of the engine",
    "eos_token_id": "ends responses",
    "is_encoder_decoder": "an attribute of every config",
    "model_type": "chooses the family",
    "num_labels": "of classifiers",
    "output_hidden_states": "returned beside the result",
    "pad_token_id": "tokens of requests",
    "torch_dtype": "an argument of the engine",
}
"""Field of `WITHOUT_EFFECT` that SGLang reads -> why it changes no model."""


def test_the_table_is_that_of_the_installed_sglang() -> None:
    """A version that reads another field is noticed: write the table anew, and honour or refuse what is new."""
    written = json.loads(FIELDS_OF_ENGINES.read_text(encoding="utf-8"))
    assert written.get(version("sglang")) == table(installed()), "run `python -m tests.weights.engine_fields`"


def test_every_family_has_its_fields_in_the_pinned_version() -> None:
    for family in set(FAMILIES) - set(CLASSES):
        assert ENGINE_CLASSES[family] == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
        fields = engine_fields(family)
        assert {"hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps"} <= fields.keys()
        assert WITHOUT_EFFECT & fields.keys() <= READ_WITHOUT_EFFECT.keys()


ODD = (True, False, 0, 1, 3, -1, 0.5, 2.0, 1e9, "x", [1], {"a": 1})
"""Values of which at least one is another than the model's, for a field of any type."""
NO_MODEL = {
    "head_dim": "with latent attention both sides take the sizes of its parts",
    "num_nextn_predict_layers": "layers that draft tokens, which neither side builds",
    "original_max_position_embeddings": "read beside rope scaling, and there is none",
    "rope_parameters": "its keys have a table of their own",
    "rope_scaling": "its keys have a table of their own",
    "rope_theta": "both sides take that of rope_parameters",
    "sliding_window": "use_sliding_window is false",
    "topk_group": "of one group, all experts are chosen from it",
    "qwen3_moe.intermediate_size": "of dense layers, and there are none",
    "qwen3_5_moe_text.intermediate_size": "of dense layers, and there are none",
    "qwen3_moe.partial_rotary_factor": "1 is the whole",
    "qwen2.scale_emb": "a factor of 1",
    "qwen3.scale_emb": "a factor of 1",
    "glm4_moe_lite.moe_layer_freq": "SGLang's class sets it to 1",
    "qwen3_5_text.full_attention_interval": "compared with layer_types (checks.engines)",
    "qwen3_5_moe_text.full_attention_interval": "compared with layer_types (checks.engines)",
    "qwen3_5_moe_text.norm_topk_prob": "true is what both sides compute",
}
"""Field that SGLang reads, of a family or of several -> why such a value changes no model."""


@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_no_field_that_sglang_reads_passes_in_silence(family: str) -> None:
    """Every field of the table with odd values: another model for the learner too, refused, or in NO_MODEL."""
    config = CONFIG_MAPPING[family](**{**models.SIZES, **models.FAMILIES[family]}).to_dict()
    same = _bare(config)
    silent = set()
    for field, defaults in engine_fields(family).items():
        for value in ODD:
            if config.get(field) == value or not changes_engine(value, defaults):
                continue
            try:
                changed = _bare({**config, field: value})
            except UserError:
                continue
            if changed == same:
                silent.add(field)
    explained = {name.removeprefix(f"{family}.") for name in NO_MODEL} | READ_WITHOUT_EFFECT.keys()
    assert silent <= explained


def _bare(config: dict[str, Any]) -> Architecture:
    """The architecture, without what a run says of the config."""
    return replace(architecture(config), unread=(), remarks=())


def test_a_value_changes_the_engine_unless_it_stands_for_an_absent_field() -> None:
    assert changes_engine(False, [True])
    assert not changes_engine(True, [True])
    assert changes_engine(None, [True])
    assert not changes_engine(None, [False, None, 0])
    assert not changes_engine([], [None])
    assert changes_engine(4, [1])
    assert changes_engine(4, [4, None])
    assert changes_engine(4, [])
    assert not changes_engine(None, [])


SOURCE = {
    "srt/models/llama.py": """
        from sglang.srt.models.other import Attention
        from sglang.srt.utils.hf_transformers.common import get_rope_config

        class Unused:
            def __init__(self, config):
                self.a = config.unused

        class LlamaForCausalLM:
            def __init__(self, config):
                self.config = config
                theta, rope_scaling = get_rope_config(config)
                self.attention = Attention(config)
                self.soft = getattr(config, "soft_cap", 30.0)
                self.width = rope_scaling["width"] if rope_scaling.get("kind", "plain") == "wide" else 0

            def forward(self, x):
                return x * self.config.scale_all if hasattr(self.config, "scale_all") else x
    """,
    "srt/models/other.py": """
        NAMES = ["first", "second"]

        class Attention:
            def __init__(self, config):
                self.heads = config.heads
                for name in NAMES:
                    setattr(self, name, getattr(config, name, None))
    """,
    "srt/utils/hf_transformers/common.py": """
        def get_rope_config(config):
            return getattr(config, "rope_theta", 10000), config.rope_parameters
    """,
    "srt/layers/rotary_embedding/factory.py": """
        def get_rope(scaling_type, rope_scaling):
            if scaling_type == "linear":
                return rope_scaling["factor"]
            elif scaling_type == "yarn":
                return {k: v for k, v in rope_scaling.items() if k in ("attn_factor", "beta_fast")}
    """,
    "srt/managers/scheduler.py": """
        def length(model):
            return getattr(model.hf_config, "seq_length", 2048)
    """,
    "srt/lora/lora.py": """
        def rank(model):
            return model.hf_config.rank
    """,
}


def test_every_way_of_reading_a_field_is_found(tmp_path: Path) -> None:
    for name, text in SOURCE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    found = table(tmp_path)
    assert found["llama"] == {
        "first": [None],
        "heads": [],
        "rope_parameters": [],
        "rope_theta": [10000],
        "scale_all": [],
        "second": [None],
        "soft_cap": [30.0],
    }
    assert found["rope of llama"] == {"kind": ["plain"], "width": []}
    assert found["rope linear"] == {"factor": []}
    assert found["rope yarn"] == {"attn_factor": [], "beta_fast": []}
    assert found["every model"] == {"seq_length": [2048]}


def test_dense_layers_that_both_sides_count_otherwise_are_refused() -> None:
    settings = {**models.SIZES, **models.FAMILIES["glm4_moe_lite"]}
    config = CONFIG_MAPPING["glm4_moe_lite"](**settings).to_dict()
    assert config["mlp_layer_types"] == ["dense"] + ["sparse"] * 3
    assert architecture({**config, "first_k_dense_replace": 1}) == architecture(config)
    with pytest.raises(UserError, match=r"first_k_dense_replace 2 and mlp_layer_types, which has 1 dense layers"):
        architecture({**config, "first_k_dense_replace": 2})
