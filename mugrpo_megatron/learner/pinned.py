"""Move the bytes of tensors to pinned host memory and back.

Only storages are emptied: every tensor object and every view of it (Megatron's buffers have many) stays valid and has
its values again after `copy_back`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

SLAB = 1 << 26
"""Bytes of one host allocation, a power of two: torch rounds pinned allocations up to a power of two, so one for each
tensor could take twice its bytes, and caches freed ones for later requests of the same size."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor with an emptied storage, and its bytes in host memory."""

    tensor: torch.Tensor
    bytes: int
    host: list[torch.Tensor] | None
    """uint8 pieces of host memory (pinned for CUDA), in order; None for a tensor that is restored as zeros."""


@dataclass(slots=True)
class _Slabs:
    """Allocator of host memory without gaps."""

    left: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def take(self, size: int, pinned: bool) -> Iterator[torch.Tensor]:
        """Pieces with `size` bytes in total."""
        while size:
            if not len(self.left):
                self.left = torch.empty(SLAB, dtype=torch.uint8, pin_memory=pinned)
            piece, self.left = self.left[:size], self.left[size:]
            size -= len(piece)
            yield piece


def move_to_host(tensors: Iterable[torch.Tensor], keep: bool = True) -> list[HostCopy]:
    """Empty the storages of `tensors`, each of which fills its storage; without `keep` their values are dropped.

    On CUDA the copies here and in `copy_back` are asynchronous, so the learner reads and packs its first update while
    they run. Synchronise the device before another process takes the memory.
    """
    copies: list[HostCopy] = []
    room = _Slabs()
    for tensor in tensors:
        whole = _bytes_of(tensor)
        host = None
        if keep:
            host = list(room.take(len(whole), pinned=tensor.is_cuda))
            for piece, part in _pairs(host, whole):
                piece.copy_(part, non_blocking=True)
        copies.append(HostCopy(tensor, len(whole), host))
        tensor.untyped_storage().resize_(0)
    return copies


def copy_back(copies: Iterable[HostCopy]) -> None:
    """Fill the storages again."""
    for each in copies:
        each.tensor.untyped_storage().resize_(each.bytes)
        whole = _bytes_of(each.tensor)
        if each.host is None:
            whole.zero_()
            continue
        for piece, part in _pairs(each.host, whole):
            part.copy_(piece, non_blocking=True)


def _pairs(pieces: list[torch.Tensor], whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece of host memory, paired with the part of the tensor that it holds."""
    return zip(pieces, whole.split([len(piece) for piece in pieces]), strict=True)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage as uint8."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]
