"""Tensors whose bytes wait in host memory.

Only storages are emptied: every tensor object, and every view of it (Megatron's buffers are full of them), stays valid
and has its values again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

SLAB = 1 << 26
"""Bytes of host memory taken at a time, a power of two: torch rounds what it pins up to one, so tensors of their own
sizes would take up to twice their bytes, and it keeps what is given back for the next request of the same size."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor whose storage is empty, and where its bytes are meanwhile."""

    tensor: torch.Tensor
    bytes: int
    host: list[torch.Tensor] | None
    """uint8 pieces of (pinned, beside CUDA) host memory, in order; None for a tensor that wakes up as zeros."""


@dataclass(slots=True)
class _Slabs:
    """Host memory, handed out without gaps."""

    left: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def take(self, size: int, pinned: bool) -> Iterator[torch.Tensor]:
        """Pieces of `size` bytes together."""
        while size:
            if not len(self.left):
                self.left = torch.empty(SLAB, dtype=torch.uint8, pin_memory=pinned)
            piece, self.left = self.left[:size], self.left[size:]
            size -= len(piece)
            yield piece


def move_to_host(tensors: Iterable[torch.Tensor], keep: bool = True) -> list[HostCopy]:
    """Empty the storages of `tensors`, each of which is all of its storage; without `keep` their values are dropped.

    On CUDA the copies are queued one behind the other and the host goes on; so are those of `copy_back`, and with them
    the learner reads and packs its first update. Whoever hands the memory to another process waits for the device.
    """
    found: list[HostCopy] = []
    room = _Slabs()
    for tensor in tensors:
        whole = _bytes_of(tensor)
        host = None
        if keep:
            host = list(room.take(len(whole), pinned=tensor.is_cuda))
            for piece, part in _pairs(host, whole):
                piece.copy_(part, non_blocking=True)
        found.append(HostCopy(tensor, len(whole), host))
        tensor.untyped_storage().resize_(0)
    return found


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
    """Each piece of host memory with the part of the tensor's bytes that it holds."""
    return zip(pieces, whole.split([len(piece) for piece in pieces]), strict=True)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage as uint8."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]
