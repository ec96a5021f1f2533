"""Decoding on CPU in C: attention over the paged cache, and the steps between a layer's matrix products.

The source is compiled at an engine's start, while SGLang is imported, which takes longer. No library is cached on disk,
because a later run may find it on another machine, whose processor differs.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys

import torch

from mugrpo_megatron.cpu.kernel_source import TYPES, source
from mugrpo_megatron.files.scratch import Scratch

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
"""Compiler flags. Sums may run in any order, so that they are vectorised; `-ffast-math` would also change how torch
rounds tiny numbers."""
SHARED = "-fopenmp"
"""Compiler flag that lets threads share a call. Not every compiler has it; without it a call runs on one thread."""
WIDE = ["-mprefer-vector-width=512"]
"""Compiler flag for x86 that allows vectors of 512 bits; by default compilers use 256."""
BUILD_SECONDS = 900.0
DTYPES = {name: getattr(torch, name) for name in TYPES}
"""Name of a type that the functions support -> torch's type."""


class Build:
    """A run of the C compiler, which builds the library of the functions in `kernel_source`."""

    def __init__(self) -> None:
        self._folder = Scratch("kernels")
        self._library = self._folder.path / "kernels.so"
        self._compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
        self._process = self._start(self._compiler, SHARED) if self._compiler else None

    def wait(self) -> ctypes.CDLL | None:
        """Wait for the compiler and load the library; None, with a line in the engine's log, if it cannot be built."""
        cause = f"no C compiler ({', '.join(COMPILERS)}) was found"
        with self._folder:
            if self._compiler and self._process:
                try:
                    code = self._exit_code(self._process) and self._exit_code(self._start(self._compiler))
                    if code == 0:
                        return Kernels.checked(ctypes.CDLL(str(self._library)))
                    cause = f"the C compiler ended with {code}"
                except subprocess.TimeoutExpired:
                    cause = f"the C compiler did not end within {BUILD_SECONDS:g} s"
                # Raised when the compiler reported success but did not build this library.
                except (OSError, AttributeError) as error:
                    cause = f"the compiled library cannot be loaded ({error})"
        print(f"{cause}: torch's operations decode instead, at a fraction of the speed", file=sys.stderr)
        return None

    def _start(self, compiler: str, *flags: str) -> subprocess.Popen[bytes]:
        code = self._library.with_suffix(".c")
        code.write_text(source(), encoding="utf-8")
        wide = WIDE if platform.machine() == "x86_64" else []
        return subprocess.Popen(
            [compiler, *FLAGS, *flags, *wide, "-shared", "-fPIC", str(code), "-o", str(self._library), "-lm"],
            # A killed compiler leaves temporary files. They are then in this folder, which is removed.
            env={**os.environ, "TMPDIR": str(self._folder.path)},
        )

    def _exit_code(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the compiler and return its exit code; after `BUILD_SECONDS` kills it and raises TimeoutExpired."""
        try:
            return process.wait(BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


LARGE_PAGE = 1 << 21
MADV_HUGEPAGE = 14
"""Advice to `madvise(2)`: use huge pages."""
SHARED_WORK = 1 << 17
"""The number of elements from which on threads share a call."""


class Kernels:
    """The functions in C, on float32 or bfloat16 tensors on CPU. As many threads as torch has share a large call."""

    NAMES = ("decode", "rms_norm", "silu_and_mul", "rotate")

    @classmethod
    def checked(cls, library: ctypes.CDLL) -> ctypes.CDLL:
        """Return `library`; raises AttributeError if it lacks one of the functions."""
        cls(library)
        return library

    def __init__(self, library: ctypes.CDLL) -> None:
        self._sample = library.sample
        self._functions = {
            (name, DTYPES[kind]): getattr(library, f"{name}_{kind}") for name in self.NAMES for kind in TYPES
        }
        for function in (self._sample, *self._functions.values()):
            function.restype = None

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
        """Compute attention for B sequences: one query [Hq, D] of sequence i attends to its first `lengths[i]` tokens.

        Position p of sequence i is row `slots[requests[i], p]` of keys and values [rows, Hkv, D]. `query` is [B, Hq,
        D], `slots` int32 [requests, positions], `requests` and `lengths` int64 [B]. Returns [B, Hq, D].
        """
        sequences, heads, width = query.shape
        kv_heads = keys.shape[1]
        out = query.new_empty(query.shape)
        longest = int(lengths.max())
        scores = heads * (longest + 15)
        scratch = torch.empty(torch.get_num_threads() * (scores + (kv_heads + 2 * heads) * width))
        self._functions["decode", query.dtype](
            *_rows(sequences, 2 * longest * kv_heads * width), _p(query), _n(query.stride(0)), _p(keys), _p(values),
            _p(slots), _n(slots.stride(0)), _p(requests), _p(lengths), _n(kv_heads), _n(heads // kv_heads), _n(width),
            ctypes.c_float(scale), _p(scratch), _n(scores), _p(out),
        )  # fmt: skip
        return out

    def rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Return the RMSNorm of x [..., D], or of x + `residual`, which also replaces `residual` in place."""
        out = torch.empty_like(x)
        width = x.shape[-1]
        behind = _n(0) if residual is None else _p(residual)
        self._functions["rms_norm", x.dtype](
            *_rows(x.numel() // width, width), _p(x), behind, _p(weight), _n(width), ctypes.c_float(epsilon), _p(out)
        )
        return out

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(x[..., :D]) * x[..., D:] of x [..., 2 D]."""
        width = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], width)
        self._functions["silu_and_mul", x.dtype](*_rows(out.numel() // width, width), _p(x), _n(width), _p(out))
        return out

    def rotate(self, x: torch.Tensor, width: int, cache: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotate the heads of x [T, heads * width] in place by `cache[positions]` [T, width]: cosines, then sines."""
        heads = x.shape[1] // width
        self._functions["rotate", x.dtype](
            *_rows(len(x), heads * width), _p(x), _n(x.stride(0)), _n(heads), _n(width), _p(cache), _p(positions)
        )

    def sample(self, logits: torch.Tensor, temperatures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a token from softmax(logits / temperatures) for each row of logits [B, V].

        Returns the tokens, int32 [B], and their log-probabilities, float32 [B]. Logits and temperatures are float32,
        temperatures contiguous; each row takes one number from torch's generator.
        """
        rows, width = logits.shape
        uniforms = torch.rand(rows, dtype=torch.float64)
        tokens, logprobs = torch.empty(rows, dtype=torch.int32), torch.empty(rows)
        self._sample(
            *_rows(rows, width), _p(logits), _n(width), _p(temperatures), _p(uniforms), _p(tokens), _p(logprobs)
        )
        return tokens, logprobs


def use_large_pages(tensor: torch.Tensor) -> None:
    """Ask Linux for pages of 2 MB for a tensor whose rows are read out of order; does nothing on other systems."""
    # With small pages the processor looks up the address of each row of a sequence in the page table, which takes 15 to
    # 25 % of attention's time.
    if not sys.platform.startswith("linux"):
        return
    start = -(-tensor.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    size = (tensor.data_ptr() + tensor.nbytes - start) // LARGE_PAGE * LARGE_PAGE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_HUGEPAGE)


def fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `decode` supports these tensors: all of one type of `DTYPES`, keys and values contiguous and of one
    shape, the heads of a query row contiguous."""
    contiguous = query.stride()[1:] == (query.shape[2], 1) and keys.is_contiguous() and values.is_contiguous()
    typed = query.dtype in DTYPES.values() and query.dtype == keys.dtype == values.dtype
    return contiguous and keys.shape == values.shape and typed


def ready(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the functions in C accept these tensors: contiguous, of one type of `DTYPES`, and `x` not empty."""
    typed = x.dtype in DTYPES.values() and all(other.dtype == x.dtype for other in others)
    return typed and x.numel() > 0 and all(tensor.is_contiguous() for tensor in (x, *others))


def _rows(rows: int, work: int) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    """The number of rows in a call, each of `work` elements, and whether threads share the rows."""
    return _n(rows), _n(torch.get_num_threads() > 1 and rows * work >= SHARED_WORK)


def _n(count: int) -> ctypes.c_int64:
    return ctypes.c_int64(count)


def _p(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
