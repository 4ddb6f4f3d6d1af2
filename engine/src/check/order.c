/* Proves in which order a valid program reads and writes: what an operation reads lies within what
 * earlier operations wrote for the same sample in the same run, no operation overwrites what it
 * still reads, and what is read as a quantised row was quantised. So a row's outputs depend on that
 * row alone, and not on how the work is spread.
 *
 * Every float that is read is accounted for, the last first: going back from the operation that
 * reads it, some other writes it, among the floats from its first to its last. Gaps between these
 * are not looked at: they hold zeros at first, and later what the same context left there. */
#include "proof.h"

/* At operations and places, in a whole model: bounds the time of a proof, and no sound model comes
 * near. */
enum { LOOKS = 1 << 26 };

typedef struct {
    uint64_t begin, end; /* floats, from the start of the space; of one sample unless it says all */
} stretch;

/* The floats of an operand, from `begin` on: Σ index · stride. An axis goes beyond all that the
 * axes before it reach. */
typedef struct {
    uint64_t size, stride;
} axis;

typedef struct {
    uint64_t begin;
    uint32_t count;
    axis axes[CLB_AXES + 2];
} places;

/* What an operation reads and is not yet known to be written. */
typedef struct {
    clb_use use;
    stretch once; /* in one step, the first by number */
    places all;   /* in all steps */
    /* its end is one past the last place unaccounted for; what is before it waits for the next
     * pass */
    stretch left;
} missing;

/* A run of operations: the main program's before or after the source text is read, or an
 * expert's. */
typedef struct {
    const clb_model *model;
    const clb_op *ops;
    const clb_layer *layer; /* of an expert */
    uint64_t samples;
    uint32_t first, count, looks;
    uint32_t loop; /* the last loop begun before the operation that is looked at; CLB_NONE: none */
    missing missing; /* of that operation; here once, for a small stack */
} flow;

static int looks_too_often(flow *f) { return ++f->looks > LOOKS; }

/* Of operation `n`, where that is the last loop before it. */
static uint32_t steps_of(const flow *f, uint32_t loop, uint32_t n) {
    return loop != CLB_NONE && n - loop <= f->ops[loop].loop.body ? f->ops[loop].loop.steps : 1;
}

/* A sample's rows, in `steps` steps. */
static stretch stretch_of(const clb_use *u, uint32_t steps) {
    const clb_operand *v = u->at;
    const uint64_t begin = v->offset / sizeof(float);
    const uint64_t last_step = begin + (steps - 1ull) * v->step_stride;
    const uint64_t last_row = last_step + (u->rows - 1ull) * v->row_stride;
    return (stretch){begin, last_row + u->floats - u->spare};
}

static int meet(stretch a, stretch b) { return a.begin < b.end && b.begin < a.end; }

