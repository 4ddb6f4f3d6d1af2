/* Softmax and norms: what divides a row by a sum over it. */
#include "../core/internal.h"

#include <math.h> /* sqrtf only */

CLB_WALK void clb_softmax(const clb_op *op, const clb_tile *tile) {
    const uint32_t n = op->norm.size;
    for (uint32_t row = 0; row < tile->rows; ++row) {
        const float *x = tile->a[row];
        float *y = tile->out[row];
        for (uint32_t i = 0; i < n; ++i) {
            y[i] = x[i];
        }
        const float sum = clb_exp_sum(y, n, CLB_SCALAR ? NULL : tile->kernels);
        for (uint32_t i = 0; i < n; ++i) {
            y[i] /= sum;
        }
    }
}

/* y = ((x - mean) · inverse) · gamma + beta, where inverse = 1 / sqrt(mean of squares + eps). */
CLB_WALK void clb_norm(const clb_op *op, const clb_tile *tile) {
    const uint32_t n = op->norm.size;
    const int centre = op->code == CLB_OP_LAYERNORM;
    for (uint32_t row = 0; row < tile->rows; ++row) {
        const float *x = tile->a[row];
        float *y = tile->out[row];
        float mean = 0.0f; /* x - 0 is x, bit for bit */
        if (centre) {
            mean = clb_lane_sum(x, 1, n) / (float)n;
        }
        float lanes[CLB_LANES] = {0};
        for (uint32_t i = 0; i < n; ++i) {
            const float centred = x[i] - mean;
            lanes[i % CLB_LANES] += centred * centred;
        }
        const float inverse = 1.0f / sqrtf(clb_lane_tree(lanes) / (float)n + op->norm.epsilon);
        for (uint32_t i = 0; i < n; ++i) {
            float scaled = (x[i] - mean) * inverse;
            scaled = tile->w0 == NULL ? scaled : scaled * tile->w0[i];
            y[i] = tile->w1 == NULL ? scaled : scaled + tile->w1[i];
        }
    }
}

#ifndef COLIBRI_GENERATED
#include "../check/proof.h"

static int norm_fits(const clb_subject *s) {
    const uint32_t n = s->op->norm.size;
    return clb_is_vector(s->w0, n) && clb_is_vector(s->w1, n);
}

const clb_proof clb_norm_proof = {.fits = norm_fits};

#endif
