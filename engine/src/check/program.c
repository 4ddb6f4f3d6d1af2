/* Proves programs, the main one and those of experts: every operation, loops, what a route costs at
 * most. */
#include "proof.h"

enum part { MACS, BYTES }; /* of what an expert costs */

static uint64_t cost_of(const clb_expert *e, enum part what) {
    return what == MACS ? e->macs : e->bytes;
}

/* The k-th costliest is found by halving, for there is no memory to sort them in. */
static uint64_t costliest(const clb_expert *experts, uint32_t count, uint32_t k, enum part what) {
    uint64_t kth = 0;
    uint64_t most = UINT64_MAX;
    while (kth < most) {
        const uint64_t middle = kth + (most - kth) / 2 + 1;
        uint32_t reach = 0;
        for (uint32_t n = 0; n < count; ++n) {
            reach += cost_of(&experts[n], what) >= middle;
        }
        if (reach >= k) {
            kth = middle;
        } else {
            most = middle - 1;
        }
    }
    uint64_t total = clb_times(k, kth);
    for (uint32_t n = 0; n < count; ++n) {
        const uint64_t own = cost_of(&experts[n], what);
        total = clb_plus(total, own > kth ? own - kth : 0);
    }
    return total;
}

static int runs_all_samples(const clb_op *op) { return clb_has(op, CLB_RUNS_ALL_SAMPLES); }

/* The next operation of a program that goes on with `left` more, or a loop of some of these; adds
 * what it costs. */
static int next_fits(clb_scope *s, const clb_op *op, uint32_t left, clb_cost *c) {
    if ((s->looped != 0 && runs_all_samples(op)) || !clb_operation_fits(s, op)) return 0;
    if (op->code == CLB_OP_LOOP) {
        s->steps = op->loop.steps;
        s->looped = op->loop.body;
        return s->looped <= left;
    }
    const clb_cost once = clb_cost_of(s->model, op);
    c->macs = clb_plus(c->macs, clb_times(s->steps, once.macs));
    c->work = clb_plus(c->work, clb_times(s->steps, once.work));
    s->looped -= s->looped != 0;
    s->steps = s->looped != 0 ? s->steps : 1;
    return 1;
}

static int expert_program_fits(clb_scope *s, uint64_t *work) {
    clb_cost c = {0, 0, 0};
    const clb_op *ops = &s->model->ops[s->expert->first_op];
    for (uint32_t left = s->expert->ops; left > 0; ++ops) {
        if (!next_fits(s, ops, --left, &c)) return 0;
    }
    *work = c.work > *work ? c.work : *work;
    return c.macs == s->expert->macs;
}

static int same_program(const clb_expert *a, const clb_expert *b) {
    const int same_ops = a->first_op == b->first_op && a->ops == b->ops;
    return same_ops && a->bytes == b->bytes && a->macs == b->macs;
}

/* The programs of a layer's experts, which lie in the file in the order of the experts (from
 * `*next_op` on), so that proving them takes no longer than reading them. Experts of one shape
 * follow each other and share a program, which is proven once. A pruned expert has none. */
static int experts_fit(clb_scope *s, const clb_layer *l, uint32_t *next_op, uint64_t *work) {
    const clb_expert *last = NULL;
    for (uint32_t n = 0; n < l->experts; ++n) {
        const clb_expert *e = &s->model->experts[l->first_expert + n];
        if (e->ops == 0) continue;
        const int shared = last != NULL && same_program(e, last);
        s->expert = last = e;
        if (!shared && (e->first_op < *next_op || !expert_program_fits(s, work))) return 0;
        *next_op = e->first_op + e->ops;
    }
    return 1;
}

/* An MoE operation, its workspace, and its experts; adds the costliest route. */
static int mixture_fits(const clb_scope *whole, const clb_op *op, uint32_t layer_number,
                        uint32_t *next_op, clb_cost *c) {
    const clb_model *m = whole->model;
    if (op->moe.layer != layer_number || layer_number >= m->header->layers) return 0;
    if (whole->looped != 0 || !clb_operation_fits(whole, op)) return 0;
    const clb_layer *l = &m->layers[layer_number];
    const uint64_t floats = clb_workspace_floats(op, l, whole->samples);
    clb_scope inside = *whole;
    inside.samples = l->tile;
    inside.arena = op->work.offset + floats * sizeof(float);
    inside.arena_end = inside.arena + op->moe.scratch * sizeof(float);
    uint64_t most = 0;
    if (!experts_fit(&inside, l, next_op, &most)) return 0;
    const uint64_t routed = clb_plus((uint64_t)l->experts + l->d_out, most);
    const clb_expert *experts = m->experts + l->first_expert;
    const uint64_t choices = (uint64_t)op->rows * l->k;
    const uint32_t touched = choices < l->experts ? (uint32_t)choices : l->experts;
    c->macs = clb_plus(c->macs, clb_times(op->rows, costliest(experts, l->experts, l->k, MACS)));
    c->bytes = clb_plus(c->bytes, costliest(experts, l->experts, touched, BYTES));
    c->work = clb_plus(c->work, clb_plus(l->experts, clb_times(choices, routed)));
    return 1;
}

/* The main program, every MoE layer once and in order; counts the choices one sample makes. The
 * stated costs are true, so that a caller may rely on them: the multiply-accumulates exactly, the
 * work as a limit. */
int clb_program_fits(const clb_model *m, uint64_t *choices) {
    const clb_header *h = m->header;
    clb_scope whole = {.model = m,
                       .samples = h->max_batch,
                       .steps = 1,
                       .arena = CLB_HEAD_BYTES,
                       .arena_end = h->cleared_bytes};
    uint32_t layer = 0;
    uint32_t next_op = h->main_ops;
    clb_cost c = {0, 0, 0};
    *choices = 0;
    for (uint32_t n = 0; n < h->main_ops; ++n) {
        const clb_op *op = &m->ops[n];
        whole.decodes = n >= h->encoder_ops && h->encoder_ops != 0;
        whole.early = n < h->encoder_ops || (n < h->tail_op && h->tail_op < h->main_ops);
        if (n >= h->tail_op && runs_all_samples(op)) return 0;
        /* A loop runs as a whole. */
        if (whole.looped != 0 && (n == h->tail_op || n == h->encoder_ops)) return 0;
        if (op->code == CLB_OP_MOE) {
            if (!mixture_fits(&whole, op, layer, &next_op, &c)) return 0;
            *choices += (uint64_t)op->rows * m->layers[layer++].k;
        } else {
            if (!next_fits(&whole, op, h->main_ops - n - 1, &c)) return 0;
        }
    }
    /* Of a table a row reads a part, which the exporter may leave out. */
    if (h->worst_bytes < c.bytes || h->worst_bytes - c.bytes > h->shared_bytes) return 0;
    if (c.macs != h->worst_macs || c.work > h->worst_work || c.work == UINT64_MAX) return 0;
    if (h->encoder_ops != 0 && h->context_tokens == 0) return 0;
    return layer == h->layers && h->tail_op <= h->main_ops && h->encoder_ops <= h->tail_op;
}
