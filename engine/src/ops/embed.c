/* Rows of a table of tokens, as the numbers that they stand for. */
#include "../core/internal.h"

/* Element (lane, col) of 8 rows of a matrix, as the number it stands for. */
static float stored(uint32_t layout, const uint8_t *block, uint32_t lane, uint32_t col) {
    const size_t at = (size_t)col * CLB_LANES + lane;
    if (layout == CLB_LAYOUT_ROWS8_F32) return ((const float *)(const void *)block)[at];
    if (layout == CLB_LAYOUT_ROWS8_F16) {
        return clb_half(((const uint16_t *)(const void *)block)[at]);
    }
    if (layout == CLB_LAYOUT_ROWS8_I8) {
        const float *scale = (const float *)(const void *)block;
        return (float)(int8_t)block[(CLB_LANES + col / 4 * CLB_LANES + lane) * 4 + col % 4] *
               scale[lane];
    }
    const uint8_t *group =
        block + (size_t)(col / CLB_WEIGHT_GROUP) * CLB_LANES * (sizeof(uint16_t) + 16);
    const uint8_t both = group[(CLB_LANES / 2 + col % 16 / 4 * CLB_LANES + lane) * 4 + col % 4];
    return (float)((col % CLB_WEIGHT_GROUP < 16 ? both & 15 : both >> 4) - 8) *
           clb_half(((const uint16_t *)(const void *)group)[lane]);
}

CLB_WALK void clb_embed(const clb_op *op, uint32_t samples, const clb_frame *frame) {
    const clb_tensor *table = &frame->tensors[op->embed.table];
    for (size_t n = 0; n < (size_t)samples * op->rows; ++n) {
        const float id = *clb_locate(&op->a, frame, NULL, n / op->rows, n % op->rows);
        float *out =
            (float *)(uintptr_t)clb_locate(&op->out, frame, NULL, n / op->rows, n % op->rows);
        const int known = id >= 0.0f && id < (float)table->rows;
        const uint32_t row = known ? (uint32_t)id : 0;
        const uint8_t *block = clb_tensor_at(frame, op->embed.table) +
                               row / CLB_LANES * clb_block_bytes(table->layout, table->cols);
        for (uint32_t i = 0; i < op->embed.width; ++i) {
            out[i] = known ? stored(table->layout, block, row % CLB_LANES, i) : clb_nan();
        }
    }
}

#if !defined(COLIBRI_GENERATED)
#include "../check/proof.h"

static int embed_fits(const clb_subject *s) {
    return s->w0 != NULL && s->w0->cols == s->op->embed.width &&
           clb_block_bytes(s->w0->layout, s->op->embed.width) != 0;
}

static void embed_uses(const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    clb_plain(uses, 1, 0, s->op->embed.width);
}

const clb_proof clb_embed_proof = {embed_fits, embed_uses, NULL, NULL, NULL};

#endif
