/* The kernels in plain C: what every other instruction set must equal. */
#include "../internal.h"

#include "../panel.h"
#include "../vector.h"

/* Float rows: groups of 256 inputs are summed from +0, and the groups added in order. */
#define FLOAT_PRODUCT(name, type, weight)                                                                              \
    static void name(const uint8_t *matrix, size_t stride, uint32_t blocks, const clb_tile *tile, uint32_t cols,       \
                     float total[CLB_TILE][CLB_WIDTH])                                                                 \
    {                                                                                                                  \
        for (uint32_t b = 0; b < blocks; ++b) {                                                                        \
            const type *w = (const type *)(const void *)(matrix + b * stride);                                         \
            for (uint32_t row = 0; row < tile->rows; ++row) {                                                          \
                const float *x = tile->a[row];                                                                         \
                for (uint32_t start = 0; start < cols; start += CLB_GROUP) {                                           \
                    const uint32_t end = start + clb_min(cols - start, CLB_GROUP);                                     \
                    float chain[CLB_LANES] = {0};                                                                      \
                    for (uint32_t k = start; k < end; ++k) {                                                           \
                        for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {                                            \
                            chain[lane] += (weight)*x[k];                                                              \
                        }                                                                                              \
                    }                                                                                                  \
                    for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {                                                \
                        total[row][b * CLB_LANES + lane] += chain[lane];                                                            \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

FLOAT_PRODUCT(product_f32, float, w[(size_t)k * CLB_LANES + lane])
FLOAT_PRODUCT(product_f16, uint16_t, clb_half(w[(size_t)k * CLB_LANES + lane]))
/* past the 8 scales: quads of inputs, 8 rows × 4 */
FLOAT_PRODUCT(product_i8, int8_t,
              (float)w[CLB_LANES * sizeof(float) + (size_t)(k / 4) * 4 * CLB_LANES + lane * 4 + k % 4])

/* sum[row] += 4 weights of each of 8 rows times 4 inputs. */
#if defined(__ARM_FEATURE_DSP)
#include <arm_acle.h>

/* Two of four bytes, the first and third or the second and fourth, as 16-bit numbers. */
static inline int16x2_t pair_of(uint32_t four, int odd)
{
    return __sxtb16(odd ? four >> 8 | four << 24 : four);
}

static inline void add_four(int32_t sum[CLB_LANES], const uint32_t weights[CLB_LANES], uint32_t inputs)
{
    const int16x2_t even = pair_of(inputs, 0), odd = pair_of(inputs, 1);
    for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {
        sum[lane] = __smlad(pair_of(weights[lane], 0), even, __smlad(pair_of(weights[lane], 1), odd, sum[lane]));
    }
}
#else
static inline void add_four(int32_t sum[CLB_LANES], const uint32_t weights[CLB_LANES], uint32_t inputs)
{
    const int8_t *w = (const int8_t *)(const void *)weights, *x = (const int8_t *)(const void *)&inputs;
    for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {
        for (uint32_t i = 0; i < 4; ++i) {
            sum[lane] += w[lane * 4 + i] * x[i];
        }
    }
}
#endif

/* Quantised rows: exact integer sums, |sum| ≤ 128 · 127 · 127 < 2^21 in a group, added as floats in order. Inputs and
 * weights are padded with zeros to 4. */
static void product_q_i8(const uint8_t *matrix, size_t stride, uint32_t blocks, const clb_tile *tile, uint32_t cols,
                         float total[CLB_TILE][CLB_WIDTH])
{
    for (uint32_t b = 0; b < blocks; ++b) {
        const uint32_t *w = (const uint32_t *)(const void *)(matrix + b * stride + CLB_LANES * sizeof(float));
        for (uint32_t row = 0; row < tile->rows; ++row) {
            const clb_record x = clb_record_at(tile->a[row], cols);
            const uint32_t *q = (const uint32_t *)(const void *)x.q;
            for (uint32_t start = 0; start < cols; start += CLB_ACTIVATION_GROUP) {
                const uint32_t end = start + clb_min(cols - start, CLB_ACTIVATION_GROUP);
                int32_t sum[CLB_LANES] = {0};
                for (uint32_t four = start / 4; four < clb_ceil(end, 4); ++four) {
                    add_four(sum, w + (size_t)four * CLB_LANES, q[four]);
                }
                for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {
                    total[row][b * CLB_LANES + lane] += (float)sum[lane] * x.scale[start / CLB_ACTIVATION_GROUP];
                }
            }
        }
    }
}

/* The nibbles are the weights plus 8, so that 8 · Σ inputs is taken off again; |sum| ≤ 32 · 15 · 127 < 2^16. */
static void product_q_i4(const uint8_t *matrix, size_t stride, uint32_t blocks, const clb_tile *tile, uint32_t cols,
                         float total[CLB_TILE][CLB_WIDTH])
{
    const uint32_t groups = clb_ceil(cols, CLB_WEIGHT_GROUP);
    for (uint32_t b = 0; b < blocks; ++b) {
        for (uint32_t row = 0; row < tile->rows; ++row) {
            const clb_record x = clb_record_at(tile->a[row], cols);
            float inner[CLB_LANES] = {0};
            for (uint32_t g = 0; g < groups; ++g) {
                const uint8_t *group = matrix + b * stride + (size_t)g * (CLB_LANES * 18);
                const uint16_t *scale = (const uint16_t *)(const void *)group;
                const uint32_t *both = (const uint32_t *)(const void *)(group + CLB_LANES * 2);
                const uint32_t *q = (const uint32_t *)(const void *)(x.q + (size_t)g * CLB_WEIGHT_GROUP);
                int32_t sum[CLB_LANES] = {0};
                for (uint32_t four = 0; four < 4; ++four) {
                    uint32_t low[CLB_LANES], high[CLB_LANES];
                    for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {
                        low[lane] = both[four * CLB_LANES + lane] & 0x0F0F0F0Fu;
                        high[lane] = both[four * CLB_LANES + lane] >> 4 & 0x0F0F0F0Fu;
                    }
                    add_four(sum, low, q[four]);
                    add_four(sum, high, q[four + 4]);
                }
                for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {
                    /* unsigned, because a hostile program may hand over a record that is none */
                    const int32_t exact = (int32_t)((uint32_t)sum[lane] - 8u * (uint32_t)x.sum[g]);
                    inner[lane] += (float)exact * clb_half(scale[lane]);
                }
                const uint32_t per = CLB_ACTIVATION_GROUP / CLB_WEIGHT_GROUP;
                if (g % per == per - 1 || g == groups - 1) {
                    for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {
                        total[row][b * CLB_LANES + lane] += inner[lane] * x.scale[g / per];
                        inner[lane] = 0.0f;
                    }
                }
            }
        }
    }
}

const clb_kernels clb_kernels_plain = KERNELS("plain");
