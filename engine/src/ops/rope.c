/* Rotary positions: pairs of a row turned by the angle of their token. */
#include "../core/internal.h"

CLB_WALK void clb_rope(const clb_op *op, uint32_t samples, const clb_frame *frame) {
    const uint32_t n = op->rope.size;
    const uint32_t turned = op->rope.turned;
    const uint32_t half = turned / 2;
    const float *table = clb_tensor_at(frame, op->rope.table);
    for (uint32_t s = 0; s < samples; ++s) {
        const float *cosine = table + (size_t)(frame->position + s) * turned;
        const float *sine = cosine + half;
        for (uint32_t row = 0; row < op->rows; ++row) {
            const float *x = clb_locate(&op->a, frame, NULL, s, row);
            float *y = clb_out_row(op, frame, s, row);
            for (uint32_t i = 0; i < half; ++i) {
                const float a = x[i];
                const float b = x[half + i];
                const float c = cosine[i];
                const float s_i = sine[i];
                y[i] = a * c - b * s_i;
                y[half + i] = b * c + a * s_i;
            }
            memmove(y + turned, x + turned, (n - turned) * sizeof *y);
        }
    }
}

#ifndef COLIBRI_GENERATED
#include "../check/proof.h"

static int rope_fits(const clb_subject *s) {
    const clb_tensor *table = s->w0;
    const uint64_t turned = s->op->rope.turned;
    if (turned % 2 != 0 || turned > s->op->rope.size) return 0;
    if (table == NULL || table->layout != CLB_LAYOUT_FLAT) return 0;
    return table->cols >= s->model->header->context_tokens * turned;
}

const clb_proof clb_rope_proof = {.fits = rope_fits};

#endif
