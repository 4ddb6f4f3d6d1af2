/* Proves that an operation stays inside its memory: the tensors that it names, and the rows of its
 * operands. */
#include "proof.h"

/* A tensor's own consistency, and its place inside `bytes` bytes from `first`. */
int clb_tensor_fits(const clb_tensor *t, uint64_t first, uint64_t bytes) {
    if (t->rows < 1 || t->rows > CLB_LIMIT || t->cols < 1 || t->cols > CLB_LIMIT) return 0;
    const uint64_t blocks = (t->rows + CLB_LANES - 1) / CLB_LANES;
    int sized;
    if (t->layout == CLB_LAYOUT_FLAT) {
        sized = t->rows == 1 && t->bytes == (uint64_t)t->cols * sizeof(float);
    } else if (t->layout == CLB_LAYOUT_RESIDUAL) { /* its entries are clamped where they are read */
        const uint64_t index = 4 * (clb_residual_cells(t->rows, t->cols) + 1);
        sized = t->bytes >= index && t->bytes % 4 == 0 && (t->bytes - index) / 4 <= CLB_LIMIT;
    } else {
        const uint64_t each = clb_block_bytes(t->layout, t->cols);
        sized = each != 0 && t->bytes == blocks * each;
    }
    return sized && t->offset % CLB_ALIGN_MODEL == 0 && t->offset >= first &&
           t->offset - first <= bytes && t->bytes <= bytes - (t->offset - first);
}

/* The rows of an operand stay inside its space; where they are `apart`, no two rows share an
 * element, which bounds the work. */
static int operand_fits(const clb_scope *s, const clb_use *u, const clb_tensor *constant,
                        int written, int apart) {
    const clb_operand *v = u->at;
    const uint64_t extent = u->floats;
    if (extent == 0) return v->space == CLB_SPACE_NONE;
    const clb_layer *layer = s->expert == NULL ? NULL : &s->model->layers[s->expert->layer];
    const clb_header *h = s->model->header;
    const uint64_t rows = (uint64_t)(s->steps - 1) * v->step_stride +
                          (uint64_t)(u->rows - 1) * v->row_stride + extent;
    uint64_t span = (s->samples - 1) * v->sample_stride + rows;
    uint64_t space;
    int separate = s->samples == 1 || v->sample_stride >= rows;
    if (v->offset % sizeof(float) != 0 || v->sample_stride > CLB_LIMIT ||
        v->row_stride > CLB_LIMIT || v->step_stride > CLB_LIMIT ||
        (s->steps > 1 && extent > CLB_LIMIT / s->steps / (s->samples * u->rows))) {
        return 0;
    }
    switch (v->space) {
    case CLB_SPACE_ARENA:
        if (v->offset < s->arena) return 0;
        space = s->arena_end;
        break;
    case CLB_SPACE_INPUT:
    case CLB_SPACE_OUTPUT:
        /* A caller's array holds the rows of its own batch only: each sample stays inside its
         * row. */
        space = v->space == CLB_SPACE_INPUT ? h->input_floats : s->early ? 0 : h->output_floats;
        if (s->expert || v->sample_stride != space || (written && v->space == CLB_SPACE_INPUT)) {
            return 0;
        }
        space *= sizeof(float);
        span = rows;
        separate = 1;
        break;
    case CLB_SPACE_CONST:
        space = constant && constant->layout == CLB_LAYOUT_FLAT && !written ? constant->bytes : 0;
        break;
    case CLB_SPACE_TOKEN_WEIGHT:
    case CLB_SPACE_TOKEN_IN:
    case CLB_SPACE_TOKEN_OUT:
        if (layer == NULL || v->sample_stride != 0 ||
            (written && v->space != CLB_SPACE_TOKEN_OUT) ||
            (v->space == CLB_SPACE_TOKEN_WEIGHT && layer->apply != CLB_APPLY_INPUT)) {
            return 0;
        }
        space = sizeof(float) * (v->space == CLB_SPACE_TOKEN_WEIGHT ? 1
                                 : v->space == CLB_SPACE_TOKEN_IN   ? layer->d_in
                                                                    : layer->d_out);
        span = rows;
        separate |= v->space != CLB_SPACE_TOKEN_WEIGHT;
        break;
    default: return 0;
    }
    if (v->offset > space || span > (space - v->offset) / sizeof(float)) return 0;
    return !apart || (separate && (u->rows == 1 || v->row_stride >= extent));
}

/* The tensor an operation names, proven to lie inside the scope's weights; NULL where it names
 * none. */
static int tensor_of(const clb_scope *s, uint32_t number, const clb_tensor **tensor) {
    const clb_model *m = s->model;
    *tensor = NULL;
    if (number == CLB_NONE) return 1;
    if (number >= m->header->tensors ||
        (m->tensors[number].scope == CLB_SCOPE_EXPERT) != (s->expert != NULL)) {
        return 0;
    }
    *tensor = &m->tensors[number];
    return s->expert == NULL || clb_tensor_fits(*tensor, 0, s->expert->bytes);
}

/* All that an operation reads and writes, once its dimensions are known to be in their range; what
 * it has not is none. */
static int operands_fit(const clb_scope *s, const clb_op *op, const clb_subject *w) {
    const uint32_t traits = clb_traits(op);
    const int constant = (traits & CLB_HAS_AXES) != 0;
    const int once = (traits & CLB_READS_ONCE) != 0;
    clb_use uses[CLB_OPERANDS];
    clb_uses(s->model, op, uses);
    return operand_fits(s, &uses[CLB_A], constant ? w->w0 : NULL, 0, once) &&
           operand_fits(s, &uses[CLB_B], constant ? w->w1 : NULL, 0, once) &&
           operand_fits(s, &uses[CLB_OUT], NULL, 1, 1);
}

int clb_operation_fits(const clb_scope *s, const clb_op *op) {
    clb_subject w = {.model = s->model, .op = op, .samples = s->samples, .scope = s};
    const uint32_t first =
        op->code == CLB_OP_MOE ? CLB_NONE : op->w0; /* which says what layer it is */
    if (!tensor_of(s, first, &w.w0) || !tensor_of(s, op->w1, &w.w1) ||
        !tensor_of(s, op->w2, &w.w2)) {
        return 0;
    }
    return clb_op_fits(&w) && operands_fit(s, op, &w);
}
