"""Compiles the C functions of `cpu_source` at an engine's start, next to the imports of SGLang, which take longer.

Nothing is kept on disk: a library built before could be of another machine.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from mugrpo_megatron.cpu.kernel_source import SOURCE

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
"""Sums in any order, so that they are vectorised; `-ffast-math` would also change how torch rounds tiny numbers."""
SHARED = "-fopenmp"
"""Threads that share a call. Not every compiler has them; without, each call runs on one thread."""
WIDE = ["-mprefer-vector-width=512"]
"""On x86, where compilers take half of a register by default."""
BUILD_SECONDS = 60.0


class Build:
    """A compiler at work."""

    def __init__(self) -> None:
        """Start the compiler; returns at once."""
        self._folder = tempfile.TemporaryDirectory(prefix="mugrpo-kernels-")
        self._library = Path(self._folder.name) / "kernels.so"
        self._compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
        self._process = self._start(self._compiler, SHARED) if self._compiler else None

    def wait(self) -> ctypes.CDLL | None:
        """The library; None, with a line in the engine's log, where it cannot be built."""
        cause = f"no C compiler ({', '.join(COMPILERS)}) was found"
        with self._folder:
            if self._compiler and self._process:
                try:
                    code = self._ended(self._process) and self._ended(self._start(self._compiler))
                    if code == 0:
                        return ctypes.CDLL(str(self._library))
                    cause = f"the C compiler ended with {code}"
                except subprocess.TimeoutExpired:
                    cause = f"the C compiler did not end within {BUILD_SECONDS:g} s"
                except OSError as error:
                    cause = f"the compiled library cannot be loaded ({error})"
        print(f"{cause}: torch's operations decode instead, at a fraction of the speed", file=sys.stderr)
        return None

    def _start(self, compiler: str, *flags: str) -> subprocess.Popen[bytes]:
        source = self._library.with_suffix(".c")
        source.write_text(SOURCE, encoding="utf-8")
        wide = WIDE if platform.machine() == "x86_64" else []
        return subprocess.Popen(
            [compiler, *FLAGS, *flags, *wide, "-shared", "-fPIC", str(source), "-o", str(self._library), "-lm"]
        )

    def _ended(self, process: subprocess.Popen[bytes]) -> int:
        """The compiler's exit code; ends it where it takes too long."""
        try:
            return process.wait(BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


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


HELD = "_forward_method"


def use_kernels(model: torch.nn.Module, kernels: Kernels) -> int:
    """Exchange the functions of the model's norms, gates and rotations; returns how many were."""
    exchanged = 0
    for module in model.modules():
        before = module.__dict__.get(HELD)
        if before is None or before != getattr(module, "forward_native", None):
            continue
        if type(module) is RMSNorm and module.variance_size_override is None:
            module.__dict__[HELD] = _norm(module, kernels, before)
        elif type(module) is SiluAndMul:
            module.__dict__[HELD] = _gate(kernels, before)
        elif isinstance(module, RotaryEmbedding) and _plain(module):
            module.__dict__[HELD] = _rotation(module, kernels, before)
        else:
            continue
        exchanged += 1
    return exchanged


def _norm(module: Any, kernels: Kernels, before: Any) -> Any:
    def norm(x, residual=None, post_residual_addition=None):  # type: ignore[no-untyped-def]
        if post_residual_addition is not None or not (_ready(x) and _ready(module.weight)):
            return before(x, residual, post_residual_addition)
        if residual is None:
            return kernels.rms_norm(x, None, module.weight, module.variance_epsilon)
        if not _ready(residual):
            return before(x, residual)
        return kernels.rms_norm(x, residual, module.weight, module.variance_epsilon), residual

    return norm


def _gate(kernels: Kernels, before: Any) -> Any:
    def gate(x):  # type: ignore[no-untyped-def]
        return kernels.silu_and_mul(x) if _ready(x) else before(x)

    return gate


def _rotation(module: Any, kernels: Kernels, before: Any) -> Any:
    def rotation(positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):  # type: ignore[no-untyped-def]
        cache = module.cos_sin_cache
        if offsets is not None or not (_ready(cache) and _in_rows(query) and _in_rows(key) and positions.ndim == 1):
            return before(positions, query, key, offsets, fused_set_kv_buffer_arg)
        for x in (query, key):
            kernels.rotate(x, module.head_size, cache, positions)
        return query, key

    return rotation


def _plain(module: RotaryEmbedding) -> bool:
    """Whether it rotates whole heads, half against half, by a cache of cosines and sines alone."""
    whole = module.rotary_dim == module.head_size and module.is_neox_style and not hasattr(module, "sin_cos_cache")
    return whole and type(module).forward_native is RotaryEmbedding.forward_native


def _ready(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous() and x.numel() > 0


def _in_rows(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.ndim == 2 and x.stride(1) == 1 and len(x) > 0
