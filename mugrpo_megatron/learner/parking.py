"""Tensors whose bytes wait in host memory.

Only storages are emptied: every tensor object, and every view of it (Megatron's buffers are full of them), stays valid
and has its values again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Parked:
    """A tensor whose storage is empty, and where its bytes are meanwhile."""

    tensor: torch.Tensor
    bytes: int
    host: torch.Tensor | None
    """uint8 copy in (pinned, beside CUDA) host memory; None for a tensor that wakes up as zeros."""


def park(tensors: Iterable[torch.Tensor], keep: bool = True) -> list[Parked]:
    """Empty the storages of `tensors`, each of which is all of its storage; without `keep` their values are dropped.

    On CUDA the copies are queued one behind the other and the host goes on; so are those of `unpark`, and with them
    the learner reads and packs its first update. Whoever hands the memory to another process waits for the device.
    """
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
        host = None
        if keep:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
            host.copy_(whole, non_blocking=True)
        storage.resize_(0)
        found.append(Parked(tensor, size, host))
    return found


def unpark(parked: Iterable[Parked]) -> None:
    """Fill the storages again."""
    for each in parked:
        storage = each.tensor.untyped_storage()
        storage.resize_(each.bytes)
        whole = torch.empty(0, dtype=torch.uint8, device=each.tensor.device).set_(storage)  # type: ignore[call-overload]
        whole.zero_() if each.host is None else whole.copy_(each.host, non_blocking=True)
