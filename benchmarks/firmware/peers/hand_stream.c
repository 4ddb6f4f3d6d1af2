/* The stream by hand in plain C, as one would write it first: arrays, a loop for each matrix, the
 * past in static arrays. INT8 1 multiplies bytes, with a scale for each row of weights and one for
 * each vector of inputs, found as it comes; the classifier stays float. 2 multiplies with the DSP
 * instructions, a row at a time. */
#include <math.h>
#include <string.h>

#include "harness.h"
#if INT8
#include "stream_int8.h"
#else
#include "stream_fp32.h"
#endif
#if INT8 == 2
#include <arm_acle.h>
#endif

static float past[TAPS * CHANNELS], state[HIDDEN];

/* y (rows) = w (rows, columns) x + bias */
static void linear(const float *w, const float *bias, const float *x, float *y, int rows,
                   int columns) {
    for (int row = 0; row < rows; ++row) {
        float sum = bias[row];
        for (int column = 0; column < columns; ++column) {
            sum += w[row * columns + column] * x[column];
        }
        y[row] = sum;
    }
}

#if INT8
/* A vector's largest magnitude becomes 127; returns the scale. Columns are whole words. */
static float quantise(const float *x, int count, int8_t *q) {
    float most = 0.0f;
    for (int i = 0; i < count; ++i) {
        most = fmaxf(most, fabsf(x[i]));
    }
    const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
    for (int i = 0; i < count; ++i) {
        q[i] = (int8_t)lrintf(x[i] * inverse);
    }
    return most / 127.0f;
}

static int32_t dot(const int8_t *w, const int8_t *x, int columns) {
    int32_t sum = 0;
#if INT8 == 2
    for (int column = 0; column < columns; column += 4) {
        int8x4_t four, input;
        memcpy(&four, w + column, sizeof four);
        memcpy(&input, x + column, sizeof input);
        sum = __smlad(__sxtb16(four), __sxtb16(input), sum);
        int16x2_t odd, odd_input; /* the compiler does not fold a rotation into SXTB16 */
        __asm__("sxtb16 %0, %1, ror #8" : "=r"(odd) : "r"(four));
        __asm__("sxtb16 %0, %1, ror #8" : "=r"(odd_input) : "r"(input));
        sum = __smlad(odd, odd_input, sum);
    }
#else
    for (int column = 0; column < columns; ++column) {
        sum += w[column] * x[column];
    }
#endif
    return sum;
}

static void product(const int8_t *w, const float *scale, const float *bias, const float *x,
                    float *y, int rows, int columns) {
    _Alignas(4) int8_t q[TAPS * CHANNELS];
    const float input_scale = quantise(x, columns, q);
    for (int row = 0; row < rows; ++row) {
        y[row] = bias[row] + (float)dot(w + row * columns, q, columns) * (scale[row] * input_scale);
    }
}
#define PRODUCT(name, x, y, rows, columns)                                                         \
    product(name##_weight, name##_scale, name##_bias, x, y, rows, columns)
#else
#define PRODUCT(name, x, y, rows, columns) linear(name##_weight, name##_bias, x, y, rows, columns)
#endif

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

int peer_start(void) { return 0; }

float peer_forecast(const float *features) {
    float y[WIDTH], now[3 * HIDDEN], before[3 * HIDDEN], logits[CLASSES];
    memmove(past, past + CHANNELS, (TAPS - 1) * CHANNELS * sizeof *past);
    memcpy(past + (TAPS - 1) * CHANNELS, features, CHANNELS * sizeof *past);
    PRODUCT(conv, past, y, WIDTH, TAPS * CHANNELS);
    for (int i = 0; i < WIDTH; ++i) {
        y[i] = y[i] > 0.0f ? y[i] : 0.0f;
    }
    PRODUCT(input, y, now, 3 * HIDDEN, WIDTH);
    PRODUCT(state, state, before, 3 * HIDDEN, HIDDEN);
    for (int i = 0; i < HIDDEN; ++i) {
        const float reset = sigmoid(now[i] + before[i]),
                    update = sigmoid(now[HIDDEN + i] + before[HIDDEN + i]);
        const float fresh = tanhf(now[2 * HIDDEN + i] + reset * before[2 * HIDDEN + i]);
        state[i] = (1.0f - update) * fresh + update * state[i];
    }
    linear(head_weight, head_bias, state, logits, CLASSES, HIDDEN);
    float most = logits[0], sum = 0.0f;
    for (int i = 1; i < CLASSES; ++i) {
        most = logits[i] > most ? logits[i] : most;
    }
    for (int i = 0; i < CLASSES; ++i) {
        logits[i] = expf(logits[i] - most);
        sum += logits[i];
    }
    return logits[0] / sum;
}
