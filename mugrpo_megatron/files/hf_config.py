"""`config.json` of a Hugging Face checkpoint: the one reader, with a type and a range for every field used here.

It imports neither torch nor transformers, so a wrong model is found before anything slow starts. A family's reading
(`weights.families`) is stricter: it refuses fields that it does not know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Required, cast

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import read_json

CONFIG = "config.json"
SHOWN = 3
"""Wrong fields that one message names."""

MOST_EXPERTS = 1_000_000
"""In all layers; each has three tensors to name."""

Size = Annotated[int, Field(gt=0, lt=2**31)] | None
Count = Annotated[int, Field(ge=0, le=65_536)] | None
"""Bounded so that a mistyped number is an error, not hours of arithmetic."""
Heads = Annotated[int, Field(gt=0, le=65_536)] | None
Positive = Annotated[FiniteFloat, Field(gt=0, lt=1e12)] | None
NotNegative = Annotated[FiniteFloat, Field(ge=0, lt=1e12)] | None
Theta = Annotated[FiniteFloat, Field(gt=1, lt=1e15)] | None
"""An integer without a bound would overflow torch's numbers."""
Flag = bool | None


@with_config(ConfigDict(extra="allow", strict=True))
class RopeParameters(TypedDict, total=False):
    """`rope_parameters` (transformers 5) or `rope_scaling` (transformers 4)."""

    rope_type: str | None
    type: str | None
    rope_theta: Theta
    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Size
    beta_fast: Positive
    beta_slow: Positive
    attention_factor: Positive
    mscale: NotNegative
    mscale_all_dim: NotNegative
    truncate: Flag


@with_config(ConfigDict(extra="allow", strict=True))
class ModelConfig(TypedDict, total=False):
    """Fields that something here reads, all of them optional but the first; null counts as absent."""

    model_type: Required[str]
    architectures: list[str] | None
    dtype: str | None
    torch_dtype: str | None
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Annotated[int, Field(gt=0, le=10_000)] | None
    num_attention_heads: Heads
    num_key_value_heads: Heads
    head_dim: Size
    intermediate_size: Size
    max_position_embeddings: Size
    hidden_act: str | None
    rms_norm_eps: Positive
    tie_word_embeddings: Flag
    attention_dropout: NotNegative
    attention_bias: Flag
    mlp_bias: Flag
    rope_theta: Theta
    rope_scaling: RopeParameters | None
    rope_parameters: RopeParameters | None
    sliding_window: Size
    use_sliding_window: Flag
    use_mrope: Flag
    max_window_layers: Count
    layer_types: list[str] | None
    num_experts: Count
    num_local_experts: Count
    num_experts_per_tok: Heads
    moe_intermediate_size: Size
    norm_topk_prob: Flag
    decoder_sparse_step: Count
    mlp_only_layers: list[int] | None
    router_jitter_noise: NotNegative


FIELDS = TypeAdapter(ModelConfig)


def read_config(directory: Path, key: str = "", remedy: str = "") -> ModelConfig:
    """The config of a checkpoint directory; UserError when there is none or a field is wrong.

    `key` is what the directory was given as, `remedy` the end of the sentence when it is not a checkpoint.
    """
    if not (directory / CONFIG).is_file():
        given = f"{key} = {directory}" if key else str(directory)
        end = f"; {remedy}" if remedy else ""
        raise UserError(f"{given}: not a Hugging Face checkpoint (no {CONFIG} there){end}")
    return read_config_file(directory / CONFIG)


def read_config_file(path: Path) -> ModelConfig:
    """The config in a file of any name."""
    return checked(read_json(path), str(path))


def checked(config: Any, where: str) -> ModelConfig:
    """`config` itself once every known field has its type and range; UserError names `where` and the wrong fields."""
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"{where}: has no model_type, so it does not describe a model")
    try:
        FIELDS.validate_python(config)
    except ValidationError as error:
        wrong = [_sentence(dict(one)) for one in error.errors()]
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise UserError(f"{where}: {'; '.join(wrong[:SHOWN])}{more}") from None
    experts = (config.get("num_experts") or config.get("num_local_experts") or 1) * (
        config.get("num_hidden_layers") or 1
    )
    if experts > MOST_EXPERTS:
        raise UserError(f"{where}: its layers have {experts:,} experts together, more than {MOST_EXPERTS:,}")
    return cast(ModelConfig, config)


def check_weights(directory: Path, key: str) -> None:
    """UserError when a checkpoint directory holds no safetensors files."""
    if not any(directory.glob("*.safetensors")):
        raise UserError(f"{key} = {directory}: holds no *.safetensors weights (other formats are not loaded)")


def check_tokenizer(directory: Path) -> None:
    """UserError when a checkpoint directory holds no tokenizer."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not any((directory / name).is_file() for name in names):
        raise UserError(
            f"{directory} holds no tokenizer (none of {', '.join(names)}): point model.path at a checkpoint"
        )


def _sentence(error: dict[str, Any]) -> str:
    field = ".".join(str(part) for part in error["loc"])
    value = repr(error["input"])
    shown = value if len(value) <= 60 else f"{value[:57]}..."
    return f"{field} is {shown}, it {error['msg'].removeprefix('Input ')}"
