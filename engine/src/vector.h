/* Kernels that a compiler vectorises by itself, compiled once for each instruction set. Every arm of a select is computed, so that a loop has no branch. */
#include "internal.h"

#include <math.h> /* sqrtf only: correctly rounded, an instruction wherever there is one */

#define EACH(expression)                                                                                               \
    for (size_t i = 0; i < n; ++i) {                                                                                   \
        const float x = in[i];                                                                                         \
        out[i] = (expression);                                                                                         \
    }                                                                                                                  \
    break

static void unary(uint32_t func, float p0, float p1, const float *in, float *out, size_t n)
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

#define EACH(expression)                                                                                               \
    for (size_t i = 0; i < n; ++i) {                                                                                   \
        const float x = a[i], y = b[i];                                                                                \
        out[i] = (expression);                                                                                         \
    }                                                                                                                  \
    break

static void binary(uint32_t func, const float *a, const float *b, float *out, size_t n)
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

/* total = weight · value, or total += weight · value where it is not the first. */
static void mix(float weight, const float *value, float *total, size_t n, int first)
{
    for (size_t i = 0; i < n; ++i) {
        const float part = weight * value[i];
        total[i] = first ? part : total[i] + part;
    }
}
