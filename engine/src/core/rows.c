/* Rows of operands: where they are, in tiles for the kernels, and an operation that computes each
 * by itself. */
#include "internal.h"

CLB_WALK float *clb_row_of(const clb_operand *v, const float *base, uint32_t rows, size_t token) {
    /* Only what the validator has found to be written is written through this. */
    return (float *)(uintptr_t)base + v->offset / sizeof(float) + token / rows * v->sample_stride +
           token % rows * v->row_stride;
}

CLB_STATIC_WALK float *token_at(const clb_routed *r, int out, size_t position) {
    const clb_op *op = r->op;
    const uint32_t choice = r->order[position];
    if (!out) return clb_row_of(&op->a, r->x, op->rows, choice / r->k);
    if (r->k == 1) return clb_row_of(&op->out, r->y, op->rows, choice);
    return r->y + (size_t)choice * r->d_out;
}

CLB_WALK const float *clb_locate(const clb_operand *v, const clb_frame *f, const float *constant,
                                 size_t sample, size_t row) {
    const clb_routed *routed = f->routed;
    const float *base;
    switch (v->space) {
    case CLB_SPACE_ARENA: base = clb_at(f->arena, 0); break;
    case CLB_SPACE_INPUT: base = f->input; break;
    case CLB_SPACE_OUTPUT: base = f->output; break;
    case CLB_SPACE_CONST: base = constant; break;
    case CLB_SPACE_TOKEN_WEIGHT: return routed->weights + routed->order[sample];
    case CLB_SPACE_TOKEN_IN: base = token_at(routed, 0, sample); break;
    case CLB_SPACE_TOKEN_OUT: base = token_at(routed, 1, sample); break;
    default: return NULL;
    }
    return base + v->offset / sizeof(float) + sample * v->sample_stride + row * v->row_stride +
           (size_t)f->step * v->step_stride;
}

CLB_WALK void clb_no_expert(const clb_routed *routed, uint32_t count) {
    for (uint32_t n = 0; n < count; ++n) {
        memset(token_at(routed, 1, n), 0, routed->d_out * sizeof(float));
    }
}

CLB_WALK const void *clb_tensor_at(const clb_frame *frame, uint32_t number) {
    return number == CLB_NONE ? NULL : frame->weights + frame->tensors[number].offset;
}

CLB_WALK void clb_pad_tile(clb_tile *tile) {
    const uint32_t n = tile->rows;
    tile->computed = n;
    if (n % 4 == 3) { /* four at once take less time than two and one */
        tile->a[n] = tile->a[n - 1];
        tile->out[n] = tile->out[n - 1];
        tile->computed = n + 1;
    }
}

CLB_WALK void clb_next_tile(const clb_op *op, uint32_t samples, const clb_frame *frame,
                            uint32_t *sample, uint32_t *row, clb_tile *tile) {
    uint32_t n = 0;
    for (; n < CLB_TILE && *sample < samples; ++n) {
        tile->a[n] = clb_locate(&op->a, frame, tile->w0, *sample, *row);
        tile->b[n] = op->b.space == CLB_SPACE_NONE
                         ? NULL
                         : clb_locate(&op->b, frame, tile->w1, *sample, *row);
        tile->out[n] = (float *)(uintptr_t)clb_locate(&op->out, frame, NULL, *sample, *row);
        if (++*row == op->rows) {
            *row = 0;
            ++*sample;
        }
    }
    tile->rows = n;
    clb_pad_tile(tile);
}
