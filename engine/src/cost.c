/* What a program costs at most, so that a model can say so and be held to it. Sums and products stop at UINT64_MAX, which no
 * sound model reaches. */
#include "internal.h"

uint64_t clb_plus(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

/* By halves: compilers make a product of 128 bits of the usual check, for which small targets call a library. */
uint64_t clb_times(uint64_t a, uint64_t b)
{
    const uint64_t a_low = a & UINT32_MAX;
    const uint64_t b_low = b & UINT32_MAX;
    const uint64_t middle = (a >> 32) * b_low + (b >> 32) * a_low; /* one of them is 0, or there is an overflow */
    const int large = (a >> 32) != 0 && (b >> 32) != 0;
    return large || middle > UINT32_MAX ? UINT64_MAX : clb_plus(middle << 32, a_low * b_low);
}

/* Key and value elements that attention's last token of a text that fills the context looks at, for all heads. */
static uint64_t looked_at(const clb_op *op, uint32_t tokens)
{
    const uint64_t seen = tokens - clb_first_seen(op, tokens - 1);
    return clb_times(clb_times(op->rows, (uint64_t)op->dims[0] + op->dims[1]), seen);
}

uint64_t clb_macs_of(const clb_op *op, uint32_t tokens)
{
    RETURN_IF(op->code == CLB_OP_ATTENTION, looked_at(op, tokens));
    RETURN_IF(op->code != CLB_OP_LINEAR && op->code != CLB_OP_LINEAR_Q, 0);
    return clb_times(clb_times(op->rows, op->dims[0]), op->dims[1]);
}

/* Most entries of a residual that a row meets: no cell has more than there are, or than weights. */
static uint64_t residual_work(const clb_tensor *t)
{
    const uint64_t cells = clb_residual_cells(t->rows, t->cols), entries = (t->bytes - 4 * (cells + 1)) / 4;
    const uint64_t most = CLB_CELL_ROWS * CLB_CELL_COLS;
    return clb_times(cells, entries < most ? entries : most);
}

uint64_t clb_work_of(const clb_op *op, const clb_tensor *tensors, uint32_t tokens)
{
    const uint64_t rows = op->rows;
    const uint32_t *d = op->dims;
    switch (op->code) {
    case CLB_OP_LINEAR:
    case CLB_OP_LINEAR_Q: {
        const uint64_t entries = op->w2 == CLB_NONE ? 0 : residual_work(&tensors[op->w2]);
        return clb_times(rows, clb_plus(((uint64_t)d[0] + 1) * d[1], entries));
    }
    case CLB_OP_MAP1:
    case CLB_OP_MAP2: return clb_times(clb_times(rows, (uint64_t)d[0] * d[1]), (uint64_t)d[2] * d[3]);
    case CLB_OP_REDUCE: return clb_times(clb_times(rows, (uint64_t)d[0] * d[1]), d[2]);
    case CLB_OP_CACHE: return rows * ((uint64_t)d[0] + d[1]);
    case CLB_OP_ATTENTION: return clb_plus(rows * ((uint64_t)d[0] + d[1]), looked_at(op, tokens));
    case CLB_OP_DELAY: return (rows + 1) * d[0];
    default: return rows * d[0]; /* softmax, norms, quantize, embed, rope */
    }
}

static uint64_t cost_of(const clb_expert *e, enum clb_cost what) { return what == CLB_MACS ? e->macs : e->bytes; }

/* The k-th costliest is found by halving, for there is no memory to sort them in. */
uint64_t clb_costliest(const clb_expert *experts, uint32_t count, uint32_t k, enum clb_cost what)
{
    uint64_t kth = 0, most = UINT64_MAX;
    while (kth < most) {
        const uint64_t middle = kth + (most - kth) / 2 + 1;
        uint32_t reach = 0;
        for (uint32_t n = 0; n < count; ++n) {
            reach += cost_of(&experts[n], what) >= middle;
        }
        if (reach >= k) {
            kth = middle;
        } else {
            most = middle - 1;
        }
    }
    uint64_t total = clb_times(k, kth);
    for (uint32_t n = 0; n < count; ++n) {
        const uint64_t own = cost_of(&experts[n], what);
        total = clb_plus(total, own > kth ? own - kth : 0);
    }
    return total;
}
