/* Kernels that a compiler vectorises by itself, compiled once for each instruction set. Every arm of a select is computed, so that a loop has no branch. */
#include "internal.h"

#include <math.h> /* sqrtf only: correctly rounded, an instruction wherever there is one */

enum { STRIP = 32 }; /* floats a loop handles: a constant, so that its vector code has no other length to care for */

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

#define EACH(expression)                                                                                               \
    for (size_t i = 0; i < STRIP; ++i) {                                                                               \
        const float x = a[i];                                                                                          \
        a[i] = (expression);                                                                                           \
    }                                                                                                                  \
    break

static void unary_strip(uint32_t func, float p0, float p1, float *a)
{
    switch (func) {
    case CLB_UNARY_RELU: EACH(x < 0.0f ? 0.0f : x);
    case CLB_UNARY_LEAKY_RELU: EACH(x < 0.0f ? x * p0 : x);
    case CLB_UNARY_CLAMP: EACH(x < p0 ? p0 : (x > p1 ? p1 : x));
    case CLB_UNARY_NEG: EACH(-x);
    case CLB_UNARY_ABS: EACH(clb_abs(x));
    case CLB_UNARY_SQUARE: EACH(x *x);
    case CLB_UNARY_SQRT: EACH(sqrtf(x));
    case CLB_UNARY_RSQRT: EACH(1.0f / sqrtf(x));
    case CLB_UNARY_RECIPROCAL: EACH(1.0f / x);
    case CLB_UNARY_EXP: EACH(clb_exp(x));
    case CLB_UNARY_LOG: EACH(clb_log(x));
    case CLB_UNARY_EXPM1: EACH(clb_expm1(x));
    case CLB_UNARY_LOG1P: EACH(clb_log1p(x));
    case CLB_UNARY_TANH: EACH(clb_tanh(x));
    case CLB_UNARY_ERF: EACH(clb_erf(x));
    case CLB_UNARY_SIGMOID: EACH(clb_sigmoid(x));
    case CLB_UNARY_SILU: EACH(clb_silu(x));
    case CLB_UNARY_GELU: EACH(clb_gelu(x));
    case CLB_UNARY_GELU_TANH: EACH(clb_gelu_tanh(x));
    case CLB_UNARY_SOFTPLUS: EACH(clb_softplus(x));
    case CLB_UNARY_ELU: EACH(clb_elu(x));
    case CLB_UNARY_HARDSWISH: EACH(clb_hardswish(x));
    case CLB_UNARY_HARDSIGMOID: EACH(clb_hardsigmoid(x));
    default: break; /* CLB_UNARY_IDENTITY */
    }
}

#undef EACH

#define EACH(expression)                                                                                               \
    for (size_t i = 0; i < STRIP; ++i) {                                                                               \
        const float x = a[i], y = b[i];                                                                                \
        a[i] = (expression);                                                                                           \
    }                                                                                                                  \
    break

static void binary_strip(uint32_t func, float *a, const float *b)
{
    switch (func) {
    case CLB_BINARY_ADD: EACH(x + y);
    case CLB_BINARY_SUB: EACH(x - y);
    case CLB_BINARY_MUL: EACH(x *y);
    case CLB_BINARY_DIV: EACH(x / y);
    case CLB_BINARY_MAXIMUM: EACH(x > y || x != x ? x : y);
    default: EACH(x < y || x != x ? x : y); /* CLB_BINARY_MINIMUM */
    }
}

#undef EACH

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
 * NaN. */
static void quantize(const float *x, float *record, uint32_t cols)
{
    const uint32_t groups = clb_ceil(cols, CLB_WEIGHT_GROUP);
    int32_t *sums = (int32_t *)(void *)(record + clb_ceil(cols, CLB_ACTIVATION_GROUP));
    int8_t *q = (int8_t *)(void *)(sums + groups);
    float part[CLB_WEIGHT_GROUP] = {0};
    for (uint32_t start = 0; start < cols; start += CLB_ACTIVATION_GROUP) {
        const uint32_t n = clb_min(cols - start, CLB_ACTIVATION_GROUP), full = n / CLB_WEIGHT_GROUP;
        const uint32_t rest = n % CLB_WEIGHT_GROUP;
        memcpy(part, x + start + n - rest, rest * sizeof(float));
        memset(part + rest, 0, (CLB_WEIGHT_GROUP - rest) * sizeof(float));
        int32_t lanes[CLB_WEIGHT_GROUP] = {0}, most = 0; /* magnitudes compare as their bits do, with NaN above all */
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
        const float largest = clb_from_bits((uint32_t)most), factor = largest > 0.0f ? 127.0f / largest : 0.0f;
        record[start / CLB_ACTIVATION_GROUP] = largest / 127.0f;
        for (uint32_t g = 0; g < full + (rest != 0); ++g) {
            const float *in = g < full ? x + start + g * CLB_WEIGHT_GROUP : part;
            const uint32_t at = start / CLB_WEIGHT_GROUP + g;
            int32_t sum = 0, whole[CLB_WEIGHT_GROUP];
            for (uint32_t i = 0; i < CLB_WEIGHT_GROUP; ++i) {
                const float scaled = in[i] * factor;
                /* adding 1.5 · 2^23 rounds to nearest even and leaves the integer in the low bits */
                const int32_t rounded = (int32_t)(clb_bits(scaled + 0x1.8p+23f) - 0x4B400000u);
                whole[i] = clb_abs(scaled) < 127.5f ? rounded : 0;
                sum += whole[i];
            }
            for (uint32_t i = 0; i < CLB_WEIGHT_GROUP; ++i) {
                q[at * CLB_WEIGHT_GROUP + i] = (int8_t)whole[i];
            }
            sums[at] = sum;
        }
    }
}

#define KERNELS(its_name)                                                                                              \
    {                                                                                                                  \
        .name = its_name,                                                                                              \
        .products = {[CLB_LAYOUT_ROWS8_F32] = product_f32, [CLB_LAYOUT_ROWS8_F16] = product_f16,                       \
                     [CLB_LAYOUT_ROWS8_I8] = product_i8},                                                              \
        .products_q = {[CLB_LAYOUT_ROWS8_I8] = product_q_i8, [CLB_LAYOUT_ROWS8_I4] = product_q_i4},                    \
        .panel = panel, .residual = residual, .quantize = quantize, .unary = unary, .binary = binary, .mix = mix,                            \
    }
