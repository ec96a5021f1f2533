"""Decoding on CPU in C: attention over the paged cache, and the steps between a layer's matrix products.

The source is compiled at an engine's start, during the imports of SGLang, which take longer. Nothing is cached on disk,
because a library may have been built on another machine.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
"""Sums in any order, so that they are vectorised; `-ffast-math` would also change how torch rounds tiny numbers."""
SHARED = "-fopenmp"
"""Lets threads share a call. Not every compiler has it; without it each call runs on one thread."""
WIDE = ["-mprefer-vector-width=512"]
"""On x86, where compilers take half of a register by default."""
BUILD_SECONDS = 60.0


class Build:
    """A running C compiler."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mugrpo-kernels-")
        self._library = Path(self._folder.name) / "kernels.so"
        self._compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
        self._process = self._start(self._compiler, SHARED) if self._compiler else None

    def wait(self) -> ctypes.CDLL | None:
        """The library; None, with a line in the engine's log, if it cannot be built."""
        cause = f"no C compiler ({', '.join(COMPILERS)}) was found"
        with self._folder:
            if self._compiler and self._process:
                try:
                    code = self._exit_code(self._process) and self._exit_code(self._start(self._compiler))
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

    def _exit_code(self, process: subprocess.Popen[bytes]) -> int:
        """The compiler's exit code; kills it after `BUILD_SECONDS`."""
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
"""Smallest number of elements for which threads share a call."""


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
    """Ask the kernel for pages of 2 MB under a tensor whose rows are read far apart; Linux only."""
    # Saves the walk of the page table for each row of a sequence: 15 to 25 % of attention's time.
    if not sys.platform.startswith("linux"):
        return
    start = -(-tensor.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    size = (tensor.data_ptr() + tensor.nbytes - start) // LARGE_PAGE * LARGE_PAGE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_HUGEPAGE)


def fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `decode` supports them: float32, keys and values of one width, contiguous heads."""
    contiguous = query.stride()[1:] == (query.shape[2], 1) and keys.is_contiguous() and values.is_contiguous()
    return contiguous and keys.shape == values.shape and query.dtype == keys.dtype == values.dtype == torch.float32


def _rows(rows: int, work: int) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    """The rows of a call, each of `work` elements, and whether threads share them."""
    return _n(rows), _n(torch.get_num_threads() > 1 and rows * work >= SHARED_WORK)


def _n(count: int) -> ctypes.c_int64:
    return ctypes.c_int64(count)


def _p(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


SOURCE = r"""
#include <math.h>
#include <stdint.h>
#ifdef _OPENMP
int omp_get_thread_num(void);
#else
#define omp_get_thread_num() 0
#endif
#define ROWS _Pragma("omp parallel for schedule(static) if (shared)") for (int64_t i = 0; i < rows; i++)
#define INLINE static inline __attribute__((always_inline))
#define AHEAD 4 /* cache rows fetched ahead: the rows of a sequence are far apart, and no hardware follows them */

/* e^x for -60 <= x <= 60, and these limits' beyond, which are nothing next to 1, without a call, so that the compiler
   vectorises it. Cephes' polynomial, 2 ulp. Wider limits would lead to denormal numbers, at 100 cycles each. */
INLINE float exponential(float x) {
    x = x < -60.0f ? -60.0f : x;
    x = x > 60.0f ? 60.0f : x;
    int32_t n = (int32_t)(x * 1.44269504f + 127.5f) - 127;
    float r = x - (float)n * 0.693359375f + (float)n * 2.12194440e-4f, p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union { int32_t bits; float value; } power = {.bits = (n + 127) << 23};
    return (p * r * r + r + 1.0f) * power.value;
}

/* Sixteen numbers, wherever they lie: one register of AVX-512, several of other machines. */
typedef float wide __attribute__((vector_size(64), aligned(4), may_alias));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));

