/* Keys and values of new tokens, put where attention finds them. */
#include "cache.h"

CLB_INTERNAL uint64_t clb_page_bytes(uint32_t format, uint32_t key, uint32_t value) {
    const uint32_t layout = CACHE_LAYOUT + format;
    const uint64_t keys = PAGE_BLOCKS * clb_block_bytes(layout, key);
    const uint64_t values = clb_ceil(value, CLB_LANES) * clb_block_bytes(layout, CLB_PAGE);
    return keys + values + (format == CLB_CACHE_INT8 ? CLB_PAGE * sizeof(float) : 0);
}

/* The float16 nearest to x, ties to even. */
static inline uint16_t clb_to_half(float x) {
    const uint32_t sign = clb_bits(x) >> 16 & 0x8000u;
    const uint32_t size = clb_bits(x) & 0x7FFFFFFFu;
    uint32_t half = ((size + 0xFFFu + (size >> 13 & 1u)) >> 13) - (112u << 10);
    if (size >= 0x47800000u) {
        half = size > 0x7F800000u ? 0x7E00u : 0x7C00u;
    } else if (size < 0x38800000u) { /* adding 1/2 leaves a denormal's bits at the end */
        half = clb_bits(clb_from_bits(size) + 0.5f) - 0x3F000000u;
    }
    return (uint16_t)(sign | half);
}

/* The largest magnitude. */
CLB_STATIC_WALK float most_of_row(const float *x, uint32_t n) {
    float most = -clb_inf();
    for (uint32_t i = 0; i < n; ++i) {
        most = clb_abs(x[i]) > most ? clb_abs(x[i]) : most;
    }
    return most;
}

/* x · factor as the nearest integer, 0 where it is no int8. */
static inline uint8_t byte_of_float(float x, float factor) {
    const float scaled = x * factor;
    const float whole = (scaled + 0x1.8p+23f) - 0x1.8p+23f;
    return (uint8_t)(int8_t)(clb_abs(scaled) < 127.5f ? whole : 0.0f);
}

/* A key as row `slot` of a page's keys, or a value as column `slot` of its values; as int8 max|x|
 * becomes 127, and `scale` undoes it. */
CLB_STATIC_WALK void keep(uint32_t layout, uint8_t *blocks, size_t stride, uint32_t slot,
                          int is_value, const float *x, uint32_t n, float *scale) {
    const int int8 = layout == CLB_LAYOUT_ROWS8_I8;
    const float most = int8 ? most_of_row(x, n) : 0.0f;
    const float factor = most > 0.0f && most < clb_inf() ? 127.0f / most : 0.0f;
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t row = is_value ? i : slot;
        const uint32_t col = is_value ? slot : i;
        const uint32_t lane = row % CLB_LANES;
        const size_t at = (size_t)col * CLB_LANES + lane;
        uint8_t *bytes = blocks + row / CLB_LANES * stride;
        void *block = bytes;
        float *floats = block;
        uint16_t *halves = block;
        if (layout == CLB_LAYOUT_ROWS8_F32) {
            floats[at] = x[i];
        } else if (layout == CLB_LAYOUT_ROWS8_F16) {
            halves[at] = clb_to_half(x[i]);
        } else {
            const uint32_t four = CLB_LANES + col / 4 * CLB_LANES + lane;
            bytes[four * 4 + col % 4] = byte_of_float(x[i], factor);
        }
    }
    if (int8) {
        *scale = most / 127.0f;
    }
}

CLB_WALK void clb_cache(const clb_op *op, uint32_t samples, const clb_frame *frame) {
    const cache c = cache_of(op, frame);
    for (uint32_t s = 0; s < samples; ++s) {
        const uint32_t position = frame->position + s;
        const uint32_t slot = position % CLB_PAGE;
        for (uint32_t head = 0; head < c.heads; ++head) {
            const float *key = clb_locate(&op->a, frame, NULL, s, head);
            const float *value = clb_locate(&op->b, frame, NULL, s, head);
            uint8_t *page = keys_at(&c, head, position / CLB_PAGE);
            void *block =
                page + slot / CLB_LANES * c.key_stride; /* of int8 begins with its scales */
            float *key_scales = block;
            float *scale = scales_at(&c, page) + slot;
            keep(c.layout, page, c.key_stride, slot, 0, key, c.key, key_scales + slot % CLB_LANES);
            keep(c.layout, page + c.values, c.value_stride, slot, 1, value, c.value, scale);
        }
    }
}

