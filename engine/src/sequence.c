/* Language models: operations that know their token's position, or look at those before it. What is kept from one run to
 * the next lies in the context block, at an operation's `work`.
 *
 * Keys and values are kept in pages of CLB_PAGE positions, for each key head by itself, as matrices of the layouts
 * products know: of the keys a row is a position, of the values a column is, so that scores and their weighted sum are
 * matrix products. Positions take the pages in turn. */
#include "internal.h"

enum { PAGE_BLOCKS = CLB_PAGE / CLB_LANES, CACHE_LAYOUT = CLB_LAYOUT_ROWS8_F32 /* of CLB_CACHE_FP32; the others follow */ };

/* The pages of one operation. */
typedef struct {
    uint8_t *at;
    uint32_t layout, key, value, heads, pages;
    size_t key_stride, value_stride, values, page; /* bytes of 8 keys, of 8 elements of all values, of the keys, of all */
} cache;

CLB_INTERNAL uint64_t clb_page_bytes(uint32_t format, uint32_t key, uint32_t value)
{
    const uint32_t layout = CACHE_LAYOUT + format;
    return (uint64_t)PAGE_BLOCKS * clb_block_bytes(layout, key) +
           (uint64_t)clb_ceil(value, CLB_LANES) * clb_block_bytes(layout, CLB_PAGE) +
           (format == CLB_CACHE_INT8 ? CLB_PAGE * sizeof(float) : 0);
}

CLB_INTERNAL uint64_t clb_cache_floats(const clb_op *op)
{
    const uint64_t page = clb_page_bytes(op->func, op->dims[0], op->dims[1]);
    return (uint64_t)op->dims[3] / CLB_PAGE * op->dims[2] * page / sizeof(float);
}

/* The cache operation `writer` fills just what the attention `reader` looks at: 1; something else there: -1; nothing: 0. */
static int fills(const clb_op *writer, const clb_op *reader)
{
    const uint64_t a = writer->work.offset, b = reader->work.offset;
    RETURN_IF(writer->code != CLB_OP_CACHE, 0);
    const int meet = a < b + clb_cache_floats(reader) * sizeof(float) && b < a + clb_cache_floats(writer) * sizeof(float);
    RETURN_IF(!meet, 0);
    return a == b && writer->func == reader->func && memcmp(writer->dims, reader->dims, sizeof reader->dims) == 0 ? 1 : -1;
}

CLB_INTERNAL int clb_caches_are_filled(const clb_model *model)
{
    enum { LOOKS = 1 << 26 }; /* far more than a sound program needs */
    const clb_header *h = model->header;
    uint64_t looks = 0;
    for (uint32_t n = 0; n < h->main_ops; ++n) {
        const clb_op *op = &model->ops[n];
        int filled = op->code != CLB_OP_ATTENTION;
        RETURN_IF(!filled && op->sa[1] != CLB_SIGHT_ALL && op->work.offset < h->cleared_bytes, 0);
        for (uint32_t other = 0; op->code == CLB_OP_ATTENTION && other < h->main_ops; ++other) {
            const int found = fills(&model->ops[other], op);
            RETURN_IF(found < 0 || ++looks > LOOKS, 0);
            filled |= found && other < n;
        }
        RETURN_IF(!filled, 0);
    }
    return 1;
}

CLB_STATIC_WALK cache cache_of(const clb_op *op, const clb_frame *frame)
{
    const uint32_t layout = CACHE_LAYOUT + op->func;
    const size_t key_stride = (size_t)clb_block_bytes(layout, op->dims[0]);
    return (cache){.at = frame->arena + op->work.offset, .layout = layout, .key = op->dims[0], .value = op->dims[1],
                   .heads = op->dims[2], .pages = op->dims[3] / CLB_PAGE, .key_stride = key_stride,
                   .value_stride = (size_t)clb_block_bytes(layout, CLB_PAGE), .values = PAGE_BLOCKS * key_stride,
                   .page = (size_t)clb_page_bytes(op->func, op->dims[0], op->dims[1])};
}

