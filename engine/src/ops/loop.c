/* A loop over the operations behind it. The walk runs it: core/forward.c, or the code of an
 * exported model.c. */
#include "../check/proof.h"

/* No step without its state in memory. */
static int loop_fits(const clb_subject *s) {
    const clb_op *op = s->op;
    const clb_header *h = s->model->header;
    const uint64_t most = h->context_bytes / sizeof(float);
    if (s->scope->looped != 0) return 0;
    if (op->work.space != CLB_SPACE_NONE) return 0;
    return op->loop.steps <= most;
}

static void loop_uses(UNUSED const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    clb_plain(uses, 0, 0, 0);
}

/* What it costs is what is in it, step by step: see program.c. */
const clb_proof clb_loop_proof = {.fits = loop_fits, .uses = loop_uses};
