"""Reads `config.json` of a Hugging Face checkpoint, with a type and a range for every field that is used.

Imports neither torch nor transformers. `weights.families` decides about fields that this file does not list.
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
from mugrpo_megatron.files.weight_file import open_weights

CONFIG = "config.json"
MAX_ERRORS = 3
"""Most wrong fields that a message names."""

MOST_EXPERTS = 1_000_000
"""Most experts in all layers together. A larger number is taken for a mistake: a list of all tensors' names, three for
each expert, would take too much memory."""

Size = Annotated[int, Field(gt=0, lt=2**31)] | None
OptionalCount = Annotated[int, Field(ge=0, le=65_536)] | None
"""A count with an upper bound, since a mistyped number would cause hours of arithmetic."""
Heads = Annotated[int, Field(gt=0, le=65_536)] | None
Positive = Annotated[FiniteFloat, Field(gt=0, lt=1e12)] | None
NotNegative = Annotated[FiniteFloat, Field(ge=0, lt=1e12)] | None
Theta = Annotated[FiniteFloat, Field(gt=1, lt=1e15)] | None
"""Base of rotary angles. It has an upper bound, since a huge integer overflows a float."""
Flag = bool | None


@with_config(ConfigDict(extra="allow", strict=True))
class RopeParameters(TypedDict, total=False):
    """The settings of rotary embedding in a config: `rope_parameters` (transformers 5) or `rope_scaling` (transformers
    4)."""

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
    attn_factor: Positive
    extrapolation_factor: Positive
    mscale: NotNegative
    mscale_all_dim: NotNegative
    truncate: Flag
    partial_rotary_factor: Positive


@with_config(ConfigDict(extra="allow", strict=True))
class ModelConfig(TypedDict, total=False):
    """The fields of config.json that are read; all but the first are optional, and null counts as absent."""

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
    original_max_position_embeddings: Size
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
    full_attention_interval: Size
    linear_conv_kernel_dim: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_num_key_heads: Heads
    linear_num_value_heads: Heads
    shared_expert_intermediate_size: OptionalCount
    quantization_config: dict[str, Any] | None


FIELDS = TypeAdapter(ModelConfig)


def read_config(directory: Path, key: str = "", remedy: str = "") -> ModelConfig:
    """Returns the config of a checkpoint directory; UserError if it is missing or a field is wrong.

    `key` is the recipe key or option that names the directory. `remedy` ends the error about a directory without a
    config.
    """
    if not (directory / CONFIG).is_file():
        label = f"{key} = {directory}" if key else str(directory)
        end = f"; {remedy}" if remedy else ""
        raise UserError(f"{label}: not a Hugging Face checkpoint (no {CONFIG} there){end}")
    return read_config_file(directory / CONFIG)


def read_config_file(path: Path) -> ModelConfig:
    return check_config(read_json(path), str(path))


def check_config(config: Any, where: str) -> ModelConfig:
    """Returns `config` if every field of `ModelConfig` has its type and range. Otherwise raises UserError, which begins
    with `where` and names wrong fields."""
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"{where}: has no model_type, so it does not describe a model; take the config.json of a model")
    try:
        FIELDS.validate_python(config)
    except ValidationError as error:
        problems = [_sentence(dict(details)) for details in error.errors()]
        more = f"; and {len(problems) - MAX_ERRORS} more" if len(problems) > MAX_ERRORS else ""
        raise UserError(f"{where}: {'; '.join(problems[:MAX_ERRORS])}{more}; correct this file") from None
    experts = (experts_of(config) or 1) * (config.get("num_hidden_layers") or 1)
    if experts > MOST_EXPERTS:
        raise UserError(
            f"{where}: its layers have {experts:,} experts together, more than {MOST_EXPERTS:,}: correct this file"
        )
    return cast(ModelConfig, config)


def read_model_config(directory: Path) -> ModelConfig:
    """Returns the config of the recipe's model; UserError if `model.path` is no checkpoint with safetensors weights."""
    config = read_config(
        directory,
        key="model.path",
        remedy="make the bundled small model with `mugrpo sft RECIPE` or point the key at a downloaded model",
    )
    check_weights(directory, "model.path")
    return config


