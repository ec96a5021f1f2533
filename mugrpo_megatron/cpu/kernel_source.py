"""The C source of decoding on CPU: attention over the paged cache, and the steps between a layer's matrix products.

All pointers are to float32 unless named otherwise, rows are contiguous, and lengths and counts are in elements. With
`shared`, OpenMP's threads share the rows of a call. They are the threads of torch's matrix products, where those also
run in GNU's OpenMP: threads of another pool would have to wake up, and take the cores from these.
"""

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
