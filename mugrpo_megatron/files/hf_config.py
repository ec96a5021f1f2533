"""`config.json` of a Hugging Face checkpoint: the one reader, with a type and a range for every field used here.

It imports neither torch nor transformers. `weights.families` is stricter: it refuses fields that it does not know.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NotRequired, Required, cast

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files import durable
from mugrpo_megatron.files.durable import digest, read_sealed, write_sealed
from mugrpo_megatron.files.json_text import file_inside, read_json

CONFIG = "config.json"
SHOWN = 3
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
def reading(path: Path, what: str) -> Iterator[None]:
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


STATE = "state.json"
"""Written last, so a directory that has it is complete."""


Count = Annotated[int, Field(ge=0)]


@with_config(ConfigDict(strict=True, extra="forbid"))
class SavedCursor(TypedDict):
    """The fields of a cursor (`run/cursor.py`)."""

    stage: Count
    age: Count
    updates: Count
    repeated: NotRequired[Count]
    """Absent before there were several passes."""
    nats: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    """Absent before `schedule.max_kl`."""


@with_config(ConfigDict(strict=True))
class Saved(TypedDict):
    """What `state.json` says of a checkpoint."""

    run: NotRequired[str]
    """The id of the run that saved it; a checkpoint without one continues no run."""
    cursor: SavedCursor
    updates_done: Count
    steps_done: Count
    loss_scaler: NotRequired[dict[str, float]]
    """Of a float16 learner; empty or absent otherwise."""
    model: dict[str, str | int]
    files: dict[str, str]
    """Name -> SHA-256 of every other file."""


SAVED, CURSOR = TypeAdapter(Saved), TypeAdapter(SavedCursor)


def checksums(directory: Path, rank: int, world: int) -> dict[str, str]:
    """File name -> SHA-256 of the files assigned to `rank` of `world`; all ranks together cover every file."""
    files = sorted(path for path in directory.iterdir() if path.name != STATE)
    return {path.name: digest(path).sha256 for path in files[rank::world]}


def publish(partial: Path, directory: Path, state: Mapping[str, Any]) -> None:
    """Write the state into `partial` and rename it to `directory`; durable when this returns.

    Its `files` are the checksums of all ranks. A file that none of them has listed, since a shared file system may show
    late what another node has written, gets its own here: without it the checkpoint would count as damaged.
    """
    files: Mapping[str, str] = state["files"]
    unlisted = sorted(path for path in partial.iterdir() if path.name not in {*files, STATE})
    late = {path.name: digest(path).sha256 for path in unlisted}
    write_sealed(partial / STATE, "state", {**state, "files": {**files, **late}})
    durable.publish(partial, directory)


def read_state(directory: Path) -> Saved:
    """The state of a complete checkpoint; UserError when it is missing or damaged."""
    path = directory / STATE
    if not path.is_file():
        raise UserError(
            f"{directory} is not a complete checkpoint: it has no {STATE}; use an older one or start a new run"
        )
    try:
        return SAVED.validate_python(read_sealed(path, "state"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"])) or "state"
        raise UserError(f"{path} is damaged: {field} is not what a checkpoint has; use an older checkpoint") from None
    except ValueError:
        raise UserError(f"{path} is damaged: its checksum does not match; use an older checkpoint") from None


def damage(directory: Path, rank: int, world: int) -> str | None:
    """What is wrong with the files of a checkpoint assigned to `rank` of `world`; None if nothing is."""
    from mugrpo_megatron.files.torch_dist import INDEX, read_index  # imports torch

    try:
        written = read_state(directory)["files"]
        for name in sorted(written)[rank::world]:
            path = file_inside(directory / STATE, name)
            if digest(path).sha256 != written[name]:
                return f"{path} is damaged: its checksum does not match"
        tensors = read_index(directory)
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{directory} cannot be read ({error.strerror})"
    needed = {INDEX, *(chunk.file for tensor in tensors.values() for chunk in tensor.chunks)}
    if unknown := sorted(needed - written.keys()):
        return f"{directory / STATE} has no checksum of {unknown[0]}"
    return None


def make_room(partial: Path, needed: int) -> None:
    """Make `partial` an empty directory; UserError when its disk has less than `needed` bytes free."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    free = shutil.disk_usage(partial).free
    if free < needed:
        partial.rmdir()
        raise UserError(
            f"{partial.parent}: a checkpoint takes about {needed / 2**20:,.1f} MiB and {free / 2**20:,.1f} MiB are "
            "free; free some space or move run.dir, then run the same command again to resume"
        )