static uint8_t *keys_at(const cache *c, uint32_t head, uint32_t page)
{
    return c->at + ((size_t)head * c->pages + page % c->pages) * c->page;
}

/* The scales of a page's values, a number a position: int8 only. */
static float *scales_at(const cache *c, uint8_t *page) { return (float *)(void *)(page + c->page) - CLB_PAGE; }

/* A key as row `slot` of a page's keys, or a value as column `slot` of its values; as int8 max|x| becomes 127, and `scale`
 * undoes it. */
CLB_STATIC_WALK void keep(uint32_t layout, uint8_t *blocks, size_t stride, uint32_t slot, int is_value, const float *x,
                          uint32_t n, float *scale)
{
    float most = -clb_inf();
    for (uint32_t i = 0; layout == CLB_LAYOUT_ROWS8_I8 && i < n; ++i) {
        most = clb_abs(x[i]) > most ? clb_abs(x[i]) : most;
    }
    const float factor = most > 0.0f && most < clb_inf() ? 127.0f / most : 0.0f;
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t row = is_value ? i : slot, col = is_value ? slot : i, lane = row % CLB_LANES;
        uint8_t *block = blocks + row / CLB_LANES * stride;
        if (layout == CLB_LAYOUT_ROWS8_F32) {
            ((float *)(void *)block)[(size_t)col * CLB_LANES + lane] = x[i];
        } else if (layout == CLB_LAYOUT_ROWS8_F16) {
            ((uint16_t *)(void *)block)[(size_t)col * CLB_LANES + lane] = clb_to_half(x[i]);
        } else {
            const float scaled = x[i] * factor, whole = (scaled + 0x1.8p+23f) - 0x1.8p+23f;
            block[(CLB_LANES + col / 4 * CLB_LANES + lane) * 4 + col % 4] =
                (uint8_t)(int8_t)(clb_abs(scaled) < 127.5f ? whole : 0.0f);
        }
    }
    if (layout == CLB_LAYOUT_ROWS8_I8) {
        *scale = most / 127.0f;
    }
}

CLB_WALK void clb_cache(const clb_op *op, uint32_t samples, const clb_frame *frame)
{
    const cache c = cache_of(op, frame);
    for (uint32_t s = 0; s < samples; ++s) {
        const uint32_t position = frame->position + s, slot = position % CLB_PAGE;
        for (uint32_t head = 0; head < c.heads; ++head) {
            uint8_t *page = keys_at(&c, head, position / CLB_PAGE);
            float *scales = (float *)(void *)(page + slot / CLB_LANES * c.key_stride);
            keep(c.layout, page, c.key_stride, slot, 0, clb_locate(&op->a, frame, NULL, s, head), c.key,
                 scales + slot % CLB_LANES);
            keep(c.layout, page + c.values, c.value_stride, slot, 1, clb_locate(&op->b, frame, NULL, s, head), c.value,
                 scales_at(&c, page) + slot);
        }
    }
}

/* A tile of queries of one key head, a row each: token after token, of each the heads that share the key head. */
typedef struct {
    const clb_op *op;
    const clb_frame *frame;
    cache c;
    const float *sinks, *bias; /* NULL: none; of each head `span` biases, the own position's in the `middle` */
    uint32_t samples, group, tiles, span, middle; /* tiles: of a key head */
} attention;

typedef struct {
    const float *q, *bias; /* bias: of position 0 */
    float *out, best, sum; /* the largest score so far; the sum of exp(score - best) */
    uint32_t last;         /* the last position it sees */
} query;

