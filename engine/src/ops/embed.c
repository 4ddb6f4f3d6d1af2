/* Rows of a table of tokens, as the numbers that they stand for. */
#include "../core/internal.h"

/* Element (lane, col) of 8 rows of a matrix, as the number it stands for. */
static float stored(uint32_t layout, const uint8_t *block, uint32_t lane, uint32_t col) {
    const size_t at = (size_t)col * CLB_LANES + lane;
    const size_t group = col / CLB_WEIGHT_GROUP;
    if (layout == CLB_LAYOUT_ROWS8_I4) {
        block += group * CLB_INT4_BYTES;
    }
    const float *floats = clb_at(block, 0);
    const uint16_t *halves = clb_at(block, 0);
    const uint32_t byte = lane * 4 + col % 4; /* of 8 rows × 4 inputs */
    const uint32_t below = col % CLB_WEIGHT_GROUP;
    switch (layout) {
    case CLB_LAYOUT_ROWS8_F32: return floats[at];
    case CLB_LAYOUT_ROWS8_F16: return clb_half(halves[at]);
    case CLB_LAYOUT_ROWS8_I8: /* past the scales */
        block += (1 + col / 4) * 4 * CLB_LANES;
        return (float)(int8_t)block[byte] * floats[lane];
    default: break;
    }
    block += 2 * CLB_LANES + below % 16 / 4 * 4 * CLB_LANES;
    const int both = block[byte];
    const int weight = below < 16 ? both & 15 : both >> 4;
    return (float)(weight - 8) * clb_half(halves[lane]);
}

CLB_WALK void clb_embed(const clb_op *op, uint32_t samples, const clb_frame *frame) {
    const clb_tensor *table = &frame->tensors[op->embed.table];
    const uint8_t *first = clb_tensor_at(frame, op->embed.table);
    const uint64_t block_bytes = clb_block_bytes(table->layout, table->cols);
    const size_t rows = op->rows;
    for (size_t n = 0; n < samples * rows; ++n) {
        const float id = *clb_locate(&op->a, frame, NULL, n / rows, n % rows);
        float *out = clb_out_row(op, frame, n / rows, n % rows);
        const int known = id >= 0.0f && id < (float)table->rows;
        const uint32_t row = known ? (uint32_t)id : 0;
        const uint8_t *block = first + row / CLB_LANES * block_bytes;
        for (uint32_t i = 0; i < op->embed.width; ++i) {
            const float value = stored(table->layout, block, row % CLB_LANES, i);
            out[i] = known ? value : clb_nan();
        }
    }
}

#ifndef COLIBRI_GENERATED
#include "../check/proof.h"

static int embed_fits(const clb_subject *s) {
    const clb_tensor *table = s->w0;
    if (table == NULL || table->cols != s->op->embed.width) return 0;
    return clb_block_bytes(table->layout, table->cols) != 0;
}

static void embed_uses(const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    clb_plain(uses, 1, 0, s->op->embed.width);
}

const clb_proof clb_embed_proof = {.fits = embed_fits, .uses = embed_uses};

#endif
