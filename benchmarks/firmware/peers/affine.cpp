// The model in the affine int8 arithmetic of TFLite, CMSIS-NN and TinyMind's quantised layers, as templates in the
// latter's style: ranges of activations fixed beforehand, a zero point, integer rescaling of each sum. The products are
// SMLAD's. The router's sums are scaled to float for its probability, the head's for the answer.
#include <arm_acle.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "harness.h"
#include "weights_affine.h"

namespace style {

static inline int16x2_t odd(int8x4_t bytes)
{
    int16x2_t pair;
    __asm__("sxtb16 %0, %1, ror #8" : "=r"(pair) : "r"(bytes));
    return pair;
}

static inline int8_t clamp(int32_t x)
{
    return static_cast<int8_t>(__ssat(x, 8));
}

// Columns is a multiple of four.
template <size_t Columns, size_t Rows> struct Dense {
    const int8_t *weights;  // [Rows][Columns]
    const int32_t *biases;  // in units of input scale * row scale, the zero point's share taken off
    const int32_t *factors; // of each row: 2^31 * input scale * row scale / output scale, the latter below 1

    int32_t sum(size_t row, const int8_t *input) const
    {
        int32_t total = biases[row];
        const int8_t *w = weights + row * Columns;
        for (size_t i = 0; i < Columns; i += 4) {
            int8x4_t a, b;
            memcpy(&a, w + i, sizeof a);
            memcpy(&b, input + i, sizeof b);
            total = __smlad(__sxtb16(a), __sxtb16(b), total);
            total = __smlad(odd(a), odd(b), total);
        }
        return total;
    }

    // With a zero point of -128 the lower clamp is the ReLU.
    void forward(const int8_t *input, int8_t *output, int32_t zero) const
    {
        for (size_t row = 0; row < Rows; ++row) {
            const int64_t product = static_cast<int64_t>(sum(row, input)) * factors[row];
            output[row] = clamp(static_cast<int32_t>((product + (INT64_C(1) << 30)) >> 31) + zero);
        }
    }
};

} // namespace style

using Gate = style::Dense<FEATURES_PADDED, EXPERTS>;
using First = style::Dense<FEATURES_PADDED, HIDDEN>;
using Second = style::Dense<HIDDEN, WIDTH>;
using Head = style::Dense<WIDTH, 1>;

static constexpr Gate gate = {gate_weight, gate_bias, nullptr};
static constexpr First first[EXPERTS] = {{first_weight[0], first_bias[0], first_factor[0]},
                                         {first_weight[1], first_bias[1], first_factor[1]},
                                         {first_weight[2], first_bias[2], first_factor[2]}};
static constexpr Second second[EXPERTS] = {{second_weight[0], second_bias[0], second_factor[0]},
                                           {second_weight[1], second_bias[1], second_factor[1]},
                                           {second_weight[2], second_bias[2], second_factor[2]}};
static constexpr Head head = {head_weight, head_offset, nullptr};

int peer_start(void)
{
    return 0;
}

float peer_forecast(const float *features)
{
    int8_t input[FEATURES_PADDED] = {}, hidden[HIDDEN], out[WIDTH];
    for (size_t i = 0; i < FEATURES; ++i) {
        const float x = features[i] * INPUT_INVERSE;
        input[i] = style::clamp(static_cast<int32_t>(x + (x < 0 ? -0.5f : 0.5f)) + INPUT_ZERO);
    }
    float logits[EXPERTS];
    size_t chosen = 0;
    for (size_t e = 0; e < EXPERTS; ++e) {
        logits[e] = static_cast<float>(gate.sum(e, input)) * gate_scale[e];
        chosen = logits[e] > logits[chosen] ? e : chosen;
    }
    float total = 0.0f;
    for (size_t e = 0; e < EXPERTS; ++e) {
        total += expf(logits[e] - logits[chosen]);
    }
    first[chosen].forward(input, hidden, -128);
    second[chosen].forward(hidden, out, -128);
    // The probability scales the head's sum, not its bias, which stays out of it.
    return static_cast<float>(head.sum(0, out)) * head_scale[chosen] / total + head_bias[0];
}