/* Scores of a row as the weights of their values. */
CLB_STATIC_WALK void weigh(const attention *t, query *row, float *w, uint32_t start, uint32_t count)
{
    const float factor = t->op->p0, cap = t->op->p1;
    const uint32_t begin = clb_first_seen(t->op, row->last);
    float most[CLB_LANES], best = row->best;
    for (uint32_t i = 0; i < CLB_LANES; ++i) {
        most[i] = best;
    }
    for (uint32_t j = 0; j < count; ++j) {
        w[j] = cap != 0.0f ? clb_tanh(w[j] * factor / cap) * cap : w[j] * factor;
    }
    for (uint32_t j = 0; row->bias != NULL && j < count; ++j) {
        w[j] += row->bias[start + j];
    }
    for (uint32_t j = 0; j < clb_ceil(count, CLB_LANES) * CLB_LANES; ++j) {
        w[j] = j < count && start + j >= begin ? w[j] : -clb_inf();
    }
    for (uint32_t j = 0; j < count; j += CLB_LANES) {
        for (uint32_t i = 0; i < CLB_LANES; ++i) {
            most[i] = w[j + i] > most[i] ? w[j + i] : most[i];
        }
    }
    for (uint32_t i = 0; i < CLB_LANES; ++i) {
        best = most[i] > best ? most[i] : best;
    }
    CLB_KERNELS(t->frame->ctx)->unary(CLB_UNARY_EXP, best, 0.0f, w, w, count);
    const float kept = clb_exp(row->best - best);
    row->sum = row->sum * kept + clb_lane_sum(w, 1, count);
    row->best = best;
    for (uint32_t j = 0; kept != 1.0f && j < t->c.value; ++j) {
        row->out[j] *= kept;
    }
}

CLB_STATIC_WALK void panels(const clb_kernels *kernels, const clb_matrix *m, clb_tile *tile)
{
    clb_pad_tile(tile);
    for (uint32_t at = 0, blocks = clb_ceil(m->outputs, CLB_LANES); at < blocks; at += CLB_PANEL) {
        CLB_PANEL_OF(kernels)(m, tile, at, clb_min(blocks - at, CLB_PANEL));
    }
}

/* Some rows of a tile look at the first `count` positions of a page. */
CLB_STATIC_WALK void look(const attention *t, query *rows, uint32_t n, uint32_t page, uint8_t *keys, uint32_t count)
{
    const cache *c = &t->c;
    const clb_kernels *kernels = CLB_KERNELS(t->frame->ctx);
    const int scaled = c->layout == CLB_LAYOUT_ROWS8_I8;
    float weights[CLB_TILE][CLB_PAGE];
    clb_tile tile = {.rows = n, .kernels = kernels};
    for (uint32_t i = 0; i < n; ++i) {
        tile.a[i] = rows[i].q;
        tile.out[i] = weights[i];
    }
    clb_matrix m = {.blocks = keys, .stride = c->key_stride, .layout = c->layout, .cols = c->key, .outputs = count,
                    .scaled = scaled};
    panels(kernels, &m, &tile);
    for (uint32_t i = 0; i < n; ++i) {
        weigh(t, &rows[i], weights[i], page * CLB_PAGE, count);
        for (uint32_t j = 0; scaled && j < count; ++j) {
            weights[i][j] *= scales_at(c, keys)[j];
        }
        tile.a[i] = weights[i];
        tile.out[i] = rows[i].out;
    }
    m = (clb_matrix){.blocks = keys + c->values, .stride = c->value_stride, .layout = c->layout, .cols = count,
                     .outputs = c->value, .adds = 1};
    panels(kernels, &m, &tile);
}

