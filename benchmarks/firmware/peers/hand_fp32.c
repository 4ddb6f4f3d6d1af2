/* The model by hand in plain C, fp32: the chosen expert only, its probability applied behind the
 * ReLU, which a positive factor passes. With PACKED, four rows a pass, their weights side by side:
 * one pointer, and an input is loaded once for four products. */
#include <math.h>

#include "harness.h"
#ifdef PACKED
#include "packed_fp32.h"
#else
#include "weights_fp32.h"
#endif

#ifdef PACKED
/* y (rows) = w (groups of four rows, columns, 4) x + bias; columns are even. */
static void linear(const float *w, const float *bias, const float *x, float *y, int rows,
                   int columns) {
    for (int row = 0; row < rows; row += 4) {
        float s[4] = {0.0f};
        for (const float *at = x, *end = x + columns; at < end; at += 2, w += 8) {
            const float a = at[0], b = at[1];
            s[0] += w[0] * a, s[1] += w[1] * a, s[2] += w[2] * a, s[3] += w[3] * a;
            s[0] += w[4] * b, s[1] += w[5] * b, s[2] += w[6] * b, s[3] += w[7] * b;
        }
        for (int i = 0; i < 4 && row + i < rows; ++i) {
            y[row + i] = s[i] + bias[row + i];
        }
    }
}
#else
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
#endif

static void relu(float *x, int count) {
    for (int i = 0; i < count; ++i) {
        x[i] = x[i] > 0.0f ? x[i] : 0.0f;
    }
}

int peer_start(void) { return 0; }

float peer_forecast(const float *features) {
    float logits[EXPERTS], hidden[HIDDEN], out[WIDTH];
    linear(gate_weight, gate_bias, features, logits, EXPERTS, FEATURES);
    int chosen = 0;
    for (int e = 1; e < EXPERTS; ++e) {
        chosen = logits[e] > logits[chosen] ? e : chosen;
    }
    float total = 0.0f; /* 1 / the chosen expert's probability */
    for (int e = 0; e < EXPERTS; ++e) {
        total += expf(logits[e] - logits[chosen]);
    }
    linear(first_weight[chosen], first_bias[chosen], features, hidden, HIDDEN, FEATURES);
    relu(hidden, HIDDEN);
    linear(second_weight[chosen], second_bias[chosen], hidden, out, WIDTH, HIDDEN);
    relu(out, WIDTH);
    float change = 0.0f;
    for (int i = 0; i < WIDTH; ++i) {
        change += head_weight[i] * out[i];
    }
    return change / total + head_bias[0];
}
