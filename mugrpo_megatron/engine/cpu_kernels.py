"""The C functions of `cpu_source` on torch's tensors."""

from __future__ import annotations

import ctypes
import sys

import torch

LARGE_PAGE = 1 << 21
MADV_HUGEPAGE = 14
"""Linux's number for this advice."""
SHARED_WORK = 1 << 17
"""Elements from which threads share a call."""


class Kernels:
    """The functions on float32 tensors on CPU; threads of torch's number share large calls."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("decode", "rms_norm", "silu_and_mul", "rotate"):
            getattr(library, name).restype = None

    def decode(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention of one query per sequence [B, Hq, D] to its first `lengths` [B] positions; returns [B, Hq, D].

        Position p of sequence i is row `slots[requests[i], p]` (int32) of keys and values [rows, Hkv, D]; `requests`
        and `lengths` are int64.
        """
        sequences, heads, width = query.shape
        kv_heads = keys.shape[1]
        out = query.new_empty(query.shape)
        longest = int(lengths.max())
        room = heads * (longest + 15)
        scores = torch.empty(torch.get_num_threads() * room)
        self._library.decode(
            *_rows(sequences, 2 * longest * kv_heads * width), _p(query), _n(query.stride(0)), _p(keys), _p(values),
            _p(slots), _n(slots.stride(0)), _p(requests), _p(lengths), _n(kv_heads), _n(heads // kv_heads), _n(width),
            ctypes.c_float(scale), _p(scores), _n(room), _p(out),
        )  # fmt: skip
        return out

    def rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """The norm of x [..., D], after adding it to `residual` in place if there is one."""
        out = torch.empty_like(x)
        width = x.shape[-1]
        behind = _n(0) if residual is None else _p(residual)
        self._library.rms_norm(
            *_rows(x.numel() // width, width), _p(x), behind, _p(weight), _n(width), ctypes.c_float(epsilon), _p(out)
        )
        return out

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu(x[..., :D]) * x[..., D:] of x [..., 2 D]."""
        width = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], width)
        self._library.silu_and_mul(*_rows(out.numel() // width, width), _p(x), _n(width), _p(out))
        return out

    def rotate(self, x: torch.Tensor, width: int, cache: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotate the heads of x [T, heads * width] in place by `cache[positions]`, which is [cos, sin] [width]."""
        heads = x.shape[1] // width
        self._library.rotate(
            *_rows(len(x), heads * width), _p(x), _n(x.stride(0)), _n(heads), _n(width), _p(cache), _p(positions)
        )


def use_large_pages(tensor: torch.Tensor) -> None:
    """Ask the kernel for pages of 2 MB under a tensor whose rows are read far apart; does nothing where it has none.

    The rows of a sequence are then found without walking the page table for each: 15 to 25 % of attention's time.
    """
    if not sys.platform.startswith("linux"):
        return
    start = -(-tensor.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    size = (tensor.data_ptr() + tensor.nbytes - start) // LARGE_PAGE * LARGE_PAGE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_HUGEPAGE)


def fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `decode` takes them: float32, keys and values of one width, heads next to each other."""
    together = query.stride()[1:] == (query.shape[2], 1) and keys.is_contiguous() and values.is_contiguous()
    return together and keys.shape == values.shape and query.dtype == keys.dtype == values.dtype == torch.float32


def _rows(rows: int, work: int) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    """The rows of a call, each of `work` elements, and whether threads share them."""
    return _n(rows), _n(torch.get_num_threads() > 1 and rows * work >= SHARED_WORK)


def _n(count: int) -> ctypes.c_int64:
    return ctypes.c_int64(count)


def _p(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
