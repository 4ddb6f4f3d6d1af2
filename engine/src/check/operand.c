/* Proves that an operation stays inside its memory: the tensors that it names, and the rows of its
 * operands. */
#include "proof.h"

/* A tensor has the bytes that its layout takes. */
static int size_fits(const clb_tensor *t) {
    if (t->layout == CLB_LAYOUT_FLAT) {
        return t->rows == 1 && t->bytes == (uint64_t)t->cols * sizeof(float);
    }
    if (t->layout == CLB_LAYOUT_OUTLIERS) { /* its entries are clamped where they are read */
        const uint64_t index = clb_outlier_index(t->rows, t->cols);
        return t->bytes >= index && t->bytes % 4 == 0 && (t->bytes - index) / 4 <= CLB_LIMIT;
    }
    const uint64_t each = clb_block_bytes(t->layout, t->cols);
    return each != 0 && t->bytes == clb_ceil(t->rows, CLB_LANES) * each;
}

int clb_tensor_fits(const clb_tensor *t, uint64_t first, uint64_t bytes) {
    if (!clb_words_fit(CLB_RANGES_OF_TENSOR, t) || t->offset % CLB_ALIGN_MODEL != 0) return 0;
    return size_fits(t) && clb_inside(t->offset, t->bytes, first, first + bytes);
}

int clb_is_written(const clb_operand *v) {
    const uint32_t space = v->space;
    if (space == CLB_SPACE_ARENA) return 1;
    return space == CLB_SPACE_OUTPUT || space == CLB_SPACE_TOKEN_OUT;
}

/* Bytes of the space that an operand is in; 0 where it may not be there. */
static uint64_t space_of(const clb_scope *s, const clb_operand *v, const clb_tensor *constant,
                         int written) {
    const clb_model *m = s->model;
    const clb_header *h = m->header;
    const clb_layer *layer = s->expert == NULL ? NULL : &m->layers[s->expert->layer];
    const int token = layer != NULL && v->sample_stride == 0;
    const uint64_t floats = v->space == CLB_SPACE_INPUT ? h->input_floats : h->output_floats;
    const int caller = layer == NULL && v->sample_stride == floats;
    if (written && !clb_is_written(v)) return 0;
    switch (v->space) {
    case CLB_SPACE_ARENA: return v->offset < s->arena ? 0 : s->arena_end;
    case CLB_SPACE_INPUT: return caller ? floats * sizeof(float) : 0;
    case CLB_SPACE_OUTPUT: return caller && !s->early ? floats * sizeof(float) : 0;
    case CLB_SPACE_CONST:
        if (constant == NULL || constant->layout != CLB_LAYOUT_FLAT) return 0;
        return constant->bytes;
    case CLB_SPACE_TOKEN_WEIGHT:
        return token && layer->apply == CLB_APPLY_INPUT ? sizeof(float) : 0;
    case CLB_SPACE_TOKEN_IN: return token ? layer->d_in * sizeof(float) : 0;
    case CLB_SPACE_TOKEN_OUT: return token ? layer->d_out * sizeof(float) : 0;
    default: return 0;
    }
}

/* The rows of an operand stay inside its space; where they are `apart`, no two rows share an
 * element, which bounds the work. */
static int operand_fits(const clb_scope *s, const clb_use *u, const clb_tensor *constant,
                        int written, int apart) {
    const clb_operand *v = u->at;
    const uint64_t extent = u->floats;
    if (extent == 0) return v->space == CLB_SPACE_NONE;
    if (!clb_words_fit(CLB_RANGES_OF_OPERAND, v) || v->offset % sizeof(float) != 0) return 0;
    if (s->steps > 1 && extent > CLB_LIMIT / s->steps / (s->samples * u->rows)) return 0;
    const uint64_t stepped = (s->steps - 1ull) * v->step_stride;
    const uint64_t rows = stepped + (u->rows - 1ull) * v->row_stride + extent;
    /* A caller's array holds the rows of its own batch only, and so do tokens: each sample stays
     * inside its row. */
    const int own = v->space != CLB_SPACE_ARENA && v->space != CLB_SPACE_CONST;
    const uint64_t span = own ? rows : (s->samples - 1) * v->sample_stride + rows;
    const uint64_t space = space_of(s, v, constant, written);
    if (v->offset > space || span > (space - v->offset) / sizeof(float)) return 0;
    if (!apart) return 1;
    const int alone = s->samples == 1 || v->sample_stride >= rows;
    const int samples_apart = alone || (own && v->space != CLB_SPACE_TOKEN_WEIGHT);
    return samples_apart && (u->rows == 1 || v->row_stride >= extent);
}

/* The tensor an operation names, proven to lie inside the scope's weights; NULL where it names
 * none. */
static int tensor_of(const clb_scope *s, uint32_t number, const clb_tensor **tensor) {
    const clb_model *m = s->model;
    *tensor = NULL;
    if (number == CLB_NONE) return 1;
    if (number >= m->header->tensors) return 0;
    const clb_tensor *t = &m->tensors[number];
    const int shared = t->scope != CLB_SCOPE_EXPERT;
    *tensor = t;
    if (shared != (s->expert == NULL)) return 0;
    return shared || clb_tensor_fits(t, 0, s->expert->bytes);
}

/* All that an operation reads and writes, once its dimensions are known to be in their range; what
 * it has not is none. */
static int operands_fit(const clb_scope *s, const clb_op *op, const clb_subject *w) {
    const int constant = clb_has(op, CLB_HAS_AXES);
    const int once = clb_has(op, CLB_READS_ONCE);
    clb_use uses[CLB_OPERANDS];
    clb_uses(s->model, op, uses);
    return operand_fits(s, &uses[CLB_A], constant ? w->w0 : NULL, 0, once) &&
           operand_fits(s, &uses[CLB_B], constant ? w->w1 : NULL, 0, once) &&
           operand_fits(s, &uses[CLB_OUT], NULL, 1, 1);
}

int clb_operation_fits(const clb_scope *s, const clb_op *op) {
    clb_subject w = {.model = s->model, .op = op, .samples = s->samples, .scope = s};
    /* What is a layer's number is no tensor's. */
    const uint32_t first = op->code == CLB_OP_MOE ? CLB_NONE : op->w0;
    if (!tensor_of(s, first, &w.w0)) return 0;
    if (!tensor_of(s, op->w1, &w.w1) || !tensor_of(s, op->w2, &w.w2)) return 0;
    return clb_op_fits(&w) && operands_fit(s, op, &w);
}