/* Task `index`: one tile. Where several rows see a whole page, they look at it together. */
CLB_STATIC_WALK void attend(void *arg, uint32_t index)
{
    const attention *t = arg;
    const uint32_t sight = t->op->sa[1], here = t->frame->position;
    const uint32_t head = index / t->tiles, from = index % t->tiles * CLB_TILE;
    const uint32_t n = clb_min(t->samples * t->group - from, CLB_TILE);
    query rows[CLB_TILE];
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t sample = (from + i) / t->group, own = head * t->group + (from + i) % t->group;
        rows[i].q = clb_locate(&t->op->a, t->frame, NULL, sample, own);
        rows[i].out = (float *)(uintptr_t)clb_locate(&t->op->out, t->frame, NULL, sample, own);
        rows[i].bias = t->bias == NULL ? NULL : t->bias + (size_t)own * t->span + (t->middle - here - sample);
        rows[i].last = (sight == CLB_SIGHT_SOURCE ? t->frame->ctx->source
                        : sight == CLB_SIGHT_ALL  ? here + t->samples
                                                  : here + sample + 1) - 1;
        rows[i].best = t->sinks == NULL ? -clb_inf() : t->sinks[own];
        rows[i].sum = t->sinks == NULL ? 0.0f : 1.0f;
        memset(rows[i].out, 0, t->c.value * sizeof(float));
    }
    for (uint32_t page = clb_first_seen(t->op, here + from / t->group) / CLB_PAGE; page <= rows[n - 1].last / CLB_PAGE; ++page) {
        for (uint32_t i = 0, end; i < n; i = end) {
            const uint32_t last = rows[i].last, next = (page + 1) * CLB_PAGE;
            for (end = i + 1; end < n && (rows[end].last == last ||
                                          (next <= last && clb_first_seen(t->op, rows[end].last) < next)); ++end) {
            }
            if (page * CLB_PAGE <= last && clb_first_seen(t->op, last) < next) {
                look(t, rows + i, end - i, page, keys_at(&t->c, head, page), clb_min(last + 1, next) - page * CLB_PAGE);
            }
        }
    }
    for (uint32_t i = 0; i < n; ++i) {
        for (uint32_t j = 0; j < t->c.value; ++j) {
            rows[i].out[j] /= rows[i].sum;
        }
    }
}

CLB_WALK void clb_attention(const clb_op *op, uint32_t samples, const clb_frame *frame)
{
    enum { SPREAD_MACS = 1 << 15 }; /* below, handing work to threads costs more than it saves */
    const uint32_t group = op->rows / op->dims[2];
    const uint32_t span = op->w1 == CLB_NONE ? 0 : frame->tensors[op->w1].cols / op->rows;
    attention t = {.op = op, .frame = frame, .c = cache_of(op, frame), .samples = samples, .group = group,
                   .sinks = (const float *)(const void *)clb_tensor_at(frame, op->w0),
                   .bias = (const float *)(const void *)clb_tensor_at(frame, op->w1), .span = span,
                   .middle = op->sa[1] == CLB_SIGHT_ALL ? span / 2 : span - 1,
                   .tiles = clb_ceil(samples * group, CLB_TILE)};
    const uint64_t macs = (uint64_t)samples * op->rows * (frame->position + samples) * (t.c.key + t.c.value);
    CLB_SPREAD(frame->ctx, frame->ctx->parallel != NULL && macs >= SPREAD_MACS, attend, &t, t.c.heads * t.tiles);
}

/* Element (lane, col) of 8 rows of a matrix, as the number it stands for. */
static float stored(uint32_t layout, const uint8_t *block, uint32_t lane, uint32_t col)
{
    const size_t at = (size_t)col * CLB_LANES + lane;
    RETURN_IF(layout == CLB_LAYOUT_ROWS8_F32, ((const float *)(const void *)block)[at]);
    RETURN_IF(layout == CLB_LAYOUT_ROWS8_F16, clb_half(((const uint16_t *)(const void *)block)[at]));
    if (layout == CLB_LAYOUT_ROWS8_I8) {
        const float *scale = (const float *)(const void *)block;
        return (float)(int8_t)block[(CLB_LANES + col / 4 * CLB_LANES + lane) * 4 + col % 4] * scale[lane];
    }
    const uint8_t *group = block + (size_t)(col / CLB_WEIGHT_GROUP) * CLB_LANES * (sizeof(uint16_t) + 16);
    const uint8_t both = group[(CLB_LANES / 2 + col % 16 / 4 * CLB_LANES + lane) * 4 + col % 4];
    return (float)((col % CLB_WEIGHT_GROUP < 16 ? both & 15 : both >> 4) - 8) *
           clb_half(((const uint16_t *)(const void *)group)[lane]);
}

