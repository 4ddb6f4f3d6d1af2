/* What each operation reads, writes and keeps: stated here once, for the proof that it stays inside its memory and for the
 * proof of the order. A new operation states its operands here. */
#include "internal.h"

static uint64_t reach(const clb_use *u)
{
    uint64_t last = 0;
    for (uint32_t axis = 0; axis < CLB_AXES; ++axis) {
        last += u->axes >> axis & 1u ? (uint64_t)(u->dims[axis] - 1) * u->strides[axis] : 0;
    }
    return last + 1;
}

static void strided(clb_use *u, const clb_op *op, const uint32_t *strides, uint32_t axes)
{
    u->dims = op->dims;
    u->strides = strides;
    u->axes = axes;
    u->floats = reach(u);
}

static void plain(clb_use uses[CLB_OPERANDS], uint64_t a, uint64_t b, uint64_t out)
{
    uses[CLB_A].floats = a;
    uses[CLB_B].floats = b;
    uses[CLB_OUT].floats = out;
}

void clb_uses(const clb_model *m, const clb_op *op, clb_use uses[CLB_OPERANDS])
{
    enum { ALL = 0xF, READ = 0x7, LEFT = 0x5 }; /* axes: of a map, of a reduction, of what it leaves */
    const uint32_t *d = op->dims;
    const uint64_t blocks = clb_ceil(d[1], CLB_LANES);
    uses[CLB_A] = (clb_use){.at = &op->a, .rows = op->rows};
    uses[CLB_B] = (clb_use){.at = &op->b, .rows = op->rows};
    uses[CLB_OUT] = (clb_use){.at = &op->out, .rows = op->rows};
    switch (op->code) {
    case CLB_OP_LINEAR_Q:
        plain(uses, clb_record_floats(d[0]), 0, d[1]);
        uses[CLB_A].cols = d[0];
        break;
    case CLB_OP_LINEAR:
        plain(uses, d[0], 0, d[1]);
        if (op->w0 == CLB_NONE) { /* a matrix in whole blocks */
            uses[CLB_B].floats = blocks * d[0] * CLB_LANES;
            uses[CLB_B].spare = blocks * CLB_LANES - d[1];
        }
        break;
    case CLB_OP_QUANTIZE:
        plain(uses, d[0], 0, clb_record_floats(d[0]));
        uses[CLB_OUT].cols = d[0];
        break;
    case CLB_OP_MAP1:
    case CLB_OP_MAP2:
        strided(&uses[CLB_A], op, op->sa, ALL);
        strided(&uses[CLB_OUT], op, op->so, ALL);
        if (op->code == CLB_OP_MAP2) {
            strided(&uses[CLB_B], op, op->sb, ALL);
        }
        break;
    case CLB_OP_REDUCE:
        strided(&uses[CLB_A], op, op->sa, READ);
        strided(&uses[CLB_OUT], op, op->so, LEFT);
        break;
    case CLB_OP_LOOP: break;
    case CLB_OP_MOE: {
        const clb_layer *layer = &m->layers[op->w0];
        plain(uses, layer->d_in, layer->experts, layer->d_out);
        uses[CLB_A].cols = layer->quantized;
        break;
    }
    case CLB_OP_EMBED: plain(uses, 1, 0, d[0]); break;
    case CLB_OP_CACHE: plain(uses, d[0], d[1], 0); break;
    case CLB_OP_ATTENTION: plain(uses, d[0], 0, d[1]); break;
    case CLB_OP_DELAY: /* stores one row, if it has one, and recalls all that look back from there, if anybody wants them */
        plain(uses, op->a.space == CLB_SPACE_NONE ? 0 : d[0], 0, op->out.space == CLB_SPACE_NONE ? 0 : d[0]);
        uses[CLB_A].rows = 1;
        break;
    default: plain(uses, d[0], 0, d[0]); break; /* softmax, norms, rope */
    }
}

uint64_t clb_workspace_floats(const clb_op *op, const clb_layer *layer, uint64_t samples)
{
    enum { ALIGNED = CLB_ALIGN_BUFFER / sizeof(float) };
    const uint64_t choices = samples * op->rows * layer->k;
    const uint64_t slots = layer->k > 1 ? choices * layer->d_out : 0;
    const uint64_t words = slots + 3 * choices + layer->experts + 1 + clb_key_words(layer, op->w1 != CLB_NONE);
    return (words + ALIGNED - 1) / ALIGNED * ALIGNED;
}

uint64_t clb_work_floats(const clb_model *m, const clb_op *op, uint64_t samples)
{
    switch (op->code) {
    case CLB_OP_MOE: return clb_workspace_floats(op, &m->layers[op->w0], samples) + op->dims[2];
    case CLB_OP_CACHE:
    case CLB_OP_ATTENTION: return clb_cache_floats(op);
    case CLB_OP_DELAY: return (uint64_t)op->dims[2] * op->dims[0];
    default: return 0;
    }
}
