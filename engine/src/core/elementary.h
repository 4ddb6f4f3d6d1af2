/* Elementary functions in binary32 with the same bits on every target.
 *
 * Each function is one fixed sequence of IEEE-754 binary32 operations (+ - * /, round to nearest
 * even, denormals kept), 32-bit integer operations and selects.
 * src/colibri/reference/elementary.py is the same sequence in NumPy and is the specification;
 * docs/elementary.md states the errors.  A fused multiply-add gives other bits: the engine includes
 * this through arithmetic.h, which forbids it.
 *
 * Both arms of every select are computed, so loops over these functions vectorise (gcc needs
 * -fno-trapping-math for it), and a vector version repeats the sequence lane by lane.  An arm that
 * is not chosen may hold garbage but never undefined behaviour: floats are not converted to
 * integers, their bits are read instead.  Clamps compare so that NaN passes through them. */
#ifndef COLIBRI_ELEMENTARY_H
#define COLIBRI_ELEMENTARY_H

#include <stdint.h>

/* Unions rather than memcpy: freestanding builds may not turn a call into a move. */
static inline uint32_t clb_bits(float x) {
    return ((union {
               float f;
               uint32_t u;
           }){.f = x})
        .u;
}

static inline float clb_from_bits(uint32_t u) {
    return ((union {
               uint32_t u;
               float f;
           }){.u = u})
        .f;
}

static inline float clb_inf(void) { return clb_from_bits(0x7f800000u); }
static inline float clb_nan(void) { return clb_from_bits(0x7fc00000u); }
static inline float clb_abs(float x) { return clb_from_bits(clb_bits(x) & 0x7fffffffu); }

static inline float clb_copysign(float magnitude, float sign) {
    return clb_from_bits((clb_bits(magnitude) & 0x7fffffffu) | (clb_bits(sign) & 0x80000000u));
}

/* x - lo = n ln2 + r with integer n and |r| <= ln2/2 + |lo|, for |x| < 128.  Adding 1.5 * 2^23
 * rounds x / ln2 to the nearest integer and leaves it in the low mantissa bits.  ln2 = hi + lo,
 * where hi has 15 significant bits so that n * hi is exact.  n is two's complement. */
static inline float clb_exp_reduce(float x, float lo, uint32_t *n) {
    float shifted = x * 0x1.715476p+0f + 0x1.8p+23f;
    float k = shifted - 0x1.8p+23f;
    *n = clb_bits(shifted) - 0x4b400000u;
    return ((x - k * 0x1.62e4p-1f) - k * 0x1.7f7d1cp-20f) - lo;
}

/* Four steps of Horner's rule. */
static inline float clb_horner(float x, float p, float a, float b, float c, float d) {
    return (((p * x + a) * x + b) * x + c) * x + d;
}

/* expm1(r) for |r| <= ln2/2, relative error of the polynomial against exp(r) 2^-28. */
static inline float clb_expm1_kernel(float r) {
    return r + (r * r) * clb_horner(r, 0x1.6a445ep-10f, 0x1.123b5cp-7f, 0x1.5558bcp-5f,
                                    0x1.555490p-3f, 0x1.fffffcp-2f);
}

/* exp(x - lo) for -120 <= x <= 89 and a small lo >= 0 that x alone cannot hold.  2^n is applied as
 * two normal factors: n reaches -173 and 128, and only the last product rounds when the result is
 * denormal. */
static inline float clb_exp_kernel(float x, float lo) {
    uint32_t n;
    float y = 1.0f + clb_expm1_kernel(clb_exp_reduce(x, lo, &n));
    uint32_t half = (n + 254u) >> 1;
    return (y * clb_from_bits(half << 23)) * clb_from_bits((n + 254u - half) << 23);
}

/* At the clamps the result is already 0 and inf. */
static inline float clb_exp(float x) {
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    return clb_exp_kernel(x, 0.0f);
}

/* 2 (2^(n-1) expm1(r) + (2^(n-1) - 1/2)): the halves keep n = 128 in range.  Below -20 the result
 * is -1. Below 2^-25 it is x itself, where the halves would lose the last bit of a denormal and the
 * sign of 0. */
static inline float clb_expm1(float x) {
    uint32_t n;
    float c = x < -20.0f ? -20.0f : x;
    float r = clb_exp_reduce(c > 89.0f ? 89.0f : c, 0.0f, &n);
    float scale = clb_from_bits((n + 126u) << 23);
    float y = scale * clb_expm1_kernel(r) + (scale - 0.5f);
    return clb_abs(x) < 0x1p-25f ? x : y + y;
}

/* n ln2 + log(1 + f) for 1 + f in [sqrt(1/2), sqrt(2)), summed from the smallest term up. */
static inline float clb_log_kernel(float n, float f) {
    float s = f * f;
    float p = clb_horner(f, -0x1.38c974p-4f, 0x1.055eaep-3f, -0x1.0d8246p-3f, 0x1.22d930p-3f,
                         -0x1.54728ap-3f);
    p = ((p * f + 0x1.99a01cp-3f) * f - 0x1.000226p-2f) * f + 0x1.555554p-2f;
    p = (s * f) * p + n * 0x1.7f7d1cp-20f;
    return n * 0x1.62e4p-1f + (f + (p - 0.5f * s));
}

/* u is the argument of the logarithm and y its value where 0 < u < inf. */
static inline float clb_log_edges(float u, float y) {
    y = u < clb_inf() ? y : u;
    return u > 0.0f ? y : u == 0.0f ? -clb_inf() : clb_nan();
}

