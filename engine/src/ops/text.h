/* What operations on texts share with colibri_lm.h. */
#ifndef COLIBRI_TEXT_H
#define COLIBRI_TEXT_H

#include "../core/internal.h"

/* The first position that attention's token at `last` sees. */
static inline uint32_t clb_first_seen(const clb_op *op, uint32_t last) {
    const uint32_t window = op->attention.window;
    return window == 0 || last < window ? 0 : last + 1 - window;
}

#endif
