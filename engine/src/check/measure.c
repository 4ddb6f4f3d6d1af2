/* What proofs of operations measure with: sums that cannot wrap, axes, and the shapes that many
 * operations share. */
#include "proof.h"

uint64_t clb_plus(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

/* By halves: compilers make a product of 128 bits of the usual check, for which small targets call
 * a library. */
uint64_t clb_times(uint64_t a, uint64_t b) {
    const uint64_t a_low = a & UINT32_MAX;
    const uint64_t b_low = b & UINT32_MAX;
    const uint64_t a_high = a >> 32;
    const uint64_t b_high = b >> 32;
    if (a_high != 0 && b_high != 0) return UINT64_MAX;
    const uint64_t middle = a_high * b_low + b_high * a_low; /* one of them is 0 */
    if (middle > UINT32_MAX) return UINT64_MAX;
    return clb_plus(middle << 32, a_low * b_low);
}

#define RANGE(code, first, count, least, most) {code, first, count, least, most},
static const clb_range ranges[] = {CLB_RANGES(RANGE)};

int clb_words_fit(uint32_t code, const void *record) {
    const uint32_t *words = record;
    for (size_t n = 0; n < CLB_COUNT(ranges); ++n) {
        const clb_range *r = &ranges[n];
        if (r->code != code) continue;
        for (uint32_t i = 0; i < r->count; ++i) {
            const uint32_t word = words[r->first + i];
            if (word < r->least || word > r->most) return 0;
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
        below += (dims[axis] - 1ull) * strides[axis];
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
        const uint64_t steps = op->dims[axis] - 1;
        last += axes >> axis & 1u ? steps * strides[axis] : 0;
    }
    u->dims = op->dims;
    u->strides = strides;
    u->axes = axes;
    u->floats = last + 1;
}
