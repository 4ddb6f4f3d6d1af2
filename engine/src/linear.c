/* The float32 matrix product. A weight matrix is stored in blocks of 8 output rows, inputs × 8, so that a lane is one
 * output row and its sum one chain whatever the vector width: groups of 256 inputs are summed from +0, and the groups
 * are added to the bias in order. */
#include "internal.h"

void clb_linear(const clb_op *op, const clb_tile *tile)
{
    const uint32_t inputs = op->dims[0], outputs = op->dims[1];
    for (uint32_t first = 0; first < outputs; first += CLB_LANES) {
        const float *block = tile->w0 + (size_t)first * inputs;
        const uint32_t lanes = clb_min(outputs - first, CLB_LANES);
        for (uint32_t row = 0; row < tile->rows; ++row) {
            const float *x = tile->a[row];
            float total[CLB_LANES] = {0};
            if (tile->w1 != NULL) {
                memcpy(total, tile->w1 + first, lanes * sizeof(float));
            }
            for (uint32_t start = 0; start < inputs; start += CLB_GROUP) {
                const uint32_t end = start + clb_min(inputs - start, CLB_GROUP);
                float chain[CLB_LANES] = {0};
                for (uint32_t k = start; k < end; ++k) {
                    const float *w = block + (size_t)k * CLB_LANES;
                    for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {
                        chain[lane] += w[lane] * x[k];
                    }
                }
                for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {
                    total[lane] += chain[lane];
                }
            }
            memcpy(tile->out[row] + first, total, lanes * sizeof(float));
        }
    }
    if (op->func != CLB_UNARY_IDENTITY) {
        for (uint32_t row = 0; row < tile->rows; ++row) {
            clb_unary(op->func, op->p0, op->p1, tile->out[row], tile->out[row], outputs);
        }
    }
}
