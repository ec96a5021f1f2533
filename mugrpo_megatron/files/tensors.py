"""The bytes of tensors, and checksums of them that two processes can compare."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

TensorChecksums = dict[str, tuple[str, str]]
"""Name of a tensor -> its dtype (`bfloat16`, ...) and the SHA-256 of its bytes in row-major order."""


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor; without a copy if it is on the CPU and contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def tensor_checksums(tensors: Iterable[tuple[str, torch.Tensor]]) -> TensorChecksums:
    """Returns the checksum of each tensor; they are computed by one thread per core."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        pending = [(name, dtype_name(tensor), pool.submit(_sum, tensor)) for name, tensor in tensors]
        return {name: (dtype, future.result()) for name, dtype, future in pending}


def _sum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()
