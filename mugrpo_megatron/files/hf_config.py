"""`config.json` of a Hugging Face checkpoint: the one reader, with a type and a range for every field used here.

It imports neither torch nor transformers. `weights.families` is stricter: it refuses fields that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Required, cast

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import read_json

CONFIG = "config.json"
MAX_ERRORS = 3
"""Wrong fields that one message names."""

MOST_EXPERTS = 1_000_000
"""In all layers; each has three tensors to name."""

Size = Annotated[int, Field(gt=0, lt=2**31)] | None
OptionalCount = Annotated[int, Field(ge=0, le=65_536)] | None
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
    partial_rotary_factor: Positive


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
    max_window_layers: OptionalCount
    layer_types: list[str] | None
    num_experts: OptionalCount
    num_local_experts: OptionalCount
    num_experts_per_tok: Heads
    moe_intermediate_size: Size
    norm_topk_prob: Flag
    decoder_sparse_step: OptionalCount
    mlp_only_layers: list[int] | None
    router_jitter_noise: NotNegative
    kv_lora_rank: Size
    q_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    qk_head_dim: Size
    v_head_dim: Size
    rope_interleave: Flag
    partial_rotary_factor: Positive
    use_qk_norm: Flag
    n_routed_experts: OptionalCount
    n_shared_experts: OptionalCount
    n_group: Heads
    topk_group: Heads
    routed_scaling_factor: Positive
    scoring_func: str | None
    topk_method: str | None
    first_k_dense_replace: OptionalCount
    moe_layer_freq: OptionalCount
    mlp_layer_types: list[str] | None
    num_nextn_predict_layers: OptionalCount
    quantization_config: dict[str, Any] | None


FIELDS = TypeAdapter(ModelConfig)


def read_config(directory: Path, key: str = "", remedy: str = "") -> ModelConfig:
    """The config of a checkpoint directory; UserError when there is none or a field is wrong.

    `key` is what the directory was given as, `remedy` the end of the sentence when it is not a checkpoint.
    """
    if not (directory / CONFIG).is_file():
        place = f"{key} = {directory}" if key else str(directory)
        end = f"; {remedy}" if remedy else ""
        raise UserError(f"{place}: not a Hugging Face checkpoint (no {CONFIG} there){end}")
    return read_config_file(directory / CONFIG)


def read_config_file(path: Path) -> ModelConfig:
    """The config in a file of any name."""
    return check_config(read_json(path), str(path))


def check_config(config: Any, where: str) -> ModelConfig:
    """`config` itself once every known field has its type and range; UserError names `where` and the wrong fields."""
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"{where}: has no model_type, so it does not describe a model")
    try:
        FIELDS.validate_python(config)
    except ValidationError as error:
        wrong = [_sentence(dict(one)) for one in error.errors()]
        more = f"; and {len(wrong) - MAX_ERRORS} more" if len(wrong) > MAX_ERRORS else ""
        raise UserError(f"{where}: {'; '.join(wrong[:MAX_ERRORS])}{more}") from None
    experts = (experts_of(config) or 1) * (config.get("num_hidden_layers") or 1)
    if experts > MOST_EXPERTS:
        raise UserError(f"{where}: its layers have {experts:,} experts together, more than {MOST_EXPERTS:,}")
    return cast(ModelConfig, config)


def read_model_config(directory: Path) -> ModelConfig:
    """The config of the recipe's model; UserError when `model.path` is not a checkpoint with safetensors weights."""
    config = read_config(
        directory,
        key="model.path",
        remedy="make the bundled small model with `mugrpo sft RECIPE` or point the key at a downloaded model",
    )
    check_weights(directory, "model.path")
    return config


def experts_of(model: Mapping[str, Any]) -> int:
    """Routed experts of each layer of a Hugging Face config; 0 for a dense model."""
    return model.get("num_experts") or model.get("num_local_experts") or model.get("n_routed_experts") or 0


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


SHOWN_CHARACTERS = 200
"""Characters of the library's own message."""


@contextmanager
def unreadable_as_user_error(path: Path, what: str) -> Iterator[None]:
    """Raise UserError, "`path` is not `what`", for anything but a UserError that the block raises.

    Also for a BaseException: the panic of a library in Rust is one.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:SHOWN_CHARACTERS] or type(error).__name__
        raise UserError(f"{path} is not {what} ({reason}); restore it from its source") from None
