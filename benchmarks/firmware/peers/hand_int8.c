/* The model by hand, int8: a scale for each row of weights, and one for each vector of activations,
 * found as it comes. The head stays float, which is cheaper than quantising its inputs, and so does
 * the gate, whose near ties int8 turns over, but with INT8_GATE. VARIANT 0 is plain C; 1 multiplies
 * with the DSP instructions, a row at a time; 2 takes four rows at a time, whose weights lie side
 * by side, and inputs widened once. */
#include <arm_acle.h>
#include <math.h>
#include <string.h>

#include "harness.h"
#if VARIANT == 2
#include "packed_int8.h"
#else
#include "weights_int8.h"
#endif

#if VARIANT == 2
/* Four inputs in two words: 16 bits each, the first and third, then the second and fourth, as
 * SXTB16 parts weights. */
typedef struct {
    int16x2_t even, odd;
} input_t;
#else
typedef struct {
    int8_t q[4];
} input_t;
#endif

#if VARIANT != 0
static inline int16x2_t even(int8x4_t bytes) { return __sxtb16(bytes); }

static inline int16x2_t odd(int8x4_t bytes) {
    int16x2_t pair; /* the compiler does not fold a rotation into SXTB16 */
    __asm__("sxtb16 %0, %1, ror #8" : "=r"(pair) : "r"(bytes));
    return pair;
}

static inline int8x4_t load(const void *bytes) {
    int8x4_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}
#endif

/* The nearest integer in the low half of the result: at 1.5 * 2^23 a float's last bit is worth
 * 1. */
static inline uint32_t nearest(float x) {
    const float sum = x + 12582912.0f;
    uint32_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return bits;
}

static inline void put(input_t *to, float a, float b, float c, float d) {
#if VARIANT == 2
    to->even = (int16x2_t)((nearest(a) & 0xFFFF) | nearest(c) << 16);
    to->odd = (int16x2_t)((nearest(b) & 0xFFFF) | nearest(d) << 16);
#else
    to->q[0] = (int8_t)nearest(a), to->q[1] = (int8_t)nearest(b);
    to->q[2] = (int8_t)nearest(c), to->q[3] = (int8_t)nearest(d);
#endif
}

/* Quantises `count` values, an even number, into inputs of four, zeros behind the last; returns
 * their scale. */
static float quantise(const float *x, int count, input_t *to) {
    float most = 0.0f;
    for (int i = 0; i < count; i += 2) {
        most = fmaxf(fmaxf(most, fabsf(x[i])), fabsf(x[i + 1]));
    }
    const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
    const float *const end = x + count - 2;
    for (; x < end; x += 4) {
        put(to++, x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse);
    }
    if (count % 4 != 0) {
        put(to, x[0] * inverse, x[1] * inverse, 0.0f, 0.0f);
    }
    return most / 127.0f;
}

#if VARIANT == 2
/* The sums of a group of four rows; returns where the next one's weights are. */
static inline const int8_t *four_rows(const int8_t *w, int words, const input_t *x, int32_t *sums) {
    int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    for (const input_t *end = x + words; x < end; ++x, w += 16) {
        const int16x2_t a = x->even, b = x->odd;
        const int8x4_t w0 = load(w), w1 = load(w + 4), w2 = load(w + 8), w3 = load(w + 12);
        s0 = __smlad(even(w0), a, s0), s0 = __smlad(odd(w0), b, s0);
        s1 = __smlad(even(w1), a, s1), s1 = __smlad(odd(w1), b, s1);
        s2 = __smlad(even(w2), a, s2), s2 = __smlad(odd(w2), b, s2);
        s3 = __smlad(even(w3), a, s3), s3 = __smlad(odd(w3), b, s3);
    }
    sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
    return w;
}
#endif

#if VARIANT != 2
static inline int32_t one_row(const int8_t *w, int words, const input_t *x) {
    int32_t sum = 0;
    for (int word = 0; word < words; ++word) {
#if VARIANT == 0
        for (int i = 0; i < 4; ++i) {
            sum += w[4 * word + i] * x[word].q[i];
        }
#else
        const int8x4_t bytes = load(w + 4 * word), input = load(x + word);
        sum = __smlad(even(bytes), even(input), sum), sum = __smlad(odd(bytes), odd(input), sum);
#endif
    }
    return sum;
}
#endif

/* y (rows) = w (rows, 4 words) x + bias; `scale` is the inputs'. */
static void linear(const int8_t *w, const float *row_scale, const float *bias, const input_t *x,
                   float scale, float *y, int rows, int words) {
#if VARIANT == 2
    for (int row = 0; row < rows; row += 4) {
        int32_t sums[4];
        w = four_rows(w, words, x, sums);
        for (int i = 0; i < 4 && row + i < rows; ++i) {
            y[row + i] = bias[row + i] + (float)sums[i] * (row_scale[row + i] * scale);
        }
    }
#else
    for (int row = 0; row < rows; ++row) {
        y[row] =
            bias[row] + (float)one_row(w + 4 * row * words, words, x) * (row_scale[row] * scale);
    }
#endif
}

#ifndef INT8_GATE
static void float_gate(const float *x, float *logits) {
#if VARIANT == 2
    _Static_assert(EXPERTS == 3, "a sum each");
    const float *w = gate_float;
    float s0 = gate_bias[0], s1 = gate_bias[1], s2 = gate_bias[2];
    for (int i = 0; i < FEATURES; ++i) {
        s0 += w[i] * x[i], s1 += w[FEATURES + i] * x[i], s2 += w[2 * FEATURES + i] * x[i];
    }
    logits[0] = s0, logits[1] = s1, logits[2] = s2;
#else
    for (int e = 0; e < EXPERTS; ++e) {
        float sum = gate_bias[e];
        for (int i = 0; i < FEATURES; ++i) {
            sum += gate_float[e * FEATURES + i] * x[i];
        }
        logits[e] = sum;
    }
#endif
}
#endif

static void relu(float *x, int count) {
    for (int i = 0; i < count; ++i) {
        x[i] = x[i] > 0.0f ? x[i] : 0.0f;
    }
}

int peer_start(void) { return 0; }

float peer_forecast(const float *features) {
    input_t input[FEATURES_WORDS];
    float logits[EXPERTS], hidden[HIDDEN], out[WIDTH];
    float scale = quantise(features, FEATURES, input);
#ifdef INT8_GATE
    linear(gate_weight, gate_scale, gate_bias, input, scale, logits, EXPERTS, FEATURES_WORDS);
#else
    float_gate(features, logits);
#endif
    int chosen = 0;
    for (int e = 1; e < EXPERTS; ++e) {
        chosen = logits[e] > logits[chosen] ? e : chosen;
    }
    float total = 0.0f; /* 1 / the chosen expert's probability */
    for (int e = 0; e < EXPERTS; ++e) {
        total += expf(logits[e] - logits[chosen]);
    }
    linear(first_weight[chosen], first_scale[chosen], first_bias[chosen], input, scale, hidden,
           HIDDEN, FEATURES_WORDS);
    relu(hidden, HIDDEN);
    scale = quantise(hidden, HIDDEN, input);
    linear(second_weight[chosen], second_scale[chosen], second_bias[chosen], input, scale, out,
           WIDTH, HIDDEN / 4);
    relu(out, WIDTH);
    float change = 0.0f;
    for (int i = 0; i < WIDTH; ++i) {
        change += head_float[i] * out[i];
    }
    return change / total + head_bias[0];
}
