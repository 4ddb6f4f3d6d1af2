/* The kernels in plain C, what every other instruction set must equal; and those of small cores,
 * which differ in how they add products of bytes. */
#include "../core/internal.h"

#include "panel.h"
#include "vector.h"

/* Float rows: groups of 256 inputs are summed from +0, and the groups added in order. */
#define FLOAT_PRODUCT(name, type, weight)                                                          \
    OF_MATRIX void name(const uint8_t *matrix, size_t stride, uint32_t outputs,                    \
                        const clb_tile *tile, uint32_t cols, float total[CLB_TILE][CLB_WIDTH]) {   \
        for (uint32_t b = 0; b < clb_ceil(outputs, CLB_LANES); ++b) {                              \
            const uint32_t live = outputs - b * CLB_LANES;                                         \
            const type *w = clb_at(matrix, b * stride);                                            \
            for (uint32_t row = 0; row < clb_rows(tile); ++row) {                                  \
                const float *x = tile->a[row];                                                     \
                float *out = total[row] + b * CLB_LANES;                                           \
                for (uint32_t start = 0; start < cols; start += CLB_GROUP) {                       \
                    const uint32_t end = start + clb_min(cols - start, CLB_GROUP);                 \
                    if (CLB_SCALAR && live < CLB_LANES / 2) {                                      \
                        for (uint32_t lane = 0; lane < live; ++lane) {                             \
                            float chain = 0.0f;                                                    \
                            UNROLL_4 for (uint32_t k = start; k < end; ++k) {                      \
                                chain += (weight) * x[k];                                          \
                            }                                                                      \
                            out[lane] += chain;                                                    \
                        }                                                                          \
                        continue;                                                                  \
                    }                                                                              \
                    float chain[CLB_LANES] = {0};                                                  \
                    for (uint32_t k = start; k < end; ++k) {                                       \
                        ALL_LANES { chain[lane] += (weight) * x[k]; }                              \
                    }                                                                              \
                    ALL_LANES { out[lane] += chain[lane]; }                                        \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

FLOAT_PRODUCT(product_f32, float, w[(size_t)k * CLB_LANES + lane])
FLOAT_PRODUCT(product_f16, uint16_t, clb_half(w[(size_t)k * CLB_LANES + lane]))
/* past the 8 scales: quads of inputs, 8 rows × 4 */
FLOAT_PRODUCT(product_i8, int8_t,
              (float)
                  w[CLB_LANES * sizeof(float) + (size_t)(k / 4) * 4 * CLB_LANES + lane * 4 + k % 4])

/* sum[i] += 4 weights of each of QUARTER rows times 4 inputs: as many sums as a small core's
 * registers hold. */
enum { QUARTER = 4 };

/* Words of four bytes. */
static inline const uint32_t *words_at(const void *bytes) { return bytes; }

#ifdef __ARM_FEATURE_MVE
#include <arm_mve.h>

#define NAME "helium" /* its integers only: its float vectors flush denormals */

/* A pair of products stays below 2 · 127 · 127 < 2^15. */
static inline void add_four(int32_t sum[QUARTER], const uint32_t weights[QUARTER],
                            uint32_t inputs) {
    const int8x16_t w = vreinterpretq_s8_u32(vld1q_u32(weights));
    const int8x16_t x = vreinterpretq_s8_u32(vdupq_n_u32(inputs));
    const int16x8_t pairs = vaddq_s16(vmullbq_int_s8(w, x), vmulltq_int_s8(w, x));
    vst1q_s32(sum, vaddq_s32(vld1q_s32(sum), vaddq_s32(vmovlbq_s16(pairs), vmovltq_s16(pairs))));
}
#elif defined(__ARM_FEATURE_DSP)
#include <arm_acle.h>

#define NAME "dsp"

/* The second and fourth of four bytes, as 16-bit numbers; __sxtb16 has the first and third. */
static inline int16x2_t odd_of(uint32_t four) {
    int16x2_t pair;
    __asm__("sxtb16 %0, %1, ror #8" : "=r"(pair) : "r"(four));
    return pair;
}

static inline void add_four(int32_t sum[QUARTER], const uint32_t weights[QUARTER],
                            uint32_t inputs) {
    const int16x2_t even = __sxtb16(inputs);
    const int16x2_t odd = odd_of(inputs);
    UNROLL_8 for (uint32_t i = 0; i < QUARTER; ++i) {
        sum[i] = __smlad(__sxtb16(weights[i]), even, __smlad(odd_of(weights[i]), odd, sum[i]));
    }
}
#else
#define NAME "plain"

static inline void add_four(int32_t sum[QUARTER], const uint32_t weights[QUARTER],
                            uint32_t inputs) {
    const int8_t *w = (const void *)weights;
    const int8_t *x = (const void *)&inputs;
    UNROLL_8 for (uint32_t i = 0; i < QUARTER; ++i) {
        sum[i] += w[i * 4] * x[0] + w[i * 4 + 1] * x[1] + w[i * 4 + 2] * x[2] + w[i * 4 + 3] * x[3];
    }
}
#endif

/* `fours` times 4 inputs of QUARTER rows. */
static NOINLINE void add_fours(int32_t total[QUARTER], const uint32_t *w, const uint32_t *q,
                               uint32_t fours) {
    const uint32_t *stop = q + fours;
    int32_t sum[QUARTER] = {0};
    for (; q < stop; ++q, w += CLB_LANES) {
        add_four(sum, w, *q);
    }
    UNROLL_8 for (uint32_t i = 0; i < QUARTER;
                  ++i) { /* no memcpy, which is a call where nothing is built in */
        total[i] = sum[i];
    }
}

/* Quantised rows: exact integer sums, |sum| ≤ 128 · 127 · 127 < 2^21 in a group, added as floats in
 * order. Inputs and weights are padded with zeros to 4. */
OF_MATRIX void product_q_i8(const uint8_t *matrix, size_t stride, uint32_t outputs,
                            const clb_tile *tile, uint32_t cols, float total[CLB_TILE][CLB_WIDTH]) {
    for (uint32_t row = 0; row < clb_rows(tile); ++row) {
        const clb_quantized x = clb_quantized_at(tile->a[row], cols);
        const uint32_t *const inputs = words_at(x.q);
        const uint32_t *const end = inputs + clb_ceil(cols, 4);
        for (uint32_t at = 0; at < outputs; at += QUARTER) {
            const uint8_t *block = matrix + at / CLB_LANES * stride + CLB_LANES * sizeof(float);
            const uint32_t *w = words_at(block) + at % CLB_LANES;
            const uint32_t *q = inputs;
            float *out = total[row] + at;
            for (const float *scale = x.scale; q < end; ++scale) {
                const uint32_t fours = clb_min((uint32_t)(end - q), CLB_ACTIVATION_GROUP / 4);
                int32_t sum[QUARTER];
                add_fours(sum, w, q, fours);
                q += fours;
                w += fours * CLB_LANES;
                UNROLL_8 for (uint32_t i = 0; i < QUARTER; ++i) {
                    out[i] += (float)sum[i] * *scale;
                }
            }
        }
    }
}

/* The nibbles are the weights plus 8, so that 8 · Σ inputs is taken off again; |sum| ≤ 32 · 15 ·
 * 127 < 2^16. */
OF_MATRIX void product_q_i4(const uint8_t *matrix, size_t stride, uint32_t outputs,
                            const clb_tile *tile, uint32_t cols, float total[CLB_TILE][CLB_WIDTH]) {
    const uint32_t groups = clb_ceil(cols, CLB_WEIGHT_GROUP);
    for (uint32_t b = 0; b < clb_ceil(outputs, CLB_LANES); ++b) {
        for (uint32_t row = 0; row < clb_rows(tile); ++row) {
            const clb_quantized x = clb_quantized_at(tile->a[row], cols);
            float inner[CLB_LANES] = {0};
            for (uint32_t g = 0; g < groups; ++g) {
                const uint8_t *group = matrix + b * stride + (size_t)g * CLB_INT4_BYTES;
                const uint16_t *scale = clb_at(group, 0);
                const uint32_t *both = clb_at(group, CLB_LANES * 2);
                const uint32_t *q = words_at(x.q + (size_t)g * CLB_WEIGHT_GROUP);
                int32_t sum[CLB_LANES] = {0};
                for (uint32_t four = 0; four < 4; ++four) {
                    uint32_t low[CLB_LANES];
                    uint32_t high[CLB_LANES];
                    ALL_LANES {
                        low[lane] = both[four * CLB_LANES + lane] & 0x0F0F0F0Fu;
                        high[lane] = both[four * CLB_LANES + lane] >> 4 & 0x0F0F0F0Fu;
                    }
                    for (uint32_t lane = 0; lane < CLB_LANES; lane += QUARTER) {
                        add_four(sum + lane, low + lane, q[four]);
                        add_four(sum + lane, high + lane, q[four + 4]);
                    }
                }
                ALL_LANES {
                    /* unsigned, because a hostile program may hand over a row that is none */
                    const int32_t exact = (int32_t)((uint32_t)sum[lane] - 8u * (uint32_t)x.sum[g]);
                    inner[lane] += (float)exact * clb_half(scale[lane]);
                }
                const uint32_t per = CLB_ACTIVATION_GROUP / CLB_WEIGHT_GROUP;
                if (g % per == per - 1 || g == groups - 1) {
                    ALL_LANES {
                        total[row][b * CLB_LANES + lane] += inner[lane] * x.scale[g / per];
                        inner[lane] = 0.0f;
                    }
                }
            }
        }
    }
}

CLB_INTERNAL const clb_kernels clb_kernels_plain = KERNELS(NAME);