static uint64_t common_divisor(uint64_t a, uint64_t b) {
    while (b != 0) {
        const uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* What the first `count` axes reach. */
static uint64_t reach_of(const places *p, uint32_t count) {
    uint64_t reach = 0;
    for (uint32_t n = 0; n < count; ++n) {
        reach += (p->axes[n].size - 1) * p->axes[n].stride;
    }
    return reach;
}

/* One more axis, in the order of their strides. */
static void insert(places *p, uint64_t size, uint64_t stride) {
    if (size == 1 || stride == 0) return;
    axis *at = &p->axes[p->count];
    for (; at > p->axes && at[-1].stride > stride; --at) {
        *at = at[-1];
    }
    *at = (axis){size, stride};
    ++p->count;
}

/* Axis `n` does not go beyond those before it, or it continues the last of them. */
static int is_entangled(const places *p, uint32_t n) {
    const axis *inner = &p->axes[n - 1];
    const uint64_t stride = p->axes[n].stride;
    return stride <= reach_of(p, n) || stride == inner->size * inner->stride;
}

/* Let an axis go beyond those before it. One that does not, as of windows that overlap, becomes one
 * with the axis before it: all multiples of what both are multiples of, which stay inside the value
 * that is looked at. */
static void disentangle(places *p) {
    uint32_t kept = 0;
    for (uint32_t n = 0; n < p->count; ++n) {
        p->axes[kept] = p->axes[n];
        for (; kept > 0 && is_entangled(p, kept); --kept) {
            axis *both = &p->axes[kept - 1];
            const uint64_t span = reach_of(p, kept + 1) - reach_of(p, kept - 1);
            both->stride = common_divisor(both->stride, p->axes[kept].stride);
            both->size = span / both->stride + 1;
        }
        ++kept;
    }
    p->count = kept;
}

static places places_of(const clb_use *u, uint32_t steps) {
    places p = {.begin = u->at->offset / sizeof(float)};
    insert(&p, u->axes == 0 ? u->floats - u->spare : 1, 1);
    for (uint32_t n = 0; n < CLB_AXES; ++n) {
        if ((u->axes >> n & 1u) != 0) {
            insert(&p, u->dims[n], u->strides[n]);
        }
    }
    insert(&p, u->rows, u->at->row_stride);
    insert(&p, steps, u->at->step_stride);
    disentangle(&p);
    return p;
}

/* One past the last place before `end`; `begin` where there is none. */
static uint64_t before(const places *p, uint64_t end) {
    if (end <= p->begin) return p->begin;
    uint64_t rest = end - p->begin - 1;
    uint64_t last = p->begin;
    for (uint32_t n = p->count; n-- > 0;) {
        const axis *a = &p->axes[n];
        const uint64_t steps = rest / a->stride;
        const uint64_t index = steps < a->size ? steps : a->size - 1;
        last += index * a->stride;
        rest -= index * a->stride;
    }
    return last + 1;
}

/* Whether two operands have a place in common. */
static int share(flow *f, const places *a, const places *b) {
    uint64_t end = UINT64_MAX;
    for (;;) {
        const uint64_t of_a = before(a, end);
        const uint64_t of_b = before(b, end);
        if (of_a == a->begin || of_b == b->begin) return 0;
        if (of_a == of_b || looks_too_often(f)) return 1;
        end = of_a < of_b ? of_a : of_b;
    }
}

/* Of all samples. In a caller's array, or a token, a sample never meets another. */
static stretch of_all(const flow *f, const clb_operand *v, stretch own) {
    own.end += v->space == CLB_SPACE_ARENA ? (f->samples - 1) * v->sample_stride : 0;
    return own;
}

/* Memory for an operation's own use, for all samples. */
static stretch work_of(const flow *f, const clb_op *op) {
    const uint64_t begin = op->work.offset / sizeof(float);
    return (stretch){begin, begin + clb_work_floats(f->model, op, f->samples)};
}

/* Whether the samples of two operands have the same places, so that one of the one never meets
 * another of the other. */
static int same_places(const flow *f, const clb_operand *a, stretch in_a, const clb_operand *b,
                       stretch in_b) {
    if (a->space != CLB_SPACE_ARENA || f->samples == 1) return 1;
    const uint64_t stride = a->sample_stride;
    const uint64_t begin = in_a.begin < in_b.begin ? in_a.begin : in_b.begin;
    const uint64_t end = in_a.end > in_b.end ? in_a.end : in_b.end;
    return stride == b->sample_stride && end - begin <= stride;
}

/* Whether quantised rows are read as they were written. */
static int same_rows(const clb_use *out, const clb_use *in) {
    const clb_operand *to = out->at;
    const clb_operand *from = in->at;
    if (out->cols != in->cols || out->rows != in->rows) return 0;
    if (to->offset != from->offset || to->sample_stride != from->sample_stride) return 0;
    if (to->step_stride != from->step_stride) return 0;
    return out->rows == 1 || to->row_stride == from->row_stride;
}

/* What an operation in the reader's own loop has written when it is read: `before` the reader in a
 * step, or behind it, so that the step before is the last. */
static stretch written_in_loop(const clb_op *loop, const clb_use *out, stretch once, stretch all,
                               int before, const missing *m) {
    const stretch nothing = {0, 0};
    const int backward = loop->loop.backward != 0;
    const uint64_t step = out->at->step_stride;
    const uint64_t shift = before ? 0 : step;
    if (step == 0 || step != m->use.at->step_stride) {
        if (!before) return nothing;
        const uint64_t first = backward ? (loop->loop.steps - 1) * step : 0;
        return (stretch){once.begin + first, once.end + first};
    }
    if (backward) { /* the last step comes first: what is written last lies at the beginning */
        if (m->once.end <= once.begin + shift) return nothing;
        all.begin += shift;
    } else {
        if (m->once.begin + shift >= once.end) return nothing;
        all.end -= shift;
    }
    return all;
}

enum when { EARLIER, SAME_LOOP, STEP_BEFORE };

/* Take away what operation `n` wrote before the reader read it. Where it did not write the last
 * place, the others that it may have written wait for another pass, for what came before it does
 * not count there. 0: the reader may not read it. */
static int look_at(flow *f, uint32_t n, uint32_t loop, enum when when, missing *m) {
    const clb_op *op = &f->ops[n];
    stretch *left = &m->left;
    if (looks_too_often(f)) return 0;
    clb_use uses[CLB_OPERANDS];
    clb_uses(f->model, op, uses);
    const clb_use *out = &uses[CLB_OUT];
    const clb_operand *reader = m->use.at;
    const stretch wide = of_all(f, reader, m->left);
    const int arena = reader->space == CLB_SPACE_ARENA && !clb_has(op, CLB_READS_KEPT);
    if (arena && meet(wide, work_of(f, op))) return 0;
    if (out->floats == 0 || out->at->space != reader->space) return 1;
    const stretch once = stretch_of(out, 1);
    const stretch all = stretch_of(out, steps_of(f, loop, n));
    if (!meet(wide, of_all(f, out->at, all))) return 1;
    if (!same_places(f, reader, *left, out->at, all)) return 0;
    if (m->use.cols != 0 && !same_rows(out, &m->use)) return 0;
    stretch written = all;
    if (when != EARLIER) {
        written = written_in_loop(&f->ops[loop], out, once, all, when == SAME_LOOP, m);
    }
    if (!meet(*left, written)) return 1;
    if (written.end < left->end) {
        left->begin = written.end;
    } else {
        left->end = before(&m->all, written.begin > left->begin ? written.begin : left->begin);
    }
    return 1;
}

/* The last loop that begins before operation `n`. */
static uint32_t loop_before(flow *f, uint32_t n) {
    while (n-- > f->first) {
        ++f->looks;
        if (f->ops[n].code == CLB_OP_LOOP) return n;
    }
    return CLB_NONE;
}

/* Look back from operation `n` to the first, or until nothing is left that may be looked for in
 * this pass. */
static int look_back(flow *f, uint32_t n, missing *m) {
    uint32_t loop = f->loop;
    int inside = steps_of(f, loop, n) > 1;
    for (uint32_t earlier = n; m->left.begin < m->left.end && earlier-- > f->first;) {
        if (earlier != loop) {
            if (!look_at(f, earlier, loop, inside ? SAME_LOOP : EARLIER, m)) return 0;
            continue;
        }
        for (uint32_t after = loop + f->ops[loop].loop.body; inside && after >= n; --after) {
            if (!look_at(f, after, loop, STEP_BEFORE, m)) return 0;
        }
        inside = 0;
        loop = loop_before(f, earlier);
    }
    return 1;
}

/* All that operation `n` reads has been written when it runs. Every pass finds who wrote the last
 * place, or nobody did. */
static int written_before(flow *f, uint32_t n, missing *m) {
    uint64_t end = UINT64_MAX;
    m->left.end = before(&m->all, end);
    while (m->left.end > m->all.begin) {
        if (m->left.end == end) return 0;
        end = m->left.end;
        m->left.begin = m->all.begin;
        if (!look_back(f, n, m)) return 0;
    }
    return 1;
}

static int reads_what_is_written(flow *f, uint32_t n, const clb_use *u) {
    const clb_operand *v = u->at;
    missing *m = &f->missing;
    if (clb_is_written(v)) {
        m->use = *u;
        m->once = stretch_of(u, 1);
        m->all = places_of(u, steps_of(f, f->loop, n));
        return written_before(f, n, m);
    }
    if (u->cols == 0) return 1;
    /* the layer has proven what its tokens are */
    if (v->space != CLB_SPACE_TOKEN_IN || u->cols != f->layer->quantized) return 0;
    return u->rows == 1 && v->offset == 0 && v->step_stride == 0;
}

/* What runs element by element, or reads a whole row first, may write where it reads, if both have
 * the same places; those of samples are known to be. */
static int in_place(const clb_op *op, const clb_use *u, const clb_use *out) {
    const clb_operand *v = u->at;
    const clb_operand *to = out->at;
    const int map = clb_has(op, CLB_HAS_AXES);
    if (!clb_has(op, CLB_IN_PLACE) || v->offset != to->offset) return 0;
    if (v->step_stride != to->step_stride) return 0;
    if (op->rows > 1 && v->row_stride != to->row_stride) return 0;
    /* a passes through its function first */
    if (v == &op->b && op->before != CLB_UNARY_IDENTITY) return 0;
    for (int n = 0; map && n < CLB_AXES; ++n) {
        if (op->map.sizes[n] > 1 && u->strides[n] != out->strides[n]) return 0;
    }
    return 1;
}

/* Whether an operation writes, in any step, what it has still to read. */
static int overwrites(flow *f, const clb_op *op, const clb_use *u, const clb_use *out,
                      uint32_t steps) {
    const clb_operand *a = u->at;
    const clb_operand *b = out->at;
    if (u->floats == 0 || out->floats == 0 || a->space != b->space) return 0;
    const uint32_t at_once = a->step_stride == b->step_stride ? 1 : steps;
    const stretch in = stretch_of(u, at_once);
    const stretch to = stretch_of(out, at_once);
    if (!meet(of_all(f, a, in), of_all(f, b, to))) return 0;
    if (!same_places(f, a, in, b, to)) return 1;
    if (!meet(in, to) || in_place(op, u, out)) return 0;
    const places from = places_of(u, at_once);
    const places written = places_of(out, at_once);
    return share(f, &from, &written);
}

/* An operation does not overwrite what it still reads, or its own workspace. By itself: its stack
 * is no one else's. */
static NOINLINE int overwrites_nothing(flow *f, const clb_op *op, const clb_use uses[CLB_OPERANDS],
                                       uint32_t steps) {
    const clb_use *out = &uses[CLB_OUT];
    const stretch work = work_of(f, op);
    for (const clb_use *u = uses; u <= out; ++u) {
        const stretch all = of_all(f, u->at, stretch_of(u, steps));
        if (u->at->space == CLB_SPACE_ARENA && meet(all, work)) return 0;
    }
    if (clb_has(op, CLB_STORES_FIRST)) return 1;
    return !overwrites(f, op, &uses[CLB_A], out, steps) &&
           !overwrites(f, op, &uses[CLB_B], out, steps);
}

static int in_order(flow *f, uint32_t n) {
    const clb_op *op = &f->ops[n];
    clb_use uses[CLB_OPERANDS];
    clb_uses(f->model, op, uses);
    if (!reads_what_is_written(f, n, &uses[CLB_A])) return 0;
    if (!reads_what_is_written(f, n, &uses[CLB_B])) return 0;
    return overwrites_nothing(f, op, uses, steps_of(f, f->loop, n));
}

/* A run of operations, after which `floats` floats of every sample of `space` are written. */
static int run_in_order(flow *f, uint32_t space, uint64_t floats) {
    const clb_operand whole = {.space = space};
    f->loop = CLB_NONE;
    for (uint32_t n = f->first; n < f->count; ++n) {
        const int loop = f->ops[n].code == CLB_OP_LOOP;
        f->loop = loop ? n : f->loop;
        if (!loop && !in_order(f, n)) return 0;
    }
    missing *m = &f->missing;
    m->use = (clb_use){.at = &whole, .floats = floats, .rows = 1};
    m->all = places_of(&m->use, 1);
    return floats == 0 || written_before(f, f->count, m);
}

int clb_in_order(const clb_model *m) {
    const clb_header *h = m->header;
    flow f = {.model = m, .ops = m->ops, .samples = h->max_batch, .count = h->encoder_ops};
    if (!run_in_order(&f, CLB_SPACE_OUTPUT, 0) || !clb_caches_are_filled(m)) return 0;
    f.first = h->encoder_ops;
    f.count = h->main_ops;
    if (!run_in_order(&f, CLB_SPACE_OUTPUT, h->output_floats)) return 0;
    const clb_expert *last = NULL;
    for (uint32_t n = 0; n < h->experts; ++n) {
        const clb_expert *e = &m->experts[n];
        const int same_ops = last != NULL && last->first_op == e->first_op;
        if (e->ops == 0 || (same_ops && last->layer == e->layer)) continue;
        f.layer = &m->layers[e->layer];
        f.ops = m->ops + e->first_op;
        f.first = 0;
        f.count = e->ops;
        f.samples = f.layer->tile;
        if (!run_in_order(&f, CLB_SPACE_TOKEN_OUT, f.layer->d_out)) return 0;
        last = e;
    }
    return 1;
}
