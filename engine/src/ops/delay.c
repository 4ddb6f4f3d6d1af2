/* Rows of earlier time steps: what came in some steps before, or zeros where the text or stream had
 * not begun. */
#include "../core/internal.h"

/* n floats, which may overlap in a hostile file. */
CLB_STATIC_WALK void copy(float *to, const float *from, size_t n) {
    if (!CLB_SCALAR) {
        memmove(to, from, n * sizeof *to);
        return;
    }
    for (size_t i = 0; i < n; ++i) {
        to[i] = from[i];
    }
}

/* Row r recalls what came in `steps - r · apart` time steps before. */
CLB_WALK void clb_delay(const clb_op *op, uint32_t samples, const clb_frame *frame) {
    const size_t n = op->delay.width;
    const size_t slots = op->delay.slots;
    float *kept = clb_work_at(op, frame);
    const uint32_t stored = op->a.space == CLB_SPACE_NONE ? 0 : samples;
    const uint32_t recalled = op->out.space == CLB_SPACE_NONE ? 0 : samples;
    for (uint32_t s = 0; s < stored; ++s) {
        const float *row = clb_locate(&op->a, frame, NULL, s, 0);
        copy(kept + (frame->position + s) % slots * n, row, n);
    }
    for (uint32_t s = 0; s < recalled; ++s) {
        const size_t position = (size_t)frame->position + s;
        for (uint32_t row = 0; row < op->rows; ++row) {
            const size_t steps = op->delay.steps - row * op->delay.apart;
            float *out = clb_out_row(op, frame, s, row);
            if (position < steps) {
                memset(out, 0, n * sizeof *out);
            } else {
                copy(out, kept + (position - steps) % slots * n, n);
            }
        }
    }
}

#ifndef COLIBRI_GENERATED
#include "../check/proof.h"

/* Its slots hold a chunk and what it looks back at. */
static int delay_fits(const clb_subject *s) {
    const clb_op *op = s->op;
    const uint64_t tokens = s->model->header->context_tokens;
    const uint64_t chunk = s->samples < tokens ? s->samples : tokens;
    const uint64_t apart = (op->rows - 1ull) * op->delay.apart;
    return apart <= op->delay.steps && op->delay.slots >= op->delay.steps + chunk;
}

/* It stores one row, if it has one, and recalls all that look back from there, if anybody wants
 * them. */
static void delay_uses(const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    const clb_op *op = s->op;
    const uint32_t stored = op->a.space == CLB_SPACE_NONE ? 0 : op->delay.width;
    const uint32_t recalled = op->out.space == CLB_SPACE_NONE ? 0 : op->delay.width;
    clb_plain(uses, stored, 0, recalled);
    uses[CLB_A].rows = 1;
}

static uint64_t delay_work(const clb_subject *s) {
    return (s->op->rows + 1ull) * s->op->delay.width;
}

static uint64_t delay_kept(const clb_subject *s) {
    return (uint64_t)s->op->delay.slots * s->op->delay.width;
}

const clb_proof clb_delay_proof = {
    .fits = delay_fits, .uses = delay_uses, .work = delay_work, .kept = delay_kept};

#endif