#ifndef COLIBRI_GENERATED
#include "../check/proof.h"

static uint64_t op_page_bytes(const clb_op *op) {
    return clb_page_bytes(op->func, op->attention.key, op->attention.value);
}

static uint64_t cache_floats(const clb_op *op) {
    const uint64_t pages = (uint64_t)op->attention.positions / CLB_PAGE * op->attention.key_heads;
    return pages * op_page_bytes(op) / sizeof(float);
}

uint64_t clb_cache_kept(const clb_subject *s) { return cache_floats(s->op); }

/* Pages that hold all a token sees, when the chunk it came in is stored. */
static uint64_t pages_seen(const clb_header *h, uint32_t window) {
    const uint64_t all = ((uint64_t)h->context_tokens + CLB_PAGE - 1) / CLB_PAGE;
    const uint64_t seen = window == 0 ? all : ((uint64_t)window + h->max_batch - 2) / CLB_PAGE + 2;
    return seen < all ? seen : all;
}

/* Enough pages, and no more than memory holds. */
static int pages_fit(const clb_header *h, const clb_op *op) {
    const uint64_t pages = op->attention.positions / CLB_PAGE;
    const uint64_t most = h->context_bytes / op_page_bytes(op);
    if (op->attention.positions % CLB_PAGE != 0) return 0;
    if (pages < pages_seen(h, op->attention.window)) return 0;
    return op->attention.key_heads <= most && pages <= most / op->attention.key_heads;
}

int clb_cache_fits(const clb_subject *s) {
    const clb_op *op = s->op;
    const uint32_t mask = op->attention.mask;
    const uint64_t tokens = s->model->header->context_tokens;
    const uint64_t distances = mask == CLB_MASK_FULL ? 2 * tokens - 1 : tokens;
    if (mask != CLB_MASK_CAUSAL && op->attention.window != 0) return 0;
    if (mask == CLB_MASK_CROSS && (!s->scope->decodes || s->w1 != NULL)) return 0;
    if (!pages_fit(s->model->header, op)) return 0;
    if (s->w1 == NULL) return 1;
    return s->w1->layout == CLB_LAYOUT_FLAT && s->w1->cols / op->rows >= distances;
}

static int cache_fits(const clb_subject *s) {
    return s->op->rows == s->op->attention.key_heads && clb_cache_fits(s);
}

static void cache_uses(const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    clb_plain(uses, s->op->attention.key, s->op->attention.value, 0);
}

uint64_t clb_cache_work(const clb_subject *s) {
    const clb_op *op = s->op;
    return op->rows * ((uint64_t)op->attention.key + op->attention.value);
}

const clb_proof clb_cache_proof = {
    .fits = cache_fits, .uses = cache_uses, .work = clb_cache_work, .kept = clb_cache_kept};

/* The cache operation `writer` fills just what the attention `reader` looks at: 1; something else
 * there: -1; nothing: 0. */
static int fills(const clb_op *writer, const clb_op *reader) {
    const uint64_t a = writer->work.offset;
    const uint64_t b = reader->work.offset;
    if (writer->code != CLB_OP_CACHE) return 0;
    const uint64_t a_end = a + cache_floats(writer) * sizeof(float);
    const uint64_t b_end = b + cache_floats(reader) * sizeof(float);
    if (a >= b_end || b >= a_end) return 0;
    const int same_sizes = memcmp(writer->dims, reader->dims, sizeof reader->dims) == 0;
    return a == b && writer->func == reader->func && same_sizes ? 1 : -1;
}

int clb_caches_are_filled(const clb_model *model) {
    enum { LOOKS = 1 << 26 }; /* far more than a sound program needs */
    const clb_header *h = model->header;
    uint64_t looks = 0;
    for (uint32_t n = 0; n < h->main_ops; ++n) {
        const clb_op *op = &model->ops[n];
        if (op->code != CLB_OP_ATTENTION) continue;
        const int cleared = op->work.offset < h->cleared_bytes;
        if (cleared && op->attention.mask != CLB_MASK_FULL) return 0;
        int filled = 0;
        for (uint32_t other = 0; other < h->main_ops; ++other) {
            const int found = fills(&model->ops[other], op);
            if (found < 0 || ++looks > LOOKS) return 0;
            filled |= found && other < n;
        }
        if (!filled) return 0;
    }
    return 1;
}

#endif
