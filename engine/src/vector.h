/* Kernels that a compiler vectorises by itself, compiled once for each instruction set: the including file names them
 * CLB_UNARY and CLB_QUANTIZE. Every arm of a select is computed, so that a loop has no branch. */
#include "internal.h"

#include <math.h> /* sqrtf only: correctly rounded, an instruction wherever there is one */

#define EACH(expression)                                                                                               \
    for (size_t i = 0; i < n; ++i) {                                                                                   \
        const float x = in[i];                                                                                         \
        out[i] = (expression);                                                                                         \
    }                                                                                                                  \
    break

static void CLB_UNARY(uint32_t func, float p0, float p1, const float *in, float *out, size_t n)
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
    default:
        if (in != out) {
            memmove(out, in, n * sizeof(float)); /* a hostile program may let them overlap */
        }
    }
}

#undef EACH

/* One row as int8: in each group of 128 the scale is max|x| / 127, and q = x · (127 / max|x|) rounded to nearest even, or 0
 * where that is not within ±127. A NaN makes the scale NaN. */
static void CLB_QUANTIZE(const float *x, float *record, uint32_t cols)
{
    const uint32_t groups = clb_ceil(cols, CLB_WEIGHT_GROUP);
    int32_t *sums = (int32_t *)(void *)(record + clb_ceil(cols, CLB_ACTIVATION_GROUP));
    int8_t *q = (int8_t *)(void *)(sums + groups);
    for (uint32_t start = 0; start < cols; start += CLB_ACTIVATION_GROUP) {
        const uint32_t n = clb_min(cols - start, CLB_ACTIVATION_GROUP);
        float lanes[CLB_LANES] = {0};
        for (uint32_t i = 0; i < n; ++i) { /* the largest does not depend on the order, and a NaN stays */
            const float size = clb_abs(x[start + i]), best = lanes[i % CLB_LANES];
            lanes[i % CLB_LANES] = size > best || size != size ? size : best;
        }
        float most = 0.0f;
        for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {
            most = lanes[lane] > most || lanes[lane] != lanes[lane] ? lanes[lane] : most;
        }
        const float factor = most > 0.0f ? 127.0f / most : 0.0f;
        record[start / CLB_ACTIVATION_GROUP] = most / 127.0f;
        for (uint32_t i = 0; i < n; ++i) {
            const float scaled = x[start + i] * factor;
            const float kept = scaled >= -127.0f && scaled <= 127.0f ? scaled : 0.0f;
            /* adding 1.5 · 2^23 rounds to nearest even and leaves the integer in the low bits */
            q[start + i] = (int8_t)(int32_t)(clb_bits(kept + 0x1.8p+23f) - 0x4B400000u);
        }
    }
    memset(q + cols, 0, (size_t)groups * CLB_WEIGHT_GROUP - cols);
    for (uint32_t g = 0; g < groups; ++g) {
        int32_t sum = 0;
        for (uint32_t i = 0; i < CLB_WEIGHT_GROUP; ++i) {
            sum += q[g * CLB_WEIGHT_GROUP + i];
        }
        sums[g] = sum;
    }
}
