/* Kernels that a compiler vectorises by itself, compiled once for each instruction set. Every arm of a select is computed,
 * so that a loop has no branch. */
#include "internal.h"

#include <math.h> /* sqrtf only: correctly rounded, an instruction wherever there is one */

/* Floats a loop handles: a constant, so that its vector code has no other length to care for. */
enum { STRIP = CLB_SCALAR ? 1 : 32 };

/* n floats, and zeros after them. */
static void load_strip(float strip[STRIP], const float *from, size_t n)
{
    if (n == STRIP) {
        memcpy(strip, from, STRIP * sizeof(float));
    } else {
        memset(strip, 0, STRIP * sizeof(float));
        memcpy(strip, from, n * sizeof(float));
    }
}

static void store_strip(float *to, const float strip[STRIP], size_t n)
{
    if (n == STRIP) {
        memcpy(to, strip, STRIP * sizeof(float));
    } else {
        memcpy(to, strip, n * sizeof(float));
    }
}

#define CASE(which, name, expression)                                                                                  \
    case CLB_##which##_##name:                                                                                         \
        for (size_t i = 0; USED(which, CLB_##which##_##name) && i < STRIP; ++i) {                                      \
            const float x = a[i], y = b[i];                                                                            \
            (void)y;                                                                                                   \
            a[i] = (expression);                                                                                       \
        }                                                                                                              \
        break;

static void unary_strip(uint32_t func, float p0, float p1, float *a)
{
    const float *b = a;
    switch (func) {
    CASE(UNARY, RELU, x < 0.0f ? 0.0f : x)
    CASE(UNARY, LEAKY_RELU, x < 0.0f ? x * p0 : x)
    CASE(UNARY, CLAMP, x < p0 ? p0 : (x > p1 ? p1 : x))
    CASE(UNARY, NEG, -x)
    CASE(UNARY, ABS, clb_abs(x))
    CASE(UNARY, SQUARE, x *x)
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

static void binary_strip(uint32_t func, float *a, const float *b)
{
    switch (func) {
    CASE(BINARY, ADD, x + y)
    CASE(BINARY, SUB, x - y)
    CASE(BINARY, MUL, x *y)
    CASE(BINARY, DIV, x / y)
    CASE(BINARY, MAXIMUM, x > y || x != x ? x : y)
    CASE(BINARY, MINIMUM, x < y || x != x ? x : y)
    default: break;
    }
}

#undef CASE

static void unary(uint32_t func, float p0, float p1, const float *in, float *out, size_t n)
{
    for (size_t i = 0; i < n; i += STRIP) {
        const size_t count = n - i < STRIP ? n - i : STRIP;
        float a[STRIP];
        load_strip(a, in + i, count);
        unary_strip(func, p0, p1, a);
        store_strip(out + i, a, count);
    }
}

static void binary(uint32_t func, const float *left, const float *right, float *out, size_t n)
{
    for (size_t i = 0; i < n; i += STRIP) {
        const size_t count = n - i < STRIP ? n - i : STRIP;
        float a[STRIP], b[STRIP];
        load_strip(a, left + i, count);
        load_strip(b, right + i, count);
        binary_strip(func, a, b);
        store_strip(out + i, a, count);
    }
}

/* total = weight · value, or total += weight · value where it is not the first. */
static void mix(float weight, const float *value, float *total, size_t n, int first)
{
    for (size_t i = 0; i < n; ++i) {
        const float part = weight * value[i];
        total[i] = first ? part : total[i] + part;
    }
}

/* One row as int8: in each group of 128 the scale is max|x| / 127, and q = x · (127 / max|x|) rounded to nearest even, or 0
 * where that is not below 127.5 (the factor is rounded, and its product with max|x| may pass 127). A NaN makes the scale
 * NaN. Magnitudes compare as their bits do, with NaN above all; adding 1.5 · 2^23 rounds to nearest even and leaves the
 * integer in the low bits. */
static inline int32_t rounded(float x) { return (int32_t)(clb_bits(x + 0x1.8p+23f) - 0x4B400000u); }

/* The scale of a group whose largest magnitude has these bits, and its factor. */
static inline float scale_of(int32_t most, float *factor)
{
    const float largest = clb_from_bits((uint32_t)most);
    *factor = largest > 0.0f ? 127.0f / largest : 0.0f;
    return largest / 127.0f;
}

#if CLB_SCALAR
static void quantize(const float *x, float *record, uint32_t cols)
{
    enum { SUMS = USED(PRODUCTS_Q, CLB_LAYOUT_ROWS8_I4), PAD = SUMS ? CLB_WEIGHT_GROUP : 4 }; /* only int4 wants them */
    int32_t *sums = (int32_t *)(void *)(record + clb_ceil(cols, CLB_ACTIVATION_GROUP));
    int8_t *q = (int8_t *)(void *)(sums + clb_ceil(cols, CLB_WEIGHT_GROUP)), *const pad = q + cols;
    for (const float *end = x + cols; x < end;) {
        const float *stop = end - x > (ptrdiff_t)CLB_ACTIVATION_GROUP ? x + CLB_ACTIVATION_GROUP : end;
        int32_t most = 0;
        FOURTH for (const float *at = x; at < stop; ++at) {
            const int32_t size = (int32_t)(clb_bits(*at) & 0x7FFFFFFFu);
            most = size > most ? size : most;
        }
        float factor;
        *record++ = scale_of(most, &factor);
        const int sound = factor > 0.0f && factor < clb_inf(); /* or nothing is below 127.5 but zeros */
        while (x < stop) {
            const uint32_t left = (uint32_t)(stop - x), n = SUMS ? clb_min(left, CLB_WEIGHT_GROUP) : left;
            uint32_t sum = 0;
            if (sound) {
                FOURTH for (uint32_t i = 0; i < n; ++i) {
                    const uint32_t bits = clb_bits(x[i] * factor + 0x1.8p+23f);
                    q[i] = (int8_t)bits;
                    sum += bits - 0x4B400000u;
                }
            } else {
                memset(q, 0, n);
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
#else
static void quantize(const float *x, float *record, uint32_t cols)
{
    const uint32_t groups = clb_ceil(cols, CLB_WEIGHT_GROUP);
    int32_t *sums = (int32_t *)(void *)(record + clb_ceil(cols, CLB_ACTIVATION_GROUP));
    int8_t *q = (int8_t *)(void *)(sums + groups);
    float part[CLB_WEIGHT_GROUP] = {0};
    for (uint32_t start = 0; start < cols; start += CLB_ACTIVATION_GROUP) {
        const uint32_t n = clb_min(cols - start, CLB_ACTIVATION_GROUP), full = n / CLB_WEIGHT_GROUP;
        const uint32_t rest = n % CLB_WEIGHT_GROUP;
        if (rest != 0) { /* the last of the row, zeros after it */
            memset(part, 0, sizeof part);
            memcpy(part, x + start + n - rest, rest * sizeof(float));
        }
        int32_t lanes[CLB_WEIGHT_GROUP] = {0}, most = 0;
        for (uint32_t g = 0; g < full + (rest != 0); ++g) {
            const float *in = g < full ? x + start + g * CLB_WEIGHT_GROUP : part;
            for (uint32_t i = 0; i < CLB_WEIGHT_GROUP; ++i) {
                const int32_t size = (int32_t)clb_bits(clb_abs(in[i]));
                lanes[i] = size > lanes[i] ? size : lanes[i];
            }
        }
        for (uint32_t i = 0; i < CLB_WEIGHT_GROUP; ++i) {
            most = lanes[i] > most ? lanes[i] : most;
        }
        float factor;
        record[start / CLB_ACTIVATION_GROUP] = scale_of(most, &factor);
        for (uint32_t g = 0; g < full + (rest != 0); ++g) {
            const float *in = g < full ? x + start + g * CLB_WEIGHT_GROUP : part;
            const uint32_t at = start / CLB_WEIGHT_GROUP + g;
            int32_t sum = 0, whole[CLB_WEIGHT_GROUP];
            for (uint32_t i = 0; i < CLB_WEIGHT_GROUP; ++i) {
                const float scaled = in[i] * factor;
                whole[i] = clb_abs(scaled) < 127.5f ? rounded(scaled) : 0;
                sum += whole[i];
            }
            for (uint32_t i = 0; i < CLB_WEIGHT_GROUP; ++i) {
                q[at * CLB_WEIGHT_GROUP + i] = (int8_t)whole[i];
            }
            sums[at] = sum;
        }
    }
}
#endif

#define KERNELS(its_name)                                                                                              \
    {                                                                                                                  \
        .name = its_name, .panel = panel, .residual = CLB_USED_RESIDUAL ? residual : NULL,                             \
        .quantize = CLB_USED_PRODUCTS_Q != 0 ? quantize : NULL, .unary = unary, .binary = binary, .mix = mix,          \
    }
