/* Sums and what is made of them: reductions, softmax, norms. A sum is 8 strided partial sums from +0 and a fixed tree,
 * so that every vector width adds in the same order. */
#include "internal.h"

#include <math.h> /* sqrtf only */

CLB_INTERNAL float clb_lane_tree(const float p[CLB_LANES])
{
    return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
}

CLB_INTERNAL float clb_lane_sum(const float *x, size_t stride, size_t n)
{
    float lanes[CLB_LANES] = {0};
    size_t i = 0;
    for (; stride == 1 && i + CLB_LANES <= n; i += CLB_LANES) { /* as one vector */
        for (size_t lane = 0; lane < CLB_LANES; ++lane) {
            lanes[lane] += x[i + lane];
        }
    }
    for (; i < n; ++i) {
        lanes[i % CLB_LANES] += x[i * stride];
    }
    return clb_lane_tree(lanes);
}

static float largest(const float *x, size_t stride, size_t n)
{
    float best = x[0];
    for (size_t i = 1; i < n; ++i) {
        const float y = x[i * stride];
        best = y > best || y != y ? y : best;
    }
    return best;
}

enum { SIDE = CLB_SCALAR ? 1 : 16 }; /* sums taken together where they lie side by side */

/* SIDE sums of n rows `stride` apart, each as clb_lane_sum has it, at the beginning of `lanes`. */
static void side_sums(const float *x, size_t stride, size_t n, float lanes[CLB_LANES * SIDE])
{
    memset(lanes, 0, CLB_LANES * SIDE * sizeof *lanes);
    for (size_t i = 0; i < n; ++i) {
        for (size_t j = 0; j < SIDE; ++j) {
            lanes[i % CLB_LANES * SIDE + j] += x[i * stride + j];
        }
    }
    for (size_t half = CLB_LANES * SIDE / 2; half >= SIDE; half /= 2) {
        for (size_t j = 0; j < half; ++j) {
            lanes[j] += lanes[half + j];
        }
    }
}

CLB_WALK void clb_reduce(const clb_op *op, const clb_tile *tile)
{
    const size_t n = op->dims[1], stride = op->sa[1], inner = op->dims[2];
    const int sums = op->func != CLB_REDUCE_MAX, wide = SIDE > 1 && sums && op->sa[2] == 1;
    float lanes[CLB_LANES * SIDE];
    for (uint32_t row = 0; row < tile->rows; ++row) {
        for (size_t k = 0; k < op->dims[0] * inner; ++k) {
            const size_t i = k / inner, j = k % inner;
            const float *x = tile->a[row] + i * op->sa[0] + j * op->sa[2];
            float *y = tile->out[row] + i * op->so[0] + j * op->so[2];
            const int together = wide && j / SIDE < inner / SIDE;
            if (together && j % SIDE == 0) {
                side_sums(x, stride, n, lanes);
            }
            const float sum = together ? lanes[j % SIDE] : sums ? clb_lane_sum(x, stride, n) : largest(x, stride, n);
            *y = op->func == CLB_REDUCE_MEAN ? sum / (float)n : sum;
        }
    }
}

CLB_WALK void clb_softmax(const clb_op *op, const clb_tile *tile)
{
    const uint32_t n = op->dims[0];
    for (uint32_t row = 0; row < tile->rows; ++row) {
        float *y = tile->out[row];
        for (uint32_t i = 0; i < n; ++i) {
            y[i] = tile->a[row][i];
        }
        const float sum = clb_exp_sum(y, n, CLB_SCALAR ? NULL : tile->kernels);
        for (uint32_t i = 0; i < n; ++i) {
            y[i] /= sum;
        }
    }
}

/* y = ((x - mean) · inverse) · gamma + beta, where inverse = 1 / sqrt(mean of squares + eps). */
CLB_WALK void clb_norm(const clb_op *op, const clb_tile *tile)
{
    const uint32_t n = op->dims[0];
    const int centre = op->code == CLB_OP_LAYERNORM;
    for (uint32_t row = 0; row < tile->rows; ++row) {
        const float *x = tile->a[row];
        const float mean = centre ? clb_lane_sum(x, 1, n) / (float)n : 0.0f; /* x - 0 is x, bit for bit */
        float lanes[CLB_LANES] = {0};
        for (uint32_t i = 0; i < n; ++i) {
            const float centred = x[i] - mean;
            lanes[i % CLB_LANES] += centred * centred;
        }
        const float inverse = 1.0f / sqrtf(clb_lane_tree(lanes) / (float)n + op->p0);
        for (uint32_t i = 0; i < n; ++i) {
            float scaled = (x[i] - mean) * inverse;
            scaled = tile->w0 == NULL ? scaled : scaled * tile->w0[i];
            tile->out[row][i] = tile->w1 == NULL ? scaled : scaled + tile->w1[i];
        }
    }
}
