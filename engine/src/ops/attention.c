/* Attention: queries against the keys of a cache, and the sum of its values that their scores
 * weigh. */
#include "cache.h"
#include "../core/parallel.h"

/* A tile of queries of one key head, a row each: token after token, of each the heads that share
 * the key head. */
typedef struct {
    const clb_op *op;
    const clb_frame *frame;
    cache c;
    const float *sinks; /* NULL: none */
    const float *bias;  /* NULL: none; of each head `span`, the own position's in the `middle` */
    uint32_t samples, group, tiles, span, middle; /* tiles: of a key head */
} attention;

typedef struct {
    const float *q, *bias; /* bias: of position 0 */
    float *out, best, sum; /* the largest score so far; the sum of exp(score - best) */
    uint32_t last;         /* the last position it sees */
} query;

/* Scores of a row as the weights of their values. */
CLB_STATIC_WALK void weigh(const attention *t, query *row, float *w, uint32_t start,
                           uint32_t count) {
    const float factor = t->op->attention.scale;
    const float cap = t->op->attention.softcap;
    const uint32_t begin = clb_first_seen(t->op, row->last);
    float most[CLB_LANES];
    float best = row->best;
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

CLB_STATIC_WALK void panels(const clb_kernels *kernels, const clb_matrix *m, clb_tile *tile) {
    clb_pad_tile(tile);
    const uint32_t blocks = clb_ceil(m->outputs, CLB_LANES);
    for (uint32_t at = 0; at < blocks; at += CLB_PANEL) {
        CLB_PANEL_OF(kernels)(m, tile, at, clb_min(blocks - at, CLB_PANEL));
    }
}

/* Some rows of a tile look at the first `count` positions of a page. */
CLB_STATIC_WALK void look(const attention *t, query *rows, uint32_t n, uint32_t page, uint8_t *keys,
                          uint32_t count) {
    const cache *c = &t->c;
    const clb_kernels *kernels = CLB_KERNELS(t->frame->ctx);
    const int scaled = c->layout == CLB_LAYOUT_ROWS8_I8;
    float weights[CLB_TILE][CLB_PAGE];
    clb_tile tile = {.rows = n, .kernels = kernels};
    for (uint32_t i = 0; i < n; ++i) {
        tile.a[i] = rows[i].q;
        tile.out[i] = weights[i];
    }
    clb_matrix m = {.blocks = keys,
                    .stride = c->key_stride,
                    .layout = c->layout,
                    .cols = c->key,
                    .outputs = count,
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
    m = (clb_matrix){.blocks = keys + c->values,
                     .stride = c->value_stride,
                     .layout = c->layout,
                     .cols = count,
                     .outputs = c->value,
                     .adds = 1};
    panels(kernels, &m, &tile);
}

/* One past the last position that a token sees, where the first of the batch is `here`. */
CLB_STATIC_WALK uint32_t end_of(const attention *t, uint32_t here, uint32_t sample) {
    const uint32_t mask = t->op->attention.mask;
    if (mask == CLB_MASK_CROSS) return t->frame->ctx->source;
    return here + (mask == CLB_MASK_FULL ? t->samples : sample + 1);
}

/* Row `number` of a key head's, which has seen nothing yet. */
CLB_STATIC_WALK query query_of(const attention *t, uint32_t head, uint32_t number) {
    const uint32_t here = t->frame->position;
    const uint32_t sample = number / t->group;
    const uint32_t own = head * t->group + number % t->group;
    query row = {.best = -clb_inf(), .last = end_of(t, here, sample) - 1};
    row.q = clb_locate(&t->op->a, t->frame, NULL, sample, own);
    row.out = clb_out_row(t->op, t->frame, sample, own);
    if (t->bias != NULL) {
        row.bias = t->bias + (size_t)own * t->span + (t->middle - here - sample);
    }
    if (t->sinks != NULL) {
        row.best = t->sinks[own];
        row.sum = 1.0f;
    }
    memset(row.out, 0, t->c.value * sizeof(float));
    return row;
}

/* Rows from the first on that look at a page together: those that end in the same place of it, or
 * see all of it. */
CLB_STATIC_WALK uint32_t together(const attention *t, const query *rows, uint32_t n,
                                  uint32_t next) {
    const uint32_t last = rows[0].last;
    uint32_t count = 1;
    for (; count < n; ++count) {
        const uint32_t its = rows[count].last;
        const int whole = next <= last && clb_first_seen(t->op, its) < next;
        if (its != last && !whole) break;
    }
    return count;
}

/* Task `index`: one tile. */
CLB_STATIC_WALK void attend(void *arg, uint32_t index) {
    const attention *t = arg;
    const uint32_t head = index / t->tiles;
    const uint32_t from = index % t->tiles * CLB_TILE;
    const uint32_t n = clb_min(t->samples * t->group - from, CLB_TILE);
    query rows[CLB_TILE];
    for (uint32_t i = 0; i < n; ++i) {
        rows[i] = query_of(t, head, from + i);
    }
    uint32_t page = clb_first_seen(t->op, t->frame->position + from / t->group) / CLB_PAGE;
    for (; page <= rows[n - 1].last / CLB_PAGE; ++page) {
        const uint32_t next = (page + 1) * CLB_PAGE;
        for (uint32_t i = 0, count; i < n; i += count) {
            const uint32_t last = rows[i].last;
            count = together(t, rows + i, n - i, next);
            if (page * CLB_PAGE <= last && clb_first_seen(t->op, last) < next) {
                const uint32_t seen = clb_min(last + 1, next) - page * CLB_PAGE;
                look(t, rows + i, count, page, keys_at(&t->c, head, page), seen);
            }
        }
    }
    for (uint32_t i = 0; i < n; ++i) {
        for (uint32_t j = 0; j < t->c.value; ++j) {
            rows[i].out[j] /= rows[i].sum;
        }
    }
}

CLB_WALK void clb_attention(const clb_op *op, uint32_t samples, const clb_frame *frame) {
    enum { SPREAD_MACS = 1 << 15 }; /* below, handing work to threads costs more than it saves */
    const uint32_t group = op->rows / op->attention.key_heads;
    const uint32_t span =
        op->attention.biases == CLB_NONE ? 0 : frame->tensors[op->attention.biases].cols / op->rows;
    attention t = {.op = op,
                   .frame = frame,
                   .c = cache_of(op, frame),
                   .samples = samples,
                   .group = group,
                   .sinks = clb_tensor_at(frame, op->attention.sinks),
                   .bias = clb_tensor_at(frame, op->attention.biases),
                   .span = span,
                   .middle = op->attention.mask == CLB_MASK_FULL ? span / 2 : span - 1,
                   .tiles = clb_ceil(samples * group, CLB_TILE)};
    const uint64_t macs =
        (uint64_t)samples * op->rows * (frame->position + samples) * (t.c.key + t.c.value);
    CLB_SPREAD(frame->ctx, frame->ctx->parallel != NULL && macs >= SPREAD_MACS, attend, &t,
               t.c.heads * t.tiles);
}

#ifndef COLIBRI_GENERATED
#include "../check/proof.h"

static int attention_fits(const clb_subject *s) {
    const clb_op *op = s->op;
    if (op->rows % op->attention.key_heads != 0 || !clb_is_vector(s->w0, op->rows)) return 0;
    return s->samples * op->rows <= CLB_LIMIT && clb_cache_fits(s);
}

static void attention_uses(const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    clb_plain(uses, s->op->attention.key, 0, s->op->attention.value);
}

/* Key and value elements that the last token of a text that fills the context looks at, for all
 * heads. */
static uint64_t attention_macs(const clb_subject *s) {
    const uint32_t tokens = s->model->header->context_tokens;
    const uint64_t seen = tokens - clb_first_seen(s->op, tokens - 1);
    return clb_times(clb_cache_work(s), seen);
}

static uint64_t attention_work(const clb_subject *s) {
    return clb_plus(clb_cache_work(s), attention_macs(s));
}

const clb_proof clb_attention_proof = {.fits = attention_fits,
                                       .uses = attention_uses,
                                       .macs = attention_macs,
                                       .work = attention_work,
                                       .kept = clb_cache_kept};

#endif
