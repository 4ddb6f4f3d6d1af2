/* Rows of a table of tokens, as the numbers that they stand for. */
#include "../core/internal.h"

/* Element (lane, col) of 8 rows of a matrix, as the number it stands for. */
static float stored(uint32_t layout, const uint8_t *block, uint32_t lane, uint32_t col) {
    const size_t at = (size_t)col * CLB_LANES + lane;
    const float *floats = clb_at(block, 0);
    const uint16_t *halves = clb_at(block, 0);
    const uint32_t byte = lane * 4 + col % 4; /* of 8 rows × 4 inputs */
    if (layout == CLB_LAYOUT_ROWS8_F32) return floats[at];
    if (layout == CLB_LAYOUT_ROWS8_F16) return clb_half(halves[at]);
    if (layout == CLB_LAYOUT_ROWS8_I8) { /* past the scales */
        const uint8_t *four = block + (CLB_LANES + col / 4 * CLB_LANES) * 4;
        return (float)(int8_t)four[byte] * floats[lane];
    }
    const uint32_t group_bytes = CLB_LANES * (sizeof(uint16_t) + 16);
    const uint8_t *group = block + (size_t)(col / CLB_WEIGHT_GROUP) * group_bytes;
    const uint8_t *four = group + (CLB_LANES / 2 + col % 16 / 4 * CLB_LANES) * 4;
    const int both = four[byte];
    const int weight = (col % CLB_WEIGHT_GROUP < 16 ? both & 15 : both >> 4) - 8;
    halves = clb_at(group, 0);
    return (float)weight * clb_half(halves[lane]);
}

CLB_WALK void clb_embed(const clb_op *op, uint32_t samples, const clb_frame *frame) {
    const clb_tensor *table = &frame->tensors[op->embed.table];
    const uint8_t *first = clb_tensor_at(frame, op->embed.table);
    const uint64_t block_bytes = clb_block_bytes(table->layout, table->cols);
    for (size_t n = 0; n < (size_t)samples * op->rows; ++n) {
        const float id = *clb_locate(&op->a, frame, NULL, n / op->rows, n % op->rows);
        float *out = clb_out_row(op, frame, n / op->rows, n % op->rows);
        const int known = id >= 0.0f && id < (float)table->rows;
        const uint32_t row = known ? (uint32_t)id : 0;
        const uint8_t *block = first + row / CLB_LANES * block_bytes;
        for (uint32_t i = 0; i < op->embed.width; ++i) {
            out[i] = known ? stored(table->layout, block, row % CLB_LANES, i) : clb_nan();
        }
    }
}

#ifndef COLIBRI_GENERATED
#include "../check/proof.h"

static int embed_fits(const clb_subject *s) {
    const uint32_t width = s->op->embed.width;
    if (s->w0 == NULL || s->w0->cols != width) return 0;
    return clb_block_bytes(s->w0->layout, width) != 0;
}

static void embed_uses(const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    clb_plain(uses, 1, 0, s->op->embed.width);
}

const clb_proof clb_embed_proof = {.fits = embed_fits, .uses = embed_uses};

#endif
