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

/* Quantised rows: exact integer sums, |sum| ≤ 128 · 127 · 127 < 2^21 in a group, added as floats in order. */
static void product_q_i8(const uint8_t *matrix, size_t stride, uint32_t blocks, const clb_tile *tile, uint32_t cols,
                         float total[CLB_TILE][CLB_WIDTH])
{
    for (uint32_t b = 0; b < blocks; ++b) {
        const int8_t *w = (const int8_t *)(matrix + b * stride + CLB_LANES * sizeof(float));
        for (uint32_t row = 0; row < tile->rows; ++row) {
            const clb_record x = clb_record_at(tile->a[row], cols);
            for (uint32_t start = 0; start < cols; start += CLB_ACTIVATION_GROUP) {
                const uint32_t end = start + clb_min(cols - start, CLB_ACTIVATION_GROUP);
                int32_t sum[CLB_LANES] = {0};
                for (uint32_t k = start; k < end; k += 4) { /* inputs and weights are padded with zeros to 4 */
                    const int8_t *quad = w + (size_t)k * CLB_LANES;
                    for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {
                        for (uint32_t i = 0; i < 4; ++i) {
                            sum[lane] += quad[lane * 4 + i] * x.q[k + i];
                        }
                    }
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
                const int8_t *q = x.q + (size_t)g * CLB_WEIGHT_GROUP;
                for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {
                    /* unsigned, because a hostile program may hand over a record that is none */
                    uint32_t sum = 0u - 8u * (uint32_t)x.sum[g];
                    for (uint32_t i = 0; i < 16; ++i) {
                        const uint8_t pair = group[CLB_LANES * 2 + i / 4 * 32 + lane * 4 + i % 4];
                        sum += (uint32_t)((pair & 15) * q[i] + (pair >> 4) * q[i + 16]);
                    }
                    inner[lane] += (float)(int32_t)sum * clb_half(scale[lane]);
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
