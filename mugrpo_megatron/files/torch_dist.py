"""Regions of the tensors of a distributed checkpoint: the one reader of its data files, for resuming and converting.

Only tensors are read, each by torch's `weights_only` unpickler. The other objects that Megatron stores (`_extra_state`)
are never unpickled: Transformer Engine would run what they say, and with the scaling used here they hold nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import torch
from torch.distributed.checkpoint.utils import _create_file_view

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.torch_dist_index import INDEX, Chunk, StoredTensor, read_index

SEVERAL = -1
"""Stands for the row of chunks that have several."""


class Reader:
    """Reads regions of tensors from a checkpoint directory, whatever layout it was written in."""

    def __init__(self, directory: Path) -> None:
        """Raises UserError when the directory is not a complete checkpoint or a data file is missing or too short."""
        self._directory = directory
        self._tensors = read_index(directory)
        self._rows: dict[str, dict[int, list[Chunk]]] = {}

    @property
    def files(self) -> set[str]:
        """Names of the files that hold the tensors and the index."""
        return {INDEX, *(chunk.file for stored in self._tensors.values() for chunk in stored.chunks)}

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Shape of a whole tensor, or None if the checkpoint does not have the key."""
        return self._tensors[key].shape if key in self._tensors else None

    def dtype(self, key: str) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self._stored(key).dtype))

    def read(self, key: str, index: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """The region of `shape` at the origin of the stack's slice `index`, in the stored type, on the CPU."""
        region = torch.empty((1,) * len(index) + shape, dtype=self.dtype(key))
        self.fill(region, key, index + (0,) * len(shape))
        return region.view(shape)

    @torch.no_grad()
    def fill(self, target: torch.Tensor, key: str, offsets: tuple[int, ...], padded: bool = False) -> None:
        """Copy the region at `offsets` into `target`, which has as many axes as the tensor; casts to its type.

        With `padded` the region may reach beyond the stored tensor, and is 0 there. Raises UserError when the
        checkpoint lacks the tensor or a part of the region, or when its data is damaged.
        """
        stored = self._stored(key)
        inside = [
            max(0, min(whole - start, size))
            for whole, start, size in zip(stored.shape, offsets, target.shape, strict=False)
        ]
        if len(stored.shape) != target.dim() or (inside != list(target.shape) and not padded):
            region = " x ".join(f"{start}:{start + size}" for start, size in zip(offsets, target.shape, strict=False))
            raise UserError(
                f"{self._directory}: {key} has shape {list(stored.shape)}, without the region {region} that this model "
                "needs; the checkpoint is of another model"
            )
        if padded:
            target.zero_()
        filled = 0
        rows = range(offsets[0], offsets[0] + target.shape[0]) if offsets else range(0)
        for chunk in self._near(key, stored, rows):
            overlap = list(_overlap(chunk, offsets, target.shape))
            if all(length > 0 for _, _, length in overlap):
                data, part = self._load(key, stored, chunk), target
                for axis, (source, start, length) in enumerate(overlap):
                    data, part = data.narrow(axis, source, length), part.narrow(axis, start, length)
                part.copy_(data)
                filled += part.numel()
        if filled != math.prod(inside):
            raise UserError(f"{self._directory}: {key} is incomplete: only {filled} of {math.prod(inside)} values")

    def _stored(self, key: str) -> StoredTensor:
        if key not in self._tensors:
            raise UserError(
                f"{self._directory} has no {key}, which this model needs; the checkpoint is of another model"
            )
        return self._tensors[key]

    def _near(self, key: str, stored: StoredTensor, rows: range) -> Iterator[Chunk]:
        """The chunks that can overlap these rows of the first axis: a stack of layers has thousands, one row each."""
        if key not in self._rows:
            of_row = self._rows[key] = {}
            for chunk in stored.chunks:
                of_row.setdefault(chunk.offsets[0] if chunk.sizes[:1] == (1,) else SEVERAL, []).append(chunk)
        for row in (SEVERAL, *rows):
            yield from self._rows[key].get(row, ())

    def _load(self, key: str, stored: StoredTensor, chunk: Chunk) -> torch.Tensor:
        path = self._directory / chunk.file
        try:
            with path.open("rb") as stream, warnings.catch_warnings(action="ignore"):  # torch's, about odd pickles
                view = _create_file_view(stream, chunk.start, chunk.length)
                data = torch.load(cast(IO[bytes], view), map_location="cpu", weights_only=True)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})") from None
        except Exception as error:  # a damaged archive can raise anything
            raise UserError(f"{path} is damaged: {key} cannot be read from it ({type(error).__name__})") from None
        plain = type(data) is torch.Tensor and data.layout == torch.strided and data.device.type == "cpu"
        if not plain or tuple(data.shape) != chunk.sizes or data.dtype != getattr(torch, stored.dtype):
            raise UserError(f"{path} is damaged: it does not hold the part of {key} that {INDEX} describes")
        return data


def _overlap(chunk: Chunk, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(start in the chunk, start in the region, length) for each axis; a length of 0 or less if they are disjoint."""
    for at, size, start, extent in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True):
        first = max(at, start)
        yield first - at, first - start, min(at + size, start + extent) - first
