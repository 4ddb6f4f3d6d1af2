/* Arrays through each function of elementary.h, and their errors against the double libm.
 * tests/reference/test_elementary.py compiles this into a shared library. */
#include <math.h>
#include <stddef.h>

#include "core/elementary.h"

static double ref_sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
static double ref_silu(double x) { return x / (1.0 + exp(-x)); }
/* The limit at -inf, where the product would be -inf * 0. */
static double ref_gelu(double x) {
    return x < -1e4 ? 0.0 : 0.5 * x * erfc(-0.70710678118654752440 * x);
}
/* The logistic form of (1 + tanh(y)) / 2, which does not cancel for negative y. */
static double ref_gelu_tanh(double x) {
    return x / (1.0 + exp(-2.0 * 0.79788456080286535588 * (x + 0.044715 * x * x * x)));
}
static double ref_softplus(double x) { return x > 20.0 ? x : log1p(exp(x)); }
static double ref_elu(double x) { return x > 0.0 ? x : expm1(x); }
static double ref_hardsigmoid(double x) { return x < -3.0 ? 0.0 : x > 3.0 ? 1.0 : (x + 3.0) / 6.0; }
static double ref_hardswish(double x) { return x * ref_hardsigmoid(x); }

/* Neighbouring floats map to neighbouring integers, and both zeros to 0. */
static int64_t ordered(float x) {
    uint32_t u = clb_bits(x);
    return u >> 31 ? -(int64_t)(u & 0x7fffffffu) : (int64_t)u;
}

static void error_at(float x, float y, double exact, int64_t *ulp, float *ulp_at,
                     double *absolute) {
    int64_t difference;
    if (isnan(exact) || isnan(y)) {
        difference = isnan(exact) && isnan(y) ? 0 : INT64_MAX;
    } else {
        difference = ordered(y) - ordered((float)exact);
        difference = difference < 0 ? -difference : difference;
        if (isfinite(y) && fabs((double)y - exact) > *absolute) {
            *absolute = fabs((double)y - exact);
        }
    }
    if (difference > *ulp) {
        *ulp = difference;
        *ulp_at = x;
    }
}

/* NAME_map: y[i] = NAME(x[i]).  NAME_error: raises *ulp to the largest distance in floats of y[i]
 * from the correctly rounded NAME(x[i]), found at *ulp_at, and *absolute to the largest absolute
 * error of a finite y[i]. */
#define ELEMENTARY(name, reference)                                                                \
    void name##_map(const float *restrict x, float *restrict y, size_t count);                     \
    void name##_map(const float *restrict x, float *restrict y, size_t count) {                    \
        for (size_t i = 0; i < count; i++)                                                         \
            y[i] = clb_##name(x[i]);                                                               \
    }                                                                                              \
    void name##_error(const float *x, const float *y, size_t count, int64_t *ulp, float *ulp_at,   \
                      double *absolute);                                                           \
    void name##_error(const float *x, const float *y, size_t count, int64_t *ulp, float *ulp_at,   \
                      double *absolute) {                                                          \
        for (size_t i = 0; i < count; i++) {                                                       \
            error_at(x[i], y[i], reference((double)x[i]), ulp, ulp_at, absolute);                  \
        }                                                                                          \
    }

ELEMENTARY(exp, exp)
ELEMENTARY(expm1, expm1)
ELEMENTARY(log, log)
ELEMENTARY(log1p, log1p)
ELEMENTARY(tanh, tanh)
ELEMENTARY(erf, erf)
ELEMENTARY(sigmoid, ref_sigmoid)
ELEMENTARY(silu, ref_silu)
ELEMENTARY(gelu, ref_gelu)
ELEMENTARY(gelu_tanh, ref_gelu_tanh)
ELEMENTARY(softplus, ref_softplus)
ELEMENTARY(elu, ref_elu)
ELEMENTARY(hardsigmoid, ref_hardsigmoid)
ELEMENTARY(hardswish, ref_hardswish)
