// The model with templates.hpp, as float or, with FIXED, in Q16.16. The router's probability is computed in float
// behind the layer: TinyMind's top-1 layer leaves it to the caller.
#include <math.h>

#include "harness.h"
#include "templates.hpp"

#ifdef FIXED
using Value = style::Fixed<16>;
#include "weights_q16.h"
static inline float to_float(Value x)
{
    return x.to_float();
}
static inline Value from_float(float x)
{
    return Value::of(x);
}
#else
using Value = float;
#include "weights_fp32.h"
static inline float to_float(Value x)
{
    return x;
}
static inline Value from_float(float x)
{
    return x;
}
#endif

using Expert = style::Expert<Value, FEATURES, HIDDEN, WIDTH>;
static constexpr style::MixtureOfExperts<Value, FEATURES, WIDTH, EXPERTS, Expert> moe = {
    {gate_weight, gate_bias},
    {{{first_weight[0], first_bias[0]}, {second_weight[0], second_bias[0]}},
     {{first_weight[1], first_bias[1]}, {second_weight[1], second_bias[1]}},
     {{first_weight[2], first_bias[2]}, {second_weight[2], second_bias[2]}}}};
static constexpr style::Linear<Value, WIDTH, 1> head = {head_weight, head_bias};

int peer_start(void)
{
    return 0;
}

float peer_forecast(const float *features)
{
    Value input[FEATURES], logits[EXPERTS], mixed[WIDTH], change[1];
    for (size_t i = 0; i < FEATURES; ++i) {
        input[i] = from_float(features[i]);
    }
    const size_t chosen = moe.forward(input, logits, mixed);
    float total = 0.0f;
    for (size_t e = 0; e < EXPERTS; ++e) {
        total += expf(to_float(logits[e]) - to_float(logits[chosen]));
    }
    const Value probability = from_float(1.0f / total);
    for (size_t i = 0; i < WIDTH; ++i) {
        mixed[i] = mixed[i] * probability;
    }
    style::relu<Value, WIDTH>(mixed);
    head.forward(mixed, change);
    return to_float(change[0]);
}