/* The exponent field of u after this offset is 127 + n where u = 2^n m, m in [sqrt(1/2),
 * sqrt(2)). */
static inline uint32_t clb_log_exponent(float u) {
    return (clb_bits(u) + (0x3f800000u - 0x3f3504f3u)) >> 23;
}

static inline float clb_log(float x) {
    float u = x < 0x1p-126f ? x * 0x1p+23f : x;
    float bias = x < 0x1p-126f ? 150.0f : 127.0f;
    uint32_t e = clb_log_exponent(u);
    float f = clb_from_bits(clb_bits(u) - ((e - 127u) << 23)) - 1.0f;
    return clb_log_edges(x, clb_log_kernel((float)(int32_t)e - bias, f));
}

/* 1 + f = 2^-n (1 + x) is formed from x 2^-n + (2^-n - 1), which does not round x away.  x 2^-n is
 * exact: x is normal wherever n != 0.  2^-n is built as 2^(2-n) / 4 because n reaches 128. */
static inline float clb_log1p(float x) {
    float u = 1.0f + x;
    uint32_t e = clb_log_exponent(u);
    uint32_t shift = (e - 127u) << 23;
    float scale = 0.25f * clb_from_bits(0x40800000u - shift);
    float f = clb_from_bits(clb_bits(x) - shift) + (scale - 1.0f);
    float y = clb_log_kernel((float)((int32_t)e - 127), f);
    return clb_copysign(clb_log_edges(u, y), x);
}

/* expm1(2|x|) / (expm1(2|x|) + 2); from |x| = 9.02 on the result is 1. */
static inline float clb_tanh(float x) {
    float t = clb_abs(x) > 10.0f ? 10.0f : clb_abs(x);
    float y = clb_expm1(t + t);
    return clb_copysign(y / (y + 2.0f), x);
}

/* exp(-|x|) cannot overflow, and for x < 0 it carries the tail down to the denormals. */
static inline float clb_sigmoid(float x) {
    float z = clb_exp(-clb_abs(x));
    return (x < 0.0f ? z : 1.0f) / (1.0f + z);
}

/* |x| < 27/32: x + x P(x^2).  Beyond: 1 - exp(-t Q(t)), where Q fits -log(erfc(t)) / t up to t = 4,
 * and erf(4) rounds to 1. */
static inline float clb_erf(float x) {
    float s = x * x;
    float t = clb_abs(x) > 4.0f ? 4.0f : clb_abs(x);
    float p = clb_horner(s, -0x1.4ea96cp-11f, 0x1.4bcf64p-8f, -0x1.b7416ep-6f, 0x1.ce25fap-4f,
                         -0x1.812728p-2f);
    float q = clb_horner(t, -0x1.c3ddd8p-13f, 0x1.a6ff3cp-9f, -0x1.77accep-6f, 0x1.af67aep-4f,
                         0x1.4576bap-1f);
    q = q * t + 0x1.20e73ap+0f;
    q = 1.0f - clb_exp_kernel(-(q * t), 0.0f);
    return t < 0.84375f ? x + x * (p * s + 0x1.06eba8p-3f) : clb_copysign(q, x);
}

/* x sigmoid(x) */
static inline float clb_silu(float x) { return x / (1.0f + clb_exp(-x)); }

/* x Phi(x) = max(x, 0) - t Phi(-t), t = |x|, Phi the normal distribution function. Phi(-t) =
 * exp(-t^2/2) P(t)/Q(t): the rational fits erfcx(t / sqrt(2)) / 2 up to t = 14.6, beyond which t
 * Phi(-t) rounds to 0.  t^2/2 is a sum of two floats, the first exact from the upper 12 bits of t,
 * because its rounding error would otherwise grow to 100 ulp in the tail. */
static inline float clb_gelu(float x) {
    float t = clb_abs(x) > 15.0f ? 15.0f : clb_abs(x);
    float hi = clb_from_bits(clb_bits(t) & 0xfffff000u);
    float e = clb_exp_kernel(-((0.5f * hi) * hi), (0.5f * (t - hi)) * (t + hi));
    float p = clb_horner(t, 0x1.0c3a2cp-8f, 0x1.4bb5c0p-5f, 0x1.767494p-3f, 0x1.c04db8p-2f, 0.5f);
    float q = clb_horner(t, 0x1.502b44p-7f, 0x1.9fc376p-4f, 0x1.dfa91cp-2f, 0x1.336f52p+0f,
                         0x1.ac690ap+0f);
    q = q * t + 1.0f;
    return (x < 0.0f ? 0.0f : x) - ((t * p) / q) * e;
}

/* x (1 + tanh(y)) / 2 = x / (1 + exp(-2y)) with y = sqrt(2/pi) (x + 0.044715 x^3). */
static inline float clb_gelu_tanh(float x) {
    float y = x * (0x1.988454p+0f + 0x1.2444f2p-4f * (x * x));
    return x / (1.0f + clb_exp(-y));
}

static inline float clb_softplus(float x) {
    float y = clb_log1p(clb_exp(x));
    return x > 20.0f ? x : y;
}

static inline float clb_elu(float x) {
    float y = clb_expm1(x);
    return x > 0.0f ? x : y;
}

static inline float clb_hardsigmoid(float x) {
    float y = x + 3.0f < 0.0f ? 0.0f : x + 3.0f;
    return (y > 6.0f ? 6.0f : y) / 6.0f;
}

static inline float clb_hardswish(float x) { return x * clb_hardsigmoid(x); }

#endif
