"""Reads and writes the safetensors files of a Hugging Face checkpoint; headers are checked before data is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from mugrpo_megatron.errors import UserError, way_out
from mugrpo_megatron.files.durable import durable_file, write_json
from mugrpo_megatron.files.json_text import file_inside, read_json
from mugrpo_megatron.files.tensors import raw_bytes
from mugrpo_megatron.files.weight_file import open_weights
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.table import entries

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.")
PREDICTING = frozenset({"deepseek_v3", "glm4_moe", "glm4_moe_lite"})
"""Families whose released files have layers of multi-token prediction after the model's last layer; transformers leaves
these out, too (`_keys_to_ignore_on_load_unexpected` of its classes)."""
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types that can be read: name in a safetensors header -> torch's type."""
TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""Types that can be written: torch's type -> name in a safetensors header."""


@dataclass(frozen=True)
class HFCheckpoint:
    """The tensors of a checkpoint, and the file of each."""

    directory: Path
    files: Mapping[str, str]
    """Tensor name -> file name."""
    dtypes: Mapping[str, torch.dtype]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    _places: dict[str, dict[str, tuple[int, list[int]]]] = field(default_factory=dict, repr=False, compare=False)
    """File -> (first byte, shape) of each of its tensors; filled when a tensor of the file is first read."""

    def read(self, name: str) -> torch.Tensor:
        """Map the tensor `name` from its file into memory; UserError when the file has become unreadable."""
        # `safe_open` is not used: it would parse the header for each tensor, and a file may have half a million.
        file, dtype = self.files[name], self.dtypes[name]
        path = self.directory / file
        try:
            if file not in self._places:
                self._places[file] = _places(path)
            begin, shape = self._places[file][name]
            if not math.prod(shape):
                return torch.empty(shape, dtype=dtype)
            mapped = np.memmap(path, np.uint8, mode="c", offset=begin, shape=(math.prod(shape) * dtype.itemsize,))
        except OSError as error:
            remedy = way_out(error, "restore it, or download it again")
            raise UserError(f"{path} cannot be read ({error.strerror or error}); {remedy}") from None
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path} is truncated or not a safetensors file ({error}); download it again") from None
        return torch.from_numpy(mapped).view(dtype).view(shape)


def open_checkpoint(directory: Path, architecture: Architecture) -> HFCheckpoint:
    """Find every tensor of a checkpoint, and compare names and shapes with those of the architecture.

    Only headers are read, and for a tied output layer the data of it and of the embedding. Rotary frequencies are
    ignored, and so are layers of multi-token prediction. The index need not agree with the files about
    ignored tensors or about a tied output layer.

    Raises UserError for a missing or truncated shard, an index that disagrees with the files, a missing tensor, one
    that the architecture does not have, a wrong shape, and a tied output layer that differs from the embedding.
    """

    def needed(name: str) -> bool:
        return not (_ignored(name, architecture) or (architecture.tied and name == HEAD))

    checkpoint = scan(directory, needed)
    files = checkpoint.files
    check_tensors(directory, files, checkpoint.shapes, architecture)
    if architecture.tied and HEAD in files and not torch.equal(checkpoint.read(HEAD), checkpoint.read(EMBEDDING)):
        raise UserError(
            f"{directory / files[HEAD]}: {HEAD} differs from {EMBEDDING}, though config.json ties them "
            "(tie_word_embeddings); set tie_word_embeddings to false if the model has an output layer of its own, or "
            "download these weights again"
        )
    return checkpoint


