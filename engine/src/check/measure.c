/* What proofs of operations measure with: sums that cannot wrap, axes, and the shapes that many
 * operations share. */
#include "proof.h"

uint64_t clb_plus(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

/* By halves: compilers make a product of 128 bits of the usual check, for which small targets call
 * a library. */
uint64_t clb_times(uint64_t a, uint64_t b) {
    const uint64_t a_low = a & UINT32_MAX;
    const uint64_t b_low = b & UINT32_MAX;
    const uint64_t middle =
        (a >> 32) * b_low + (b >> 32) * a_low; /* one of them is 0, or there is an overflow */
    const int large = (a >> 32) != 0 && (b >> 32) != 0;
    return large || middle > UINT32_MAX ? UINT64_MAX : clb_plus(middle << 32, a_low * b_low);
}

#define RANGE(code, first, count, least, most) {code, first, count, least, most},
static const clb_range ranges[] = {CLB_RANGES(RANGE)};

int clb_words_fit(uint32_t code, const void *record) {
    const uint32_t *words = record;
    for (size_t n = 0; n < sizeof ranges / sizeof ranges[0]; ++n) {
        const clb_range *r = &ranges[n];
        for (uint32_t i = r->first; r->code == code && i < r->first + r->count; ++i) {
            if (words[i] < r->least || words[i] > r->most) return 0;
        }
    }
    return 1;
}

int clb_inside(uint64_t at, uint64_t size, uint64_t begin, uint64_t end) {
    return at >= begin && at <= end && size <= end - at;
}

int clb_is_vector(const clb_tensor *t, uint32_t n) {
    return !t || (t->layout == CLB_LAYOUT_FLAT && t->cols == n);
}

int clb_apart(const uint32_t *dims, const uint32_t *strides) {
    uint64_t below = 1;
    for (int axis = CLB_AXES - 1; axis >= 0; --axis) {
        if (dims[axis] > 1 && strides[axis] < below) return 0;
        below += (uint64_t)(dims[axis] - 1) * strides[axis];
    }
    return 1;
}

void clb_plain(clb_use uses[CLB_OPERANDS], uint64_t a, uint64_t b, uint64_t out) {
    uses[CLB_A].floats = a;
    uses[CLB_B].floats = b;
    uses[CLB_OUT].floats = out;
}

void clb_strided(clb_use *u, const clb_op *op, const uint32_t *strides, uint32_t axes) {
    uint64_t last = 0;
    for (uint32_t axis = 0; axis < CLB_AXES; ++axis) {
        last += axes >> axis & 1u ? (uint64_t)(op->dims[axis] - 1) * strides[axis] : 0;
    }
    u->dims = op->dims;
    u->strides = strides;
    u->axes = axes;
    u->floats = last + 1;
}
