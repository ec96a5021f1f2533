"""Loads a Hugging Face checkpoint into the learner's shards, and saves the learner's weights as such a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mugrpo_megatron.errors import UserError, way_out
from mugrpo_megatron.files.durable import durable_directory, write_content, write_text
from mugrpo_megatron.files.hf_config import CONFIG, read_config
from mugrpo_megatron.files.vocabulary import check_carried, check_vocabulary
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.buckets import SAVE_BUCKET_BYTES, BucketPlan, build_plan, planned_tensors
from mugrpo_megatron.weights.safetensors_dir import HFCheckpoint, divide, open_checkpoint, write_index, write_shard
from mugrpo_megatron.weights.table import Entry, local_parameters, merge_from_hf, pad_vocab, shard, tensor_group

SHARD_BYTES = 4 * 1024**3
CARRIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files copied unchanged; config.json is rewritten, because it has the weights' type."""
TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates that have names, beside the default one (transformers' `CHAT_TEMPLATE_DIR`)."""
PREDICTED = "num_nextn_predict_layers"


@torch.no_grad()
def load_hf(chunks: Sequence[torch.nn.Module], hf_dir: Path, architecture: Architecture) -> None:
    """Fill this rank's parameters from a checkpoint directory, cast to the parameters' type.

    Every rank reads only the layers that it holds; peak memory beyond the model is the largest parameter. All headers
    are compared with the architecture first: a checkpoint that does not fit raises UserError before any value is
    copied.
    """
    checkpoint = open_checkpoint(hf_dir, architecture)
    for entry, parameter in local_parameters(chunks, architecture):
        parameter.copy_(read_shard(checkpoint, entry, architecture, parameter.shape))


def read_shard(checkpoint: HFCheckpoint, entry: Entry, architecture: Architecture, shape: torch.Size) -> torch.Tensor:
    """Read this rank's shard of one parameter from a checkpoint, in the checkpoint's type.

    Raises UserError if a value is not finite, or if the shard does not have the `shape` of the model's parameter.
    """
    group = tensor_group(entry)
    tensors = [checkpoint.read(name) for name in entry.hf]
    for name, tensor in zip(entry.hf, tensors, strict=True):
        check_finite(checkpoint, name, tensor)
    unsharded = merge_from_hf(entry, tensors, architecture)
    unsharded = pad_vocab(entry, unsharded, shape[0] * group.size())
    local = shard(entry, unsharded, group.size(), group.rank())
    if local.shape != shape:
        raise UserError(
            f"{entry.megatron}: the model was built with shape {list(shape)} on a rank, the checkpoint gives "
            f"{list(local.shape)}, so the model was not built from this checkpoint's config.json; load a checkpoint of "
            "the model that was built"
        )
    return local


def check_finite(checkpoint: HFCheckpoint, name: str, tensor: torch.Tensor) -> None:
    """Raise UserError if a value of `tensor`, which is `name` in the checkpoint, is NaN or infinite."""
    if not torch.isfinite(tensor).all():
        kind = "not a number (NaN)" if torch.isnan(tensor).any() else "infinite"
        raise UserError(
            f"{checkpoint.directory / checkpoint.files[name]}: {name}: a value is {kind}, so the checkpoint is "
            "damaged; restore it from its source"
        )


def save_hf(
    chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    like: Path,
    out: Path,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write the learner's weights as a checkpoint `out`, with the config and tokenizer of the checkpoint `like`.

    Collective; rank 0 writes. `notes` are JSON objects and files to write with the weights, by name. The directory
    appears complete or not at all; with `replace` an earlier one stays until then. Memory beyond the model is one
    bucket. Raises UserError on every rank when `out` is `like`, when it exists and `replace` is false, and when it
    cannot be written.
    """
    if out.exists() and like.exists() and out.samefile(like):
        raise UserError(f"{out} is the model that config and tokenizer come from; name another directory")
    if out.exists() and not replace:
        raise UserError(f"{out} exists already; remove it or name another directory")
    plan = build_plan(chunks, architecture, SAVE_BUCKET_BYTES)
    tensors = (tensor for _, tensor in planned_tensors(plan, chunks, architecture))
    failure: list[UserError | None] = [None]
    if dist.get_rank() == 0:
        try:
            _write(out, plan, shard_bytes, tensors, like, notes or {})
        except UserError as error:
            failure = [error]
    for _ in tensors:
        pass  # rank 0 goes on after a failure, since every rank takes part in every gather
    dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]


@torch.no_grad()
def gather_hf(
    chunks: Sequence[torch.nn.Module], architecture: Architecture, like: Path, out: Path, notes: Mapping[str, Any]
) -> Callable[[], None]:
    """Gather the learner's weights in rank 0's host memory, and return the function that writes them as `save_hf` does.

    Collective. The returned function communicates with no rank, so it may be called later, in any thread, while
    training continues; on ranks other than 0 it does nothing. It replaces an earlier `out`, and raises UserError when
    that cannot be written. Until it is done, rank 0's host memory holds the whole model.
    """
    plan = build_plan(chunks, architecture, SAVE_BUCKET_BYTES)
    is_main = dist.get_rank() == 0
    tensors = (tensor for _, tensor in planned_tensors(plan, chunks, architecture))
    # Every rank exhausts the iterator, because each tensor is gathered by all.
    host = [tensor.to("cpu", copy=True) for tensor in tensors if is_main]
    if not is_main:
        return lambda: None
    return lambda: _write(out, plan, SHARD_BYTES, iter(host), like, notes)


def _write(
    out: Path, plan: BucketPlan, shard_bytes: int, tensors: Iterator[torch.Tensor], like: Path, notes: Mapping[str, Any]
) -> None:
    """Write the checkpoint `out` with the plan's `tensors`, in its order; UserError if it cannot be written."""
    specs = [slot for bucket in plan.buckets for slot in bucket.slots]
    shards = divide(specs, shard_bytes)
    try:
        with durable_directory(out) as partial:
            for shard in shards:
                write_shard(partial, shard, islice(tensors, len(shard.specs)))
            write_index(partial, shards)
            carry_files(like, partial, max(specs, key=lambda spec: spec.bytes).dtype)
            for name, note in notes.items():
                (partial / name).parent.mkdir(exist_ok=True)
                write_content(partial / name, note)
    except OSError as error:
        remedy = way_out(error, "choose another directory")
        raise UserError(f"{out} cannot be written ({error.filename}: {error.strerror}); {remedy}") from None


def carried_files(directory: Path, more: Sequence[str] = ()) -> list[str]:
    """The names of a checkpoint's files that are copied unchanged: those of `CARRIED` and `more` that exist, and named
    chat templates."""
    templates = sorted(f"{TEMPLATES}/{path.name}" for path in (directory / TEMPLATES).glob("*.jinja"))
    return [name for name in (*CARRIED, *more, *templates) if (directory / name).is_file()]


def copy_files(source: Path, out: Path, names: Iterable[str]) -> None:
    """Copy the files `names` from `source` to `out`; a name may begin with a folder."""
    for name in names:
        (out / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, out / name)


def carry_files(like: Path, out: Path, dtype: torch.dtype) -> None:
    """Copy tokenizer and generation config from the checkpoint `like` to `out`, and its config.json with two changes.

    The config gets `dtype`, the type of the stored weights, and no layers of multi-token prediction.
    """
    names = carried_files(like)
    check_carried(like, names)
    copy_files(like, out, names)
    config: dict[str, Any] = dict(read_config(like))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    # Layers of multi-token prediction are not trained and not stored, so an engine must not look for them.
    if config.get(PREDICTED):
        config[PREDICTED] = 0
    write_text(out / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def check_tokenizer(directory: Path, architecture: Architecture) -> None:
    """Raise UserError when a file that `carry_files` copies cannot be read or is not what its name says.

    It is also raised when the tokenizer has an id beyond the embedding's rows.
    """
    check_carried(directory, carried_files(directory))
    check_vocabulary(directory, architecture.vocab_size)
