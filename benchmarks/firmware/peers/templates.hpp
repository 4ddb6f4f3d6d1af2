// Layers as header-only C++ templates, in the style of TinyMind: sizes and number type are parameters, weights are the
// caller's, an argmax over the router's scores dispatches to one expert. Written for this comparison.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace style {

// A fixed-point number of 32 bits, `Fraction` of them behind the point; products are rounded down, sums may wrap.
template <unsigned Fraction> struct Fixed {
    int32_t raw;

    static constexpr Fixed of(float x)
    {
        return {static_cast<int32_t>(x * (1 << Fraction) + (x < 0 ? -0.5f : 0.5f))};
    }
    constexpr float to_float() const
    {
        return static_cast<float>(raw) / (1 << Fraction);
    }
    constexpr Fixed operator*(Fixed other) const
    {
        return {static_cast<int32_t>(static_cast<int64_t>(raw) * other.raw >> Fraction)};
    }
    Fixed &operator+=(Fixed other)
    {
        raw += other.raw;
        return *this;
    }
    constexpr bool operator>(Fixed other) const
    {
        return raw > other.raw;
    }
};

template <typename Value, size_t Inputs, size_t Outputs> struct Linear {
    const Value *weights; // [Outputs][Inputs]
    const Value *biases;

    void forward(const Value *input, Value *output) const
    {
        for (size_t o = 0; o < Outputs; ++o) {
            Value sum = biases[o];
            for (size_t i = 0; i < Inputs; ++i) {
                sum += weights[o * Inputs + i] * input[i];
            }
            output[o] = sum;
        }
    }
};

template <typename Value, size_t Count> void relu(Value *values)
{
    for (size_t i = 0; i < Count; ++i) {
        values[i] = values[i] > Value{} ? values[i] : Value{};
    }
}

template <typename Value, size_t Inputs, size_t Hidden, size_t Outputs> struct Expert {
    Linear<Value, Inputs, Hidden> first;
    Linear<Value, Hidden, Outputs> second;

    void forward(const Value *input, Value *output) const
    {
        Value hidden[Hidden];
        first.forward(input, hidden);
        relu<Value, Hidden>(hidden);
        second.forward(hidden, output);
    }
};

template <typename Value, size_t Inputs, size_t Outputs, size_t Count, typename ExpertType> struct MixtureOfExperts {
    Linear<Value, Inputs, Count> router;
    ExpertType experts[Count];

    size_t forward(const Value *input, Value *logits, Value *output) const
    {
        router.forward(input, logits);
        size_t best = 0;
        for (size_t e = 1; e < Count; ++e) {
            best = logits[e] > logits[best] ? e : best;
        }
        experts[best].forward(input, output);
        return best;
    }
};

} // namespace style