CLB_WALK void clb_embed(const clb_op *op, uint32_t samples, const clb_frame *frame)
{
    const clb_tensor *table = &frame->tensors[op->w0];
    for (size_t n = 0; n < (size_t)samples * op->rows; ++n) {
        const float id = *clb_locate(&op->a, frame, NULL, n / op->rows, n % op->rows);
        float *out = (float *)(uintptr_t)clb_locate(&op->out, frame, NULL, n / op->rows, n % op->rows);
        const int known = id >= 0.0f && id < (float)table->rows;
        const uint32_t row = known ? (uint32_t)id : 0;
        const uint8_t *block = clb_tensor_at(frame, op->w0) + row / CLB_LANES * clb_block_bytes(table->layout, table->cols);
        for (uint32_t i = 0; i < op->dims[0]; ++i) {
            out[i] = known ? stored(table->layout, block, row % CLB_LANES, i) : clb_nan();
        }
    }
}

CLB_WALK void clb_rope(const clb_op *op, uint32_t samples, const clb_frame *frame)
{
    const uint32_t n = op->dims[0], turned = op->dims[1], half = turned / 2;
    const float *table = (const float *)(const void *)clb_tensor_at(frame, op->w0);
    for (uint32_t s = 0; s < samples; ++s) {
        const float *cosine = table + (size_t)(frame->position + s) * turned, *sine = cosine + half;
        for (uint32_t row = 0; row < op->rows; ++row) {
            const float *x = clb_locate(&op->a, frame, NULL, s, row);
            float *y = (float *)(uintptr_t)clb_locate(&op->out, frame, NULL, s, row);
            for (uint32_t i = 0; i < half; ++i) {
                const float a = x[i], b = x[half + i];
                y[i] = a * cosine[i] - b * sine[i];
                y[half + i] = b * cosine[i] + a * sine[i];
            }
            memmove(y + turned, x + turned, (n - turned) * sizeof *y);
        }
    }
}

/* n floats, which may overlap in a hostile file. */
CLB_STATIC_WALK void copy(float *to, const float *from, size_t n)
{
    if (!CLB_SCALAR) {
        memmove(to, from, n * sizeof *to);
        return;
    }
    for (size_t i = 0; i < n; ++i) {
        to[i] = from[i];
    }
}

/* Row r recalls what came in `dims[1] - r · sa[0]` positions before. */
CLB_WALK void clb_delay(const clb_op *op, uint32_t samples, const clb_frame *frame)
{
    const size_t n = op->dims[0], slots = op->dims[2];
    float *kept = (float *)(void *)(frame->arena + op->work.offset);
    for (uint32_t s = 0; s < samples && op->a.space != CLB_SPACE_NONE; ++s) {
        copy(kept + (frame->position + s) % slots * n, clb_locate(&op->a, frame, NULL, s, 0), n);
    }
    for (uint32_t s = 0; s < samples && op->out.space != CLB_SPACE_NONE; ++s) {
        const size_t position = (size_t)frame->position + s;
        for (uint32_t row = 0; row < op->rows; ++row) {
            const size_t steps = op->dims[1] - row * op->sa[0];
            float *out = (float *)(uintptr_t)clb_locate(&op->out, frame, NULL, s, row);
            if (position < steps) {
                memset(out, 0, n * sizeof *out);
            } else {
                copy(out, kept + (position - steps) % slots * n, n);
            }
        }
    }
}