def check_tensors(
    directory: Path, files: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], architecture: Architecture
) -> None:
    """Raise UserError if names or shapes of a checkpoint's tensors are not the architecture's."""
    expected = {
        name: shape
        for entry in entries(architecture).values()
        for name, shape in zip(entry.hf, entry.hf_shapes(architecture), strict=True)
    }
    allowed = set(expected) | ({HEAD} if architecture.tied else set())
    extra = sorted(name for name in set(files) - allowed if not _ignored(name, architecture))
    if extra:
        raise UserError(
            f"{directory / files[extra[0]]} has the tensor {extra[0]!r}, which a {architecture.family} model with this "
            f"config.json does not have ({len(extra)} such tensors); take config.json and weights of one model"
        )
    missing = sorted(set(expected) - set(files))
    if missing:
        raise UserError(
            f"{directory} lacks {missing[0]!r}, which a {architecture.family} model with this config.json needs "
            f"({len(missing)} such tensors); restore the missing shard, or take config.json and weights of one model"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise UserError(
                f"{directory / files[name]}: {name} has shape {list(shapes[name])}, but config.json says {list(shape)}"
                "; take config.json and weights of one model"
            )


def _ignored(name: str, architecture: Architecture) -> bool:
    """Whether a tensor is not used: rotary frequencies, and layers of multi-token prediction in `PREDICTING`."""
    layer = LAYER.match(name)
    beyond = layer is not None and int(layer[1]) >= architecture.layers and architecture.family in PREDICTING
    return name.endswith(".rotary_emb.inv_freq") or beyond


def scan(directory: Path, needed: Callable[[str], bool]) -> HFCheckpoint:
    """Find every tensor of a checkpoint in the headers of its files.

    Raises UserError if there is no safetensors file, a file is missing or damaged, `model.safetensors` is beside an
    index that does not name it, a tensor's type is not in FLOATS, a tensor is in two files, or the index disagrees with
    the headers about a tensor for which `needed` is true.
    """
    index_path = directory / INDEX
    indexed: dict[str, str] | None = None
    if index_path.is_file():
        indexed = _weight_map(index_path)
        names = sorted({file for tensor, file in indexed.items() if needed(tensor)})
        # If both are there, transformers would load the single file, and SGLang the shards of the index.
        if SINGLE not in names and (directory / SINGLE).exists():
            raise UserError(
                f"{directory} has a {SINGLE} that {INDEX} does not name, so programs differ in the weights that they "
                f"load; remove the stale one: {SINGLE}, or {INDEX} with its shards"
            )
    elif (directory / SINGLE).is_file():
        names = [SINGLE]
    else:
        raise UserError(
            f"{directory} has neither {SINGLE} nor {INDEX}; only safetensors checkpoints are supported: save the model "
            "as one"
        )
    files: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name in names:
        path = file_inside(index_path, name)
        with open_weights(path, "pt") as opened:
            for tensor in opened.keys():  # noqa: SIM118  a safetensors handle is not a mapping
                if tensor in files:
                    raise UserError(
                        f"{tensor!r} is in both {files[tensor]} and {name} of {directory}; download these files again"
                    )
                files[tensor] = name
                header = opened.get_slice(tensor)
                shapes[tensor] = tuple(header.get_shape())
                if header.get_dtype() not in FLOATS:
                    raise UserError(
                        f"{path}: {tensor!r} has type {header.get_dtype()}, which a quantised checkpoint may have and "
                        f"which is not supported; use the model's {' or '.join(FLOATS)} release"
                    )
                dtypes[tensor] = FLOATS[header.get_dtype()]
    differing = set(indexed.items()) ^ set(files.items()) if indexed is not None else set()
    if indexed is not None and (wrong := min((name for name, _ in differing if needed(name)), default=None)):
        raise UserError(
            f"{index_path} disagrees with the shards about {wrong!r}: the index says {indexed.get(wrong, 'nothing')}, "
            f"the shards say {files.get(wrong, 'nothing')}; download the index and the shards again"
        )
    return HFCheckpoint(directory, files, dtypes, shapes)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(
            f"{index} is not a safetensors index: its weight_map does not map tensors to files; download it again"
        )
    return weight_map


def _places(path: Path) -> dict[str, tuple[int, list[int]]]:
    """Name -> the offset in bytes and the shape of a safetensors file's tensor; `scan` has checked the header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: (8 + size + entry["data_offsets"][0], entry["shape"]) for name, entry in header.items()}


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and type of a tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightFile:
    file: str
    specs: tuple[TensorSpec, ...]

    @property
    def bytes(self) -> int:
        return sum(spec.bytes for spec in self.specs)


def divide(specs: Sequence[TensorSpec], shard_bytes: int) -> list[WeightFile]:
    """Divide tensors, in order, into files of at most `shard_bytes`, as transformers does.

    A tensor larger than that gets a file of its own.
    """
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.bytes
    if len(groups) == 1:
        return [WeightFile(SINGLE, tuple(specs))]
    return [
        WeightFile(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, start=1)
    ]


def write_shard(directory: Path, shard: WeightFile, tensors: Iterable[torch.Tensor]) -> None:
    """Write a file of a checkpoint atomically; `tensors`, on any device, are in the order of `shard.specs`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in shard.specs:
        end = offset + spec.bytes
        header[spec.name] = {
            "dtype": TYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode("utf-8")
    # The format requires that the data starts at a multiple of 8.
    encoded += b" " * (-len(encoded) % 8)
    with durable_file(directory / shard.file) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for spec, tensor in zip(shard.specs, tensors, strict=True):
            if tuple(tensor.shape) != spec.shape:
                raise ValueError(
                    f"{spec.name} has shape {tuple(tensor.shape)}, but the header of its file says {spec.shape}"
                )
            file.write(raw_bytes(tensor.to("cpu", spec.dtype)))


def write_index(directory: Path, shards: Sequence[WeightFile]) -> None:
    """Write the index, which says in which file each tensor is, unless there is only one file."""
    if len(shards) == 1:
        return
    weight_map = {spec.name: shard.file for shard in shards for spec in shard.specs}
    total = sum(shard.bytes for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / INDEX, index)
