/* Proves that an operation stays inside its memory: the tensors that it names, and the rows of its
 * operands. */
#include "proof.h"

/* A tensor has the bytes that its layout takes. */
static int size_fits(const clb_tensor *t) {
    const uint64_t bytes = t->bytes;
    if (t->layout == CLB_LAYOUT_FLAT) {
        const uint64_t floats = t->cols;
        return t->rows == 1 && bytes == floats * sizeof(float);
    }
    if (t->layout == CLB_LAYOUT_OUTLIERS) { /* its entries are clamped where they are read */
        const uint64_t index = clb_outlier_index(t->rows, t->cols);
        if (bytes < index || bytes % 4 != 0) return 0;
        return (bytes - index) / 4 <= CLB_LIMIT;
    }
    const uint64_t each = clb_block_bytes(t->layout, t->cols);
    const uint32_t blocks = clb_ceil(t->rows, CLB_LANES);
    return each != 0 && bytes == blocks * each;
}

int clb_tensor_fits(const clb_tensor *t, uint64_t first, uint64_t bytes) {
    if (!clb_words_fit(CLB_RANGES_OF_TENSOR, t)) return 0;
    if (t->offset % CLB_ALIGN_MODEL != 0 || !size_fits(t)) return 0;
    return clb_inside(t->offset, t->bytes, first, first + bytes);
}

/* Floats of a row in a caller's array, or of what an expert sees of a token; 0 where an operand may
 * not be there. */
static uint32_t row_floats(const clb_scope *s, const clb_operand *v) {
    const clb_model *m = s->model;
    const clb_layer *layer = s->expert == NULL ? NULL : &m->layers[s->expert->layer];
    uint32_t floats = 0;
    switch (v->space) {
    case CLB_SPACE_INPUT: floats = m->header->input_floats; break;
    case CLB_SPACE_OUTPUT: floats = s->early ? 0 : m->header->output_floats; break;
    default:
        if (layer == NULL || v->sample_stride != 0) return 0;
        if (v->space == CLB_SPACE_TOKEN_IN) return layer->d_in;
        if (v->space == CLB_SPACE_TOKEN_OUT) return layer->d_out;
        return v->space == CLB_SPACE_TOKEN_WEIGHT && layer->apply == CLB_APPLY_INPUT;
    }
    return layer == NULL && v->sample_stride == floats ? floats : 0;
}

/* Bytes of the space that an operand is in; 0 where it may not be there. */
static uint64_t space_of(const clb_scope *s, const clb_operand *v, const clb_tensor *constant) {
    const uint64_t floats = row_floats(s, v);
    if (v->space == CLB_SPACE_ARENA) return v->offset < s->arena ? 0 : s->arena_end;
    if (v->space != CLB_SPACE_CONST) return floats * sizeof(float);
    const int flat = constant != NULL && constant->layout == CLB_LAYOUT_FLAT;
    return flat ? constant->bytes : 0;
}

/* The rows of an operand stay inside its space; where they are `apart`, no two rows share an
 * element, which bounds the work. */
static int operand_fits(const clb_scope *s, const clb_use *u, const clb_tensor *constant,
                        int apart) {
    const clb_operand *v = u->at;
    const uint64_t extent = u->floats;
    if (extent == 0) return v->space == CLB_SPACE_NONE;
    if (!clb_words_fit(CLB_RANGES_OF_OPERAND, v)) return 0;
    const uint64_t most = CLB_LIMIT / s->steps / (s->samples * u->rows);
    if (v->offset % sizeof(float) != 0 || (s->steps > 1 && extent > most)) return 0;
    const uint64_t stepped = (s->steps - 1ull) * v->step_stride;
    const uint64_t rows = stepped + (u->rows - 1ull) * v->row_stride + extent;
    /* A caller's array holds the rows of its own batch only, and so do tokens: each sample stays
     * inside its row. */
    const int own = v->space != CLB_SPACE_ARENA && v->space != CLB_SPACE_CONST;
    const uint64_t others = own ? 0 : (s->samples - 1) * v->sample_stride;
    const uint64_t space = space_of(s, v, constant);
    if (v->offset > space) return 0;
    if (others + rows > (space - v->offset) / sizeof(float)) return 0;
    if (!apart) return 1;
    const int rows_apart = u->rows == 1 || v->row_stride >= extent;
    const int own_apart = own && v->space != CLB_SPACE_TOKEN_WEIGHT;
    const int alone = s->samples == 1 || v->sample_stride >= rows;
    return rows_apart && (alone || own_apart);
}

/* Whether an operation may write there. */
static int is_written(const clb_operand *v) {
    switch (v->space) {
    case CLB_SPACE_NONE:
    case CLB_SPACE_ARENA:
    case CLB_SPACE_OUTPUT:
    case CLB_SPACE_TOKEN_OUT: return 1;
    default: return 0;
    }
}

/* The tensor an operation names, proven to lie inside the scope's weights; NULL where it names
 * none. */
static int tensor_of(const clb_scope *s, uint32_t number, const clb_tensor **tensor) {
    const clb_model *m = s->model;
    *tensor = NULL;
    if (number == CLB_NONE) return 1;
    if (number >= m->header->tensors) return 0;
    const clb_tensor *t = &m->tensors[number];
    const int of_expert = t->scope == CLB_SCOPE_EXPERT;
    *tensor = t;
    if (of_expert != (s->expert != NULL)) return 0;
    return !of_expert || clb_tensor_fits(t, 0, s->expert->bytes);
}

/* All that an operation reads and writes, once its dimensions are known to be in their range; what
 * it has not is none. */
static int operands_fit(const clb_scope *s, const clb_subject *w) {
    const clb_op *op = w->op;
    const int constant = clb_has(op, CLB_HAS_AXES);
    const int once = clb_has(op, CLB_READS_ONCE);
    clb_use uses[CLB_OPERANDS];
    clb_uses(s->model, op, uses);
    if (!operand_fits(s, &uses[CLB_A], constant ? w->w0 : NULL, once)) return 0;
    if (!operand_fits(s, &uses[CLB_B], constant ? w->w1 : NULL, once)) return 0;
    return is_written(&op->out) && operand_fits(s, &uses[CLB_OUT], NULL, 1);
}

int clb_operation_fits(const clb_scope *s, const clb_op *op) {
    clb_subject w = {.model = s->model, .op = op, .samples = s->samples, .scope = s};
    /* What is a layer's number is no tensor's. */
    const uint32_t first = op->code == CLB_OP_MOE ? CLB_NONE : op->w0;
    if (!tensor_of(s, first, &w.w0)) return 0;
    if (!tensor_of(s, op->w1, &w.w1)) return 0;
    if (!tensor_of(s, op->w2, &w.w2)) return 0;
    return clb_op_fits(&w) && operands_fit(s, &w);
}
