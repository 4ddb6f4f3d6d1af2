/* Sums, means and largest elements along an axis. */
#include "../core/internal.h"

static float largest(const float *x, size_t stride, size_t n) {
    float best = x[0];
    for (size_t i = 1; i < n; ++i) {
        const float y = x[i * stride];
        best = y > best || y != y ? y : best;
    }
    return best;
}

enum { SIDE = CLB_SCALAR ? 1 : 16 }; /* sums taken together where they lie side by side */

/* SIDE sums of n rows `stride` apart, each as clb_lane_sum has it, at the beginning of `lanes`. */
static void side_sums(const float *x, size_t stride, size_t n, float lanes[CLB_LANES * SIDE]) {
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

CLB_WALK void clb_reduce(const clb_op *op, const clb_tile *tile) {
    const size_t n = op->reduce.size;
    const size_t stride = op->reduce.from_next;
    const size_t inner = op->reduce.inner;
    const int sums = op->func != CLB_REDUCE_MAX;
    const int wide = SIDE > 1 && sums && op->reduce.from_inner == 1;
    float lanes[CLB_LANES * SIDE];
    const size_t results = op->reduce.outer * inner;
    for (uint32_t row = 0; row < tile->rows; ++row) {
        for (size_t k = 0; k < results; ++k) {
            const size_t i = k / inner;
            const size_t j = k % inner;
            const size_t from = i * op->reduce.from_outer + j * op->reduce.from_inner;
            const size_t to = i * op->reduce.to_outer + j * op->reduce.to_inner;
            const float *x = tile->a[row] + from;
            float *y = tile->out[row] + to;
            const int together = wide && j / SIDE < inner / SIDE;
            if (together && j % SIDE == 0) {
                side_sums(x, stride, n, lanes);
            }
            if (together) {
                *y = lanes[j % SIDE];
            } else {
                *y = sums ? clb_lane_sum(x, stride, n) : largest(x, stride, n);
            }
            if (op->func == CLB_REDUCE_MEAN) {
                *y /= (float)n;
            }
        }
    }
}

#ifndef COLIBRI_GENERATED
#include "../check/proof.h"

enum { READ = 0x7, LEFT = 0x5 }; /* axes: outer, reduced, inner; and without the reduced one */

static void reduce_uses(const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    const clb_op *op = s->op;
    clb_strided(&uses[CLB_A], op, op->strides_a, READ);
    clb_strided(&uses[CLB_OUT], op, op->strides_out, LEFT);
}

static uint64_t elements(const clb_op *op) {
    const uint64_t outer = op->reduce.outer;
    return clb_times(outer * op->reduce.size, op->reduce.inner);
}

/* The elements read are no more than the memory they come from. */
static int reduce_fits(const clb_subject *s) {
    const clb_op *op = s->op;
    const uint32_t left[CLB_AXES] = {op->reduce.outer, 1, op->reduce.inner, 1};
    clb_use from;
    clb_strided(&from, op, op->strides_a, READ);
    return elements(op) <= from.floats && clb_apart(left, op->strides_out);
}

static uint64_t reduce_work(const clb_subject *s) {
    return clb_times(s->op->rows, elements(s->op));
}

const clb_proof clb_reduce_proof = {.fits = reduce_fits, .uses = reduce_uses, .work = reduce_work};

#endif