def experts_of(model: Mapping[str, Any]) -> int:
    """Returns the routed experts per layer of a Hugging Face config; 0 for a dense model."""
    return model.get("num_experts") or model.get("num_local_experts") or model.get("n_routed_experts") or 0


def has_delta(model: Mapping[str, Any]) -> bool:
    """Whether some layers of a Hugging Face config are gated delta networks."""
    return bool(model.get("linear_num_value_heads"))


def attention_layers(model: Mapping[str, Any]) -> int:
    """Returns the number of layers with full attention in a Hugging Face config: those with a KV cache in an engine."""
    layers: int = model["num_hidden_layers"]
    if not has_delta(model):
        return layers
    kinds = model.get("layer_types")
    return kinds.count("full_attention") if kinds else layers // (model.get("full_attention_interval") or 4)


def check_weights(directory: Path, key: str) -> None:
    """Raise UserError if a checkpoint directory holds no safetensors files."""
    if not any(directory.glob("*.safetensors")):
        raise UserError(
            f"{key} = {directory}: holds no *.safetensors weights, and no other format is loaded: convert its weights "
            "to safetensors"
        )


def check_weight_files(directory: Path) -> None:
    """Raise UserError for a file model*.safetensors that is damaged or cut short; reads only the files' headers.

    Names and shapes of tensors are compared with the config later, when the weights are loaded.
    """
    for path in sorted(directory.glob("model*.safetensors")):
        with open_weights(path):
            pass


def check_tokenizer(directory: Path) -> None:
    """Raise UserError if a checkpoint directory holds no tokenizer, or one that only the checkpoint's own code can
    read."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not (directory / "tokenizer.json").is_file():
        _check_tiktoken(directory)
    if not any((directory / name).is_file() for name in names):
        raise UserError(
            f"{directory} holds no tokenizer (none of {', '.join(names)}): copy the model's tokenizer into it"
        )


def _check_tiktoken(directory: Path) -> None:
    """Raise UserError if a checkpoint without tokenizer.json has a tokenizer that only its own code reads.

    That is one in tiktoken's format. It is also one whose class is in the checkpoint's code, if neither tokenizer.model
    nor vocab.json is there. From a tiktoken file transformers would make other tokens, since it splits
    text by a pattern of its own (TikTokenConverter).
    """
    config = directory / "tokenizer_config.json"
    auto_map = read_json(config).get("auto_map") if config.is_file() else None
    own_code = isinstance(auto_map, dict) and auto_map.get("AutoTokenizer")
    standard = any((directory / name).is_file() for name in ("tokenizer.model", "vocab.json"))
    if any(directory.glob("*.tiktoken")) or (directory / "tiktoken.model").is_file() or (own_code and not standard):
        raise UserError(
            f"{directory} has no tokenizer.json, and only the checkpoint's own code, which never runs here, reads its "
            "tokenizer; make the file once where you trust that code: `tokenizer = AutoTokenizer.from_pretrained("
            "DIR, trust_remote_code=True)`, then `transformers.integrations.tiktoken.convert_tiktoken_to_fast("
            "ENCODING, DIR)`, where ENCODING is the tokenizer's tiktoken.Encoding, often `tokenizer.model`"
        )


def _sentence(error: dict[str, Any]) -> str:
    field, value = ".".join(map(str, error["loc"])), repr(error["input"])
    value = value if len(value) <= 60 else f"{value[:57]}..."
    return f"{field} is {value}, it {error['msg'].removeprefix('Input ')}"


MAX_REASON_CHARS = 200
"""Most characters of a library's message that an error quotes."""


@contextmanager
def unreadable_as_user_error(path: Path, what: str) -> Iterator[None]:
    """Turn an error in the block into UserError: "`path` is not `what`", with the reason. UserError, MemoryError and
    requests to stop stay as they are."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # BaseException: a panic in a Rust library is not an Exception
        reason = " ".join(str(error).split())[:MAX_REASON_CHARS] or type(error).__name__
        raise UserError(f"{path} is not {what} ({reason}); restore it from its source") from None