INLINE float total(wide x) {
    union { wide all; eight half[2]; } a = {.all = x};
    union { eight all; four half[2]; } b = {.all = a.half[0] + a.half[1]};
    const four c = b.half[0] + b.half[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

INLINE float dot(const float *a, const float *b, const int64_t width) {
    float sum = 0.0f;
    if (width % 16) {
        for (int64_t d = 0; d < width; d++) sum += a[d] * b[d];
        return sum;
    }
    wide sums = *(const wide *)a * *(const wide *)b;
    for (int64_t d = 16; d < width; d += 16) sums += *(const wide *)(a + d) * *(const wide *)(b + d);
    return total(sums);
}

INLINE void add(float *to, float share, const float *b, const int64_t width) {
    if (width % 16)
        for (int64_t d = 0; d < width; d++) to[d] += share * b[d];
    else
        for (int64_t d = 0; d < width; d += 16) *(wide *)(to + d) += share * *(const wide *)(b + d);
}

INLINE void fetch(const float *row, int64_t floats) {
    for (int64_t i = 0; i < floats; i += 16) __builtin_prefetch(row + i);
}

INLINE void attend(const float *restrict query, const float *restrict keys, const float *restrict values,
                   const int32_t *restrict slots, int64_t length, int64_t heads, int64_t group, const int64_t width,
                   float scale, float *restrict scores, float *restrict out) {
    const int64_t row = heads * width, all = heads * group, room = (length + 15) / 16 * 16;
    for (int64_t t = 0; t < length; t++) {
        const float *key = keys + slots[t] * row;
        if (t + AHEAD < length) fetch(keys + slots[t + AHEAD] * row, row);
        for (int64_t h = 0, left = group; h < all; h++) {
            scores[h * room + t] = dot(query + h * width, key, width) * scale;
            if (--left == 0) key += width, left = group;
        }
    }
    for (int64_t h = 0; h < all; h++) {
        float *s = scores + h * room, most = s[0], sum = 0.0f;
        for (int64_t t = 1; t < length; t++) most = s[t] > most ? s[t] : most;
        for (int64_t t = length; t < room; t++) s[t] = most - 100.0f; /* whole registers; adds 1e-26 each */
        for (int64_t t = 0; t < room; t++) sum += s[t] = exponential(s[t] - most);
        for (int64_t t = 0; t < room; t++) s[t] *= 1.0f / sum;
    }
    for (int64_t i = 0; i < all * width; i++) out[i] = 0.0f;
    for (int64_t t = 0; t < length; t++) {
        const float *value = values + slots[t] * row;
        if (t + AHEAD < length) fetch(values + slots[t + AHEAD] * row, row);
        for (int64_t h = 0, left = group; h < all; h++) {
            add(out + h * width, scores[h * room + t], value, width);
            if (--left == 0) value += width, left = group;
        }
    }
}

/* Attention of one query [heads * group, width] of each sequence to its first `lengths[i]` positions, whose cache rows
   [heads, width] are `table[requests[i]]`. Queries are `apart`, rows of the table `stride`. `scores` has room for
   `room`, heads * group * (longest + 15), for each thread. */
void decode(int64_t rows, int64_t shared, const float *query, int64_t apart, const float *keys, const float *values,
            const int32_t *table, int64_t stride, const int64_t *requests, const int64_t *lengths, int64_t heads,
            int64_t group, int64_t width, float scale, float *scores, int64_t room, float *out) {
    const int64_t size = heads * group * width;
    ROWS {
        float *own = scores + omp_get_thread_num() * room;
        const int32_t *slots = table + requests[i] * stride;
#define OF(W, G) attend(query + i * apart, keys, values, slots, lengths[i], heads, G, W, scale, own, out + i * size)
        if (width == 16) OF(16, group);
        else if (width == 64) OF(64, group);
        else if (width == 128) OF(128, group);
        else OF(width, group);
    }
}

/* x, residual = norm(x + residual) * weight, x + residual, in place; without a residual out = norm(x) * weight. */
void rms_norm(int64_t rows, int64_t shared, float *restrict x, float *restrict residual, const float *restrict weight,
              int64_t width, float epsilon, float *restrict out) {
    ROWS {
        float *a = x + i * width, *to = out + i * width, squares = 0.0f;
        if (residual) {
            float *r = residual + i * width;
            for (int64_t d = 0; d < width; d++) r[d] += a[d];
            a = r;
        }
        for (int64_t d = 0; d < width; d++) squares += a[d] * a[d];
        const float over = 1.0f / sqrtf(squares / (float)width + epsilon);
        for (int64_t d = 0; d < width; d++) to[d] = a[d] * over * weight[d];
    }
}

/* out [width] = silu(x[:width]) * x[width:]. */
void silu_and_mul(int64_t rows, int64_t shared, const float *restrict x, int64_t width, float *restrict out) {
    ROWS {
        const float *gate = x + 2 * i * width, *up = gate + width;
        for (int64_t d = 0; d < width; d++) {
            out[i * width + d] = gate[d] / (1.0f + exponential(-gate[d])) * up[d];
        }
    }
}

/* Rotate the heads [heads, width] of each row, `stride` apart, by its position's [cos, sin], in place: first half
   against second half. */
void rotate(int64_t rows, int64_t shared, float *x, int64_t stride, int64_t heads, int64_t width,
            const float *restrict cache, const int64_t *restrict positions) {
    const int64_t half = width / 2;
    ROWS {
        const float *cosine = cache + positions[i] * width, *sine = cosine + half;
        for (int64_t h = 0; h < heads; h++) {
            float *restrict a = x + i * stride + h * width;
            for (int64_t d = 0; d < half; d++) {
                const float u = a[d], v = a[d + half];
                a[d] = u * cosine[d] - v * sine[d];
                a[d + half] = v * cosine[d] + u * sine[d];
            }
        }
    }
}
"""
"""All pointers are to float32 unless named otherwise, rows are contiguous, and lengths and counts are in elements.

With `shared`, OpenMP's threads share the rows of a call. They are the threads of torch's matrix products, where those
also run in GNU's OpenMP: threads of another pool would have to wake up, and take the cores from these.
"""
