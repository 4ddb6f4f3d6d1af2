/* Kernels that a compiler vectorises by itself, compiled once for each instruction set. Every arm
 * of a select is computed, so that a loop has no branch. */
#include "../core/internal.h"

#include <math.h> /* sqrtf only: correctly rounded, an instruction wherever there is one */

/* Floats a loop handles: a constant, so that its vector code has no other length to care for. */
enum { STRIP = CLB_SCALAR ? 1 : 32 };

/* n floats; of a whole strip a constant number, so that these are moves and no call. A strip of one
 * is an assignment: a freestanding compiler, or one for a core without unaligned loads, calls
 * memcpy for 4 bytes too. */
static inline void copy_strip(float *to, const float *from, size_t n) {
    if (STRIP == 1) {
        *to = *from;
    } else if (n == STRIP) {
        memcpy(to, from, STRIP * sizeof(float));
    } else {
        memcpy(to, from, n * sizeof(float));
    }
}

/* n floats, and zeros after them. */
static inline void load_strip(float strip[STRIP], const float *from, size_t n) {
    if (STRIP > 1 && n != STRIP) {
        memset(strip, 0, STRIP * sizeof(float));
    }
    copy_strip(strip, from, n);
}

#define CASE(which, name, expression)                                                              \
    case CLB_##which##_##name:                                                                     \
        for (size_t i = 0; USED(which, CLB_##which##_##name) && i < STRIP; ++i) {                  \
            const float x = a[i];                                                                  \
            const float y = b[i];                                                                  \
            (void)y;                                                                               \
            a[i] = (expression);                                                                   \
        }                                                                                          \
        break;

static void unary_strip(uint32_t func, float p0, float p1, float *a) {
    const float *b = a;
    switch (func) {
        CASE(UNARY, RELU, x < 0.0f ? 0.0f : x)
        CASE(UNARY, LEAKY_RELU, x < 0.0f ? x * p0 : x)
        CASE(UNARY, CLAMP, x < p0 ? p0 : (x > p1 ? p1 : x))
        CASE(UNARY, NEG, -x)
        CASE(UNARY, ABS, clb_abs(x))
        CASE(UNARY, SQUARE, x * x)
        CASE(UNARY, SQRT, sqrtf(x))
        CASE(UNARY, RSQRT, 1.0f / sqrtf(x))
        CASE(UNARY, RECIPROCAL, 1.0f / x)
        CASE(UNARY, EXP, clb_exp(x - p0)) /* p0: 0 in a program */
        CASE(UNARY, LOG, clb_log(x))
        CASE(UNARY, EXPM1, clb_expm1(x))
        CASE(UNARY, LOG1P, clb_log1p(x))
        CASE(UNARY, TANH, clb_tanh(x))
        CASE(UNARY, ERF, clb_erf(x))
        CASE(UNARY, SIGMOID, clb_sigmoid(x))
        CASE(UNARY, SILU, clb_silu(x))
        CASE(UNARY, GELU, clb_gelu(x))
        CASE(UNARY, GELU_TANH, clb_gelu_tanh(x))
        CASE(UNARY, SOFTPLUS, clb_softplus(x))
        CASE(UNARY, ELU, clb_elu(x))
        CASE(UNARY, HARDSWISH, clb_hardswish(x))
        CASE(UNARY, HARDSIGMOID, clb_hardsigmoid(x))
    default: break; /* CLB_UNARY_IDENTITY */
    }
}

static void binary_strip(uint32_t func, float *a, const float *b) {
    switch (func) {
        CASE(BINARY, ADD, x + y)
        CASE(BINARY, SUB, x - y)
        CASE(BINARY, MUL, x * y)
        CASE(BINARY, DIV, x / y)
        CASE(BINARY, MAXIMUM, x > y || x != x ? x : y)
        CASE(BINARY, MINIMUM, x < y || x != x ? x : y)
        CASE(BINARY, FILL, y != y ? x : y)
    default: break;
    }
}

#undef CASE

static void unary(uint32_t func, float p0, float p1, const float *in, float *out, size_t n) {
    for (size_t i = 0; i < n; i += STRIP) {
        const size_t count = n - i < STRIP ? n - i : STRIP;
        float a[STRIP];
        load_strip(a, in + i, count);
        unary_strip(func, p0, p1, a);
        copy_strip(out + i, a, count);
    }
}

static void binary(uint32_t func, const float *left, const float *right, float *out, size_t n) {
    for (size_t i = 0; i < n; i += STRIP) {
        const size_t count = n - i < STRIP ? n - i : STRIP;
        float a[STRIP];
        float b[STRIP];
        load_strip(a, left + i, count);
        load_strip(b, right + i, count);
        binary_strip(func, a, b);
        copy_strip(out + i, a, count);
    }
}

/* total = weight · value, or total += weight · value where it is not the first. */
static void mix(float weight, const float *value, float *total, size_t n, int first) {
    for (size_t i = 0; i < n; ++i) {
        const float part = weight * value[i];
        total[i] = first ? part : total[i] + part;
    }
}

/* One row as int8: in each group of 128 the scale is max|x| / 127, and q = x · (127 / max|x|)
 * rounded to nearest even, or 0 where that is not below 127.5 (the factor is rounded, and its
 * product with max|x| may pass 127). A NaN makes the scale NaN. Magnitudes compare as their bits
 * do, with NaN above all; adding 1.5 · 2^23 rounds to nearest even and leaves the integer in the
 * low bits. */
/* Small cores want sums for int4 only. */
enum { SUMS = !CLB_SCALAR || USED(PRODUCTS_Q, CLB_LAYOUT_ROWS8_I4) };

/* The largest magnitude among n floats, as bits. */
static inline int32_t most_of(const float *x, uint32_t n) {
    int32_t most = 0;
    UNROLL_4 for (uint32_t i = 0; i < n; ++i) {
        const int32_t size = (int32_t)(clb_bits(x[i]) & 0x7FFFFFFFu);
        most = size > most ? size : most;
    }
    return most;
}

/* x · factor as an integer, OFFSET more than it is. */
enum { OFFSET = 0x4B400000 };
static inline uint32_t scaled(float x, float factor) { return clb_bits(x * factor + 0x1.8p+23f); }

/* The factor, or what is below it so that ±largest stay within ±127: they do at once where numbers
 * are rounded to nearest. */
static inline float saturated(float factor, float largest) {
    while (scaled(largest, factor) > OFFSET + 127 || scaled(-largest, factor) < OFFSET - 127) {
        factor = clb_from_bits(clb_bits(factor) - 1u);
    }
    return factor;
}

/* q = x · factor, n of them; their sum. */
static inline uint32_t scale_to(int8_t *q, const float *x, uint32_t n, float factor) {
    uint32_t sum = 0;
    UNROLL_4 for (uint32_t i = 0; i < n; ++i) {
        const uint32_t bits = scaled(x[i], factor);
        q[i] = (int8_t)bits;
        sum += bits - OFFSET;
    }
    return sum;
}

/* Worth a loop of its own, whose length is constant. */
#define WHOLE(n, most) (!CLB_SCALAR && (n) == (most))

static void quantize(const float *x, float *row, uint32_t cols) {
    enum { PAD = SUMS ? CLB_WEIGHT_GROUP : 4 };
    int32_t *sums = (int32_t *)(void *)(row + clb_ceil(cols, CLB_ACTIVATION_GROUP));
    int8_t *q = (int8_t *)(void *)(sums + clb_ceil(cols, CLB_WEIGHT_GROUP));
    int8_t *const pad = q + cols;
    for (const float *end = x + cols; x < end;) {
        const uint32_t group = clb_min((uint32_t)(end - x), CLB_ACTIVATION_GROUP);
        const float *stop = x + group;
        const int32_t most = WHOLE(group, CLB_ACTIVATION_GROUP) ? most_of(x, CLB_ACTIVATION_GROUP)
                                                                : most_of(x, group);
        const float largest = clb_from_bits((uint32_t)most);
        float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
        *row++ = largest / 127.0f;
        /* Or nothing is below 127.5 but zeros. */
        const int usable = factor > 0.0f && factor < clb_inf();
        if (usable) {
            factor = saturated(factor, largest);
        }
        while (x < stop) {
            const uint32_t left = (uint32_t)(stop - x);
            const uint32_t n = SUMS ? clb_min(left, CLB_WEIGHT_GROUP) : left;
            uint32_t sum = 0;
            if (!usable) {
                memset(q, 0, n);
            } else if (WHOLE(n, CLB_WEIGHT_GROUP)) {
                sum = scale_to(q, x, CLB_WEIGHT_GROUP, factor);
            } else {
                sum = scale_to(q, x, n, factor);
            }
            q += n;
            x += n;
            if (SUMS) {
                *sums++ = (int32_t)sum;
            }
        }
    }
    for (uint32_t i = cols; i % PAD != 0; ++i) {
        pad[i - cols] = 0;
    }
}

static int sound(void) { return clb_sound(); }

#define KERNELS(its_name)                                                                          \
    {                                                                                              \
        .name = its_name,                                                                          \
        .panel = panel,                                                                            \
        .outliers = CLB_USED_OUTLIERS ? outliers : NULL,                                           \
        .quantize = CLB_USED_PRODUCTS_Q != 0 ? quantize : NULL,                                    \
        .unary = unary,                                                                            \
        .binary = binary,                                                                          \
        .mix = mix,                                                                                \
        .sound = sound,                                                                            \
    }
