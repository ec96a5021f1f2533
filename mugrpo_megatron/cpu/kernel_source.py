"""The C source of the functions in `cpu/kernels.py`."""

from __future__ import annotations

_SHARED = r"""
#include <math.h>
#include <stdint.h>
#ifdef _OPENMP
int omp_get_thread_num(void);
#else
#define omp_get_thread_num() 0
#endif
#define ROWS _Pragma("omp parallel for schedule(static) if (shared)") for (int64_t i = 0; i < rows; i++)
#define BLOCK 512 /* numbers whose sum is kept in float32 */
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
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

INLINE void fetch(const void *row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)row + i);
}

/* A bfloat16 is the upper half of a float32. Narrowing rounds to the nearest, halves to even, as torch does. */
INLINE float widened(uint16_t x) {
    const union { uint32_t bits; float value; } wide = {.bits = (uint32_t)x << 16};
    return wide.value;
}

INLINE uint16_t narrowed(float x) {
    const union { float value; uint32_t bits; } wide = {.value = x};
    const uint32_t rounded = (wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16;
    return (uint16_t)(x == x ? rounded : 0x7fc0);
}

INLINE float same(float x) { return x; }
INLINE const float *itself(const float *from, float *space, int64_t count) { return from; }
INLINE const float *expanded(const uint16_t *restrict from, float *restrict space, int64_t count) {
    for (int64_t i = 0; i < count; i++) space[i] = widened(from[i]);
    return space;
}

/* Of the type T that a function is compiled for: a number as float32, a float32 as T, and rounded to T; `count` numbers
   as float32, in `space` if they are not. */
#define WIDE(x) _Generic((x), float: same, uint16_t: widened)(x)
#define NARROW(x) _Generic((T)0, float: same, uint16_t: narrowed)(x)
#define ROUNDED(x) WIDE(NARROW(x))
#define FLOATS(from, ...) _Generic((from), const float *: itself, const uint16_t *: expanded)(from, __VA_ARGS__)

/* e^(x / temperature - most), and zero below e^-60. */
INLINE float weight_of(float x, float most, float temperature) {
    const float e = x / temperature - most;
    return e < -60.0f ? 0.0f : exponential(e);
}

INLINE double weights(const float *x, int64_t count, float most, float temperature) {
    float sum = 0.0f;
    for (int64_t t = 0; t < count; t++) sum += weight_of(x[t], most, temperature);
    return sum;
}

/* A token of softmax(logits / temperature) for each row of logits, drawn by a number of [0, 1), and its logprob. */
void sample(int64_t rows, int64_t shared, const float *logits, int64_t width, const float *temperatures,
            const double *uniforms, int32_t *tokens, float *logprobs) {
    ROWS {
        const float *x = logits + i * width, temperature = temperatures[i];
        float largest[16], most = x[0];
        for (int64_t lane = 0; lane < 16; lane++) largest[lane] = x[0];
        for (int64_t t = 0; t + 16 <= width; t += 16)
            for (int64_t lane = 0; lane < 16; lane++)
                largest[lane] = x[t + lane] > largest[lane] ? x[t + lane] : largest[lane];
        for (int64_t lane = 0; lane < 16; lane++) most = largest[lane] > most ? largest[lane] : most;
        for (int64_t t = width / 16 * 16; t < width; t++) most = x[t] > most ? x[t] : most;
        most /= temperature;
        double total = 0.0, below = 0.0, start = 0.0;
        for (int64_t t = 0; t < width; t += BLOCK) total += weights(x + t, LEAST(BLOCK, width - t), most, temperature);
        const double drawn = uniforms[i] * total;
        int64_t first = 0, token = 0;
        for (int64_t t = 0; t < width && !(below > drawn); t += BLOCK) {
            const double sum = weights(x + t, LEAST(BLOCK, width - t), most, temperature);
            if (sum > 0.0) first = t, start = below;
            below += sum;
        }
        for (int64_t t = first; t < first + LEAST(BLOCK, width - first) && !(start > drawn); t++) {
            const double share = weight_of(x[t], most, temperature);
            if (share > 0.0) token = t;
            start += share;
        }
        tokens[i] = (int32_t)token;
        logprobs[i] = x[token] / temperature - most - (float)log(total);
    }
}
"""
_TYPED = r"""
INLINE void NAME(attend)(const T *query, const T *restrict keys, const T *restrict values,
                         const int32_t *restrict slots, int64_t length, int64_t heads, int64_t group,
                         const int64_t width, float scale, float *restrict scores, float *restrict space, T *out) {
    const int64_t row = heads * width, all = heads * group, room = (length + 15) / 16 * 16, bytes = row * sizeof(T);
    const float *wide_query = FLOATS(query, space + row, all * width);
    float *sums = sizeof(T) == 4 ? (float *)out : space + row + all * width;
    for (int64_t t = 0; t < length; t++) {
        const float *key = FLOATS(keys + slots[t] * row, space, row);
        if (t + AHEAD < length) fetch(keys + slots[t + AHEAD] * row, bytes);
        for (int64_t h = 0, left = group; h < all; h++) {
            scores[h * room + t] = dot(wide_query + h * width, key, width) * scale;
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
    for (int64_t i = 0; i < all * width; i++) sums[i] = 0.0f;
    for (int64_t t = 0; t < length; t++) {
        const float *value = FLOATS(values + slots[t] * row, space, row);
        if (t + AHEAD < length) fetch(values + slots[t + AHEAD] * row, bytes);
        for (int64_t h = 0, left = group; h < all; h++) {
            add(sums + h * width, scores[h * room + t], value, width);
            if (--left == 0) value += width, left = group;
        }
    }
    if (sizeof(T) < 4)
        for (int64_t i = 0; i < all * width; i++) out[i] = NARROW(sums[i]);
}

/* Attention of one query [heads * group, width] of each sequence to its first `lengths[i]` positions, whose cache rows
   [heads, width] are `table[requests[i]]`. Queries are `apart`, rows of the table `stride`. `scratch` has for each
   thread `scores`, heads * group * (longest + 15), for scores, and room for a row and two queries. */
void NAME(decode)(int64_t rows, int64_t shared, const T *query, int64_t apart, const T *keys, const T *values,
                  const int32_t *table, int64_t stride, const int64_t *requests, const int64_t *lengths, int64_t heads,
                  int64_t group, int64_t width, float scale, float *scratch, int64_t scores, T *out) {
    const int64_t size = heads * group * width, room = scores + heads * width + 2 * size;
    ROWS {
        float *own = scratch + omp_get_thread_num() * room;
        const int32_t *slots = table + requests[i] * stride;
        T *to = out + i * size;
#define OF(W, G) \
    NAME(attend)(query + i * apart, keys, values, slots, lengths[i], heads, G, W, scale, own, own + scores, to)
        if (width == 16) OF(16, group);
        else if (width == 64) OF(64, group);
        else if (width == 128) OF(128, group);
        else OF(width, group);
#undef OF
    }
}

/* x, residual = norm(x + residual) * weight, x + residual, in place; without a residual out = norm(x) * weight. */
void NAME(rms_norm)(int64_t rows, int64_t shared, T *restrict x, T *restrict residual, const T *restrict weight,
                    int64_t width, float epsilon, T *restrict out) {
    ROWS {
        T *a = x + i * width, *to = out + i * width;
        float squares = 0.0f;
        if (residual) {
            T *r = residual + i * width;
            for (int64_t d = 0; d < width; d++) r[d] = NARROW(WIDE(r[d]) + WIDE(a[d]));
            a = r;
        }
        for (int64_t d = 0; d < width; d++) squares += WIDE(a[d]) * WIDE(a[d]);
        const float over = 1.0f / sqrtf(squares / (float)width + epsilon);
        for (int64_t d = 0; d < width; d++) to[d] = NARROW(WIDE(a[d]) * over * WIDE(weight[d]));
    }
}

/* out [width] = silu(x[:width]) * x[width:]. */
void NAME(silu_and_mul)(int64_t rows, int64_t shared, const T *restrict x, int64_t width, T *restrict out) {
    ROWS {
        const T *gate = x + 2 * i * width, *up = gate + width;
        for (int64_t d = 0; d < width; d++) {
            const float g = WIDE(gate[d]);
            out[i * width + d] = NARROW(ROUNDED(g / (1.0f + exponential(-g))) * WIDE(up[d]));
        }
    }
}

/* Rotate the heads [heads, width] of each row, `stride` apart, by its position's [cos, sin], in place: first half
   against second half. */
void NAME(rotate)(int64_t rows, int64_t shared, T *x, int64_t stride, int64_t heads, int64_t width,
                  const T *restrict cache, const int64_t *restrict positions) {
    const int64_t half = width / 2;
    ROWS {
        const T *cosine = cache + positions[i] * width, *sine = cosine + half;
        for (int64_t h = 0; h < heads; h++) {
            T *restrict a = x + i * stride + h * width;
            for (int64_t d = 0; d < half; d++) {
                const float u = WIDE(a[d]), v = WIDE(a[d + half]), c = WIDE(cosine[d]), s = WIDE(sine[d]);
                a[d] = NARROW(ROUNDED(u * c) - ROUNDED(v * s));
                a[d + half] = NARROW(ROUNDED(v * c) + ROUNDED(u * s));
            }
        }
    }
}
"""
"""The functions that exist for float32 and for bfloat16, whose bits are a uint16_t in C."""
TYPES = {"float32": "float", "bfloat16": "uint16_t"}
"""Name of a type, with which a function's name ends -> its name in C."""


def source() -> str:
    """The whole C source, in which each function with a type (`_TYPED`) is repeated for every one of `TYPES`.

    Pointers point to numbers of a function's type unless they are declared otherwise, rows are contiguous, and lengths
    and counts are in elements. bfloat16 is computed in float32 and rounded where torch's operations, one by one, would
    round. If the argument `shared` is not 0, OpenMP's threads share the rows of a call. If torch's matrix products run
    in GNU's OpenMP too, they use the same threads. Threads of another pool would have to be woken, and would compete
    with torch's for the cores.
    """
    typed = (
        f"#define T {kind}\n#define NAME(function) function##_{name}\n{_TYPED}#undef T\n#undef NAME\n"
        for name, kind in TYPES.items()
    )
    return _SHARED + "".join(typed)
