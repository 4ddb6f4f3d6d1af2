/* Sums in the one order defined for them: 8 strided partial sums from +0 and a fixed tree, so that
 * every vector width adds in the same order; and the exponentials that softmax and routers sum. */
#include "internal.h"

CLB_INTERNAL float clb_lane_tree(const float p[CLB_LANES]) {
    const float even = (p[0] + p[4]) + (p[2] + p[6]);
    const float odd = (p[1] + p[5]) + (p[3] + p[7]);
    return even + odd;
}

CLB_INTERNAL float clb_lane_sum(const float *x, size_t stride, size_t n) {
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

CLB_WALK void clb_each(uint32_t func, float *x, uint32_t n, const clb_kernels *kernels) {
    enum { FEW = CLB_SCALAR ? 1 : 12 };
    if (kernels != NULL && n >= FEW) {
        kernels->unary(func, 0.0f, 0.0f, x, x, n);
        return;
    }
    for (uint32_t i = 0; i < n; ++i) {
        x[i] = func == CLB_UNARY_EXP ? clb_exp(x[i]) : clb_sigmoid(x[i]);
    }
}

CLB_WALK float clb_exp_sum(float *x, uint32_t n, const clb_kernels *kernels) {
    float best = -clb_inf();
    for (uint32_t i = 0; i < n; ++i) {
        best = x[i] > best ? x[i] : best;
    }
    for (uint32_t i = 0; i < n; ++i) {
        x[i] -= best;
    }
    clb_each(CLB_UNARY_EXP, x, n, kernels);
    return clb_lane_sum(x, 1, n);
}
