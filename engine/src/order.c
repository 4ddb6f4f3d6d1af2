/* Proves in which order a valid program reads and writes: what an operation reads lies within what earlier operations wrote
 * for the same sample in the same run, no operation overwrites what it still reads, and what is read as a quantised row was
 * quantised. So a row's outputs depend on that row alone, and not on how the work is spread.
 *
 * An operand is looked at as the stretch from its first float to its last. Going back from an operation that reads, the
 * stretches of those that write are taken away until nothing is left. Gaps inside a stretch are not looked at: they hold
 * zeros at first, and later what the same context left there. */
#include "internal.h"

enum {
    PIECES = 4,      /* of a stretch that may be unaccounted for at once */
    LOOKS = 1 << 26, /* at operations, in a whole model: bounds the time of a proof, and no sound model comes near */
    A = 0, B, OUT, OPERANDS
};

typedef struct {
    uint64_t begin, end; /* floats, from the start of the space; of one sample unless it says all */
} stretch;

/* What an operation reads and is not yet known to be written. */
typedef struct {
    const clb_operand *at;
    const clb_op *record; /* the operation, where it reads quantised rows */
    uint32_t cols;        /* of these */
    stretch once;         /* in one step, the first by number */
    uint32_t count;
    stretch piece[PIECES];
} missing;

/* A run of operations: the main program's before or after the source text is read, or an expert's. */
typedef struct {
    const clb_model *model;
    const clb_op *ops;
    const clb_layer *layer; /* of an expert */
    uint64_t samples;
    uint32_t first, count, looks;
    uint32_t loop; /* the last loop begun before the operation that is looked at; CLB_NONE: none */
    missing missing; /* of that operation; here once, for a small stack */
} flow;

/* What an operation reads or writes. */
typedef struct {
    const clb_operand *at;
    uint64_t floats; /* a row reaches */
} use;

/* Of a computed matrix the floats up to the last that counts: the rest of its last block is never used. */
static uint64_t matrix_floats(const clb_op *op)
{
    const uint64_t blocks = ((uint64_t)op->dims[1] + CLB_LANES - 1) / CLB_LANES;
    return blocks * op->dims[0] * CLB_LANES - (blocks * CLB_LANES - op->dims[1]);
}

static void uses_of(const clb_model *m, const clb_op *op, use uses[OPERANDS])
{
    const uint32_t *d = op->dims;
    const clb_layer *layer = op->code == CLB_OP_MOE ? &m->layers[op->w0] : NULL;
    uint64_t a = d[0];
    uint64_t b = d[1];
    uint64_t out = d[0];
    switch (op->code) {
    case CLB_OP_LINEAR:
    case CLB_OP_LINEAR_Q:
        a = op->code == CLB_OP_LINEAR_Q ? clb_record_floats(d[0]) : d[0];
        b = matrix_floats(op);
        out = d[1];
        break;
    case CLB_OP_QUANTIZE: out = clb_record_floats(d[0]); break;
    case CLB_OP_MAP1:
    case CLB_OP_MAP2:
        a = clb_reach(d, op->sa, 4);
        b = clb_reach(d, op->sb, 4);
        out = clb_reach(d, op->so, 4);
        break;
    case CLB_OP_REDUCE:
        a = clb_reach(d, op->sa, 3);
        out = (uint64_t)(d[0] - 1) * op->so[0] + (uint64_t)(d[2] - 1) * op->so[2] + 1;
        break;
    case CLB_OP_MOE:
        a = layer->d_in;
        b = layer->experts;
        out = layer->d_out;
        break;
    case CLB_OP_EMBED: a = 1; break;
    case CLB_OP_ATTENTION: out = d[1]; break;
    default: break;
    }
    uses[A] = (use){&op->a, a};
    uses[B] = (use){&op->b, b};
    uses[OUT] = (use){&op->out, out};
}

/* A sample's rows, in `steps` steps. */
static stretch stretch_of(const clb_op *op, const use *u, uint32_t steps)
{
    const uint64_t begin = u->at->offset / sizeof(float);
    const uint64_t stepped = (uint64_t)(steps - 1) * u->at->step_stride;
    return (stretch){begin, begin + stepped + (uint64_t)(op->rows - 1) * u->at->row_stride + u->floats};
}

static int meet(stretch a, stretch b) { return a.begin < b.end && b.begin < a.end; }

/* Of all samples. In a caller's array, or a token, a sample never meets another. */
static stretch of_all(const flow *f, const clb_operand *v, stretch own)
{
    const uint64_t more = v->space == CLB_SPACE_ARENA ? (f->samples - 1) * v->sample_stride : 0;
    return (stretch){own.begin, own.end + more};
}

/* Memory for an operation's own use, for all samples: of an MoE layer with its experts' scratch. */
static stretch work_of(const flow *f, const clb_op *op)
{
    const uint64_t begin = op->work.offset / sizeof(float);
    uint64_t floats = 0;
    if (op->code == CLB_OP_CACHE || op->code == CLB_OP_ATTENTION) {
        floats = clb_cache_floats(op);
    } else if (op->code == CLB_OP_DELAY) {
        floats = (uint64_t)op->dims[2] * op->dims[0];
    } else if (op->code == CLB_OP_MOE) {
        const clb_layer *layer = &f->model->layers[op->w0];
        floats = clb_workspace_floats(op, layer, f->samples) + op->dims[2];
    }
    return (stretch){begin, begin + floats};
}

/* Whether the samples of two operands have the same places, so that one of the one never meets another of the other. */
static int same_places(const flow *f, const clb_operand *a, stretch in_a, const clb_operand *b, stretch in_b)
{
    RETURN_IF(a->space != CLB_SPACE_ARENA || f->samples == 1, 1);
    const uint64_t begin = in_a.begin < in_b.begin ? in_a.begin : in_b.begin;
    const uint64_t end = in_a.end > in_b.end ? in_a.end : in_b.end;
    return a->sample_stride == b->sample_stride && end - begin <= a->sample_stride;
}

/* 0: there are too many pieces. */
static int take_away(missing *m, stretch written)
{
    for (uint32_t i = 0; i < m->count;) {
        stretch *p = &m->piece[i];
        const stretch before = {p->begin, written.begin};
        const stretch after = {written.end, p->end};
        if (!meet(*p, written)) {
            ++i;
            continue;
        }
        *p = before;
        if (after.begin < after.end) {
            RETURN_IF(m->count == PIECES, 0);
            m->piece[m->count++] = after;
        }
        if (before.begin < before.end) {
            ++i;
        } else {
            *p = m->piece[--m->count];
        }
    }
    return 1;
}

/* Whether quantised rows are read as they were written. */
static int same_rows(const clb_op *op, const missing *m)
{
    return op->code == CLB_OP_QUANTIZE && op->dims[0] == m->cols && op->rows == m->record->rows &&
           op->out.offset == m->at->offset && op->out.sample_stride == m->at->sample_stride &&
           (op->rows == 1 || op->out.row_stride == m->at->row_stride) && op->out.step_stride == m->at->step_stride;
}

/* Whether two operands that go on by `step` floats ever meet, in whatever steps. */
static int meet_in_some_step(stretch a, stretch b, uint64_t step)
{
    const uint64_t wide = a.end - a.begin;
    const uint64_t after = (b.begin % step + step - a.begin % step) % step;
    return wide > step || after < wide || after + (b.end - b.begin) > step;
}

/* What an operation in the reader's own loop has written when it is read: `before` the reader in a step, or behind it, so
 * that the step before is the last. */
static stretch written_in_loop(const clb_op *loop, const use *out, stretch once, stretch all, int before, const missing *m)
{
    const stretch nothing = {0, 0};
    const uint64_t step = out->at->step_stride;
    const uint64_t span = (loop->dims[0] - 1) * step;
    const uint64_t shift = before ? 0 : step;
    RETURN_IF(step != m->at->step_stride && !before, nothing);
    RETURN_IF(step != m->at->step_stride && loop->dims[2] != 0, ((stretch){once.begin + span, once.end + span}));
    RETURN_IF(step != m->at->step_stride, once);
    RETURN_IF(step == 0, before ? once : nothing);
    RETURN_IF(!meet_in_some_step(once, m->once, step), all); /* it lies between what is read */
    if (loop->dims[2] != 0) { /* the last step comes first, so what is written last lies at the beginning */
        RETURN_IF(m->once.end <= once.begin + shift, nothing);
        return (stretch){all.begin + shift, all.end};
    }
    RETURN_IF(m->once.begin + shift >= once.end, nothing);
    return (stretch){all.begin, all.end - shift};
}

enum when { EARLIER, SAME_LOOP, STEP_BEFORE };

/* Take away what operation `n` wrote before the reader read it. 0: the reader may not read it. */
static int look_at(flow *f, uint32_t n, uint32_t loop, enum when when, missing *m)
{
    const clb_op *op = &f->ops[n];
    RETURN_IF(++f->looks > LOOKS, 0);
    use uses[OPERANDS];
    uses_of(f->model, op, uses);
    const use *out = &uses[OUT];
    const int looped = loop != CLB_NONE && n - loop <= f->ops[loop].dims[1];
    const stretch once = stretch_of(op, out, 1);
    const stretch all = stretch_of(op, out, looped ? f->ops[loop].dims[0] : 1);
    const int arena = m->at->space == CLB_SPACE_ARENA && op->code != CLB_OP_ATTENTION;
    const int shared = out->at->space == m->at->space;
    int met = 0;
    for (uint32_t i = 0; i < m->count; ++i) {
        const stretch wide = of_all(f, m->at, m->piece[i]);
        const int here = shared && meet(wide, of_all(f, out->at, all));
        RETURN_IF(arena && meet(wide, work_of(f, op)), 0);
        RETURN_IF(here && !same_places(f, m->at, m->piece[i], out->at, all), 0);
        met |= here;
    }
    RETURN_IF(!met, 1);
    RETURN_IF(m->record != NULL && !same_rows(op, m), 0);
    return take_away(m, when == EARLIER ? all
                                        : written_in_loop(&f->ops[loop], out, once, all, when == SAME_LOOP, m));
}

/* The last loop that begins before operation `n`. */
static uint32_t loop_before(flow *f, uint32_t n)
{
    while (n-- > f->first) {
        ++f->looks;
        RETURN_IF(f->ops[n].code == CLB_OP_LOOP, n);
    }
    return CLB_NONE;
}

/* All that operation `n` reads has been written when it runs. */
static int written_before(flow *f, uint32_t n, missing *m)
{
    uint32_t loop = f->loop;
    int inside = loop != CLB_NONE && n - loop <= f->ops[loop].dims[1];
    for (uint32_t before = n; m->count > 0 && before-- > f->first;) {
        if (before != loop) {
            RETURN_IF(!look_at(f, before, loop, inside ? SAME_LOOP : EARLIER, m), 0);
            continue;
        }
        for (uint32_t after = loop + f->ops[loop].dims[1]; inside && after >= n; --after) {
            RETURN_IF(!look_at(f, after, loop, STEP_BEFORE, m), 0);
        }
        inside = 0;
        loop = loop_before(f, before);
    }
    return m->count == 0;
}

/* The inputs of the quantised rows that an operation reads as its a; 0: it reads floats. */
static uint32_t cols_of(const flow *f, const clb_op *op)
{
    const uint32_t own = op->code == CLB_OP_LINEAR_Q ? op->dims[0] : 0;
    return op->code == CLB_OP_MOE ? f->model->layers[op->w0].quantized : own;
}

static int reads_what_is_written(flow *f, uint32_t n, const use *u, uint32_t cols)
{
    const clb_op *op = &f->ops[n];
    const uint32_t space = u->at->space;
    /* the layer has proven what its tokens are */
    RETURN_IF(cols != 0 && space == CLB_SPACE_TOKEN_IN,
              cols == f->layer->quantized && op->rows == 1 && (u->at->offset | u->at->step_stride) == 0);
    RETURN_IF(space != CLB_SPACE_ARENA && space != CLB_SPACE_OUTPUT && space != CLB_SPACE_TOKEN_OUT, cols == 0);
    const uint32_t steps = f->loop != CLB_NONE && n - f->loop <= f->ops[f->loop].dims[1] ? f->ops[f->loop].dims[0] : 1;
    f->missing.at = u->at;
    f->missing.record = cols == 0 ? NULL : op;
    f->missing.cols = cols;
    f->missing.once = stretch_of(op, u, 1);
    f->missing.count = 1;
    f->missing.piece[0] = stretch_of(op, u, steps);
    return written_before(f, n, &f->missing);
}

/* What runs element by element, or reads a whole row first, may write where it reads, if both have the same places. */
static int in_place(const flow *f, const clb_op *op, uint32_t which)
{
    const clb_operand *v = which == A ? &op->a : &op->b;
    const clb_operand *out = &op->out;
    const uint32_t *strides = which == A ? op->sa : op->sb;
    const int map = op->code == CLB_OP_MAP1 || op->code == CLB_OP_MAP2;
    const int rowwise = op->code == CLB_OP_SOFTMAX || op->code == CLB_OP_LAYERNORM || op->code == CLB_OP_RMSNORM ||
                        op->code == CLB_OP_ROPE;
    RETURN_IF((!map && !rowwise) || v->offset != out->offset || v->step_stride != out->step_stride, 0);
    RETURN_IF((op->rows > 1 && v->row_stride != out->row_stride) ||
              (f->samples > 1 && v->sample_stride != out->sample_stride), 0);
    RETURN_IF(which == B && op->before != CLB_UNARY_IDENTITY, 0); /* a passes through its function first */
    for (int axis = 0; map && axis < 4; ++axis) {
        RETURN_IF(op->dims[axis] > 1 && strides[axis] != op->so[axis], 0);
    }
    return 1;
}

/* What an operand reaches in one period of `pitch` floats, if it repeats with it; else an empty stretch. */
static stretch within_pitch(const clb_op *op, const use *u, const uint32_t *strides, uint64_t pitch)
{
    const stretch none = {0, 0};
    const int map = strides != NULL;
    uint64_t floats = map ? 1 : u->floats;
    RETURN_IF(op->rows > 1 && u->at->row_stride % pitch != 0, none);
    for (int axis = 0; map && axis < 4; ++axis) {
        RETURN_IF(strides[axis] >= pitch && strides[axis] % pitch != 0, none);
        floats += strides[axis] < pitch ? (uint64_t)(op->dims[axis] - 1) * strides[axis] : 0;
    }
    const uint64_t begin = u->at->offset / sizeof(float) % pitch;
    return begin + floats > pitch ? none : (stretch){begin, begin + floats};
}

/* Columns beside each other of the same rows, as of a matrix that is put together: two operands that never meet. */
static int side_by_side(const clb_op *op, const use *u, const use *out, const uint32_t *strides)
{
    const int map = op->code == CLB_OP_MAP1 || op->code == CLB_OP_MAP2;
    for (int axis = 0; axis < 5; ++axis) {
        const uint64_t pitch = axis == 4 ? out->at->row_stride : map ? op->so[axis] : 0;
        if (pitch == 0 || (u->at->sample_stride % pitch | u->at->step_stride % pitch | out->at->sample_stride % pitch |
                           out->at->step_stride % pitch) != 0) {
            continue;
        }
        const stretch in = within_pitch(op, u, map ? strides : NULL, pitch);
        const stretch to = within_pitch(op, out, map ? op->so : NULL, pitch);
        RETURN_IF(in.end != 0 && to.end != 0 && !meet(in, to), 1);
    }
    return 0;
}

/* An operation does not overwrite what it still reads, or its own workspace. By itself: its stack is no one else's. */
static __attribute__((noinline)) int overwrites_nothing(const flow *f, uint32_t n, const use uses[OPERANDS], uint32_t steps)
{
    const clb_op *op = &f->ops[n];
    const use *out = &uses[OUT];
    for (uint32_t which = A; which <= OUT; ++which) {
        const use *u = &uses[which];
        const int arena = u->at->space == CLB_SPACE_ARENA;
        RETURN_IF(arena && meet(of_all(f, u->at, stretch_of(op, u, steps)), work_of(f, op)), 0);
    }
    for (uint32_t which = A; which < OUT && op->code != CLB_OP_DELAY; ++which) { /* a delay stores before it recalls */
        const use *u = &uses[which];
        const uint32_t at_once = u->at->step_stride == out->at->step_stride ? 1 : steps;
        const stretch in = stretch_of(op, u, at_once);
        const stretch to = stretch_of(op, out, at_once);
        if (u->at->space != out->at->space || u->at->space == CLB_SPACE_NONE ||
            (same_places(f, u->at, in, out->at, to) ? !meet(in, to) : !meet(of_all(f, u->at, in), of_all(f, out->at, to)))) {
            continue;
        }
        RETURN_IF(!in_place(f, op, which) && !side_by_side(op, u, out, which == A ? op->sa : op->sb), 0);
    }
    return 1;
}

static int in_order(flow *f, uint32_t n)
{
    const clb_op *op = &f->ops[n];
    const int inside = f->loop != CLB_NONE && n - f->loop <= f->ops[f->loop].dims[1];
    use uses[OPERANDS];
    uses_of(f->model, op, uses);
    return reads_what_is_written(f, n, &uses[A], cols_of(f, op)) && reads_what_is_written(f, n, &uses[B], 0) &&
           overwrites_nothing(f, n, uses, inside ? f->ops[f->loop].dims[0] : 1);
}

/* A run of operations, after which `floats` floats of every sample of `space` are written. */
static int run_in_order(flow *f, uint32_t space, uint64_t floats)
{
    const clb_operand whole = {.space = space};
    f->loop = CLB_NONE;
    for (uint32_t n = f->first; n < f->count; ++n) {
        const int loop = f->ops[n].code == CLB_OP_LOOP;
        f->loop = loop ? n : f->loop;
        RETURN_IF(!loop && !in_order(f, n), 0);
    }
    f->missing.at = &whole;
    f->missing.record = NULL;
    f->missing.count = floats != 0;
    f->missing.piece[0] = (stretch){0, floats};
    return written_before(f, f->count, &f->missing);
}

int clb_in_order(const clb_model *m)
{
    const clb_header *h = m->header;
    flow f = {.model = m, .ops = m->ops, .samples = h->max_batch, .count = h->encoder_ops};
    RETURN_IF(!run_in_order(&f, CLB_SPACE_OUTPUT, 0) || !clb_caches_are_filled(m), 0);
    f.first = h->encoder_ops;
    f.count = h->main_ops;
    RETURN_IF(!run_in_order(&f, CLB_SPACE_OUTPUT, h->output_floats), 0);
    const clb_expert *last = NULL;
    for (uint32_t n = 0; n < h->experts; ++n) {
        const clb_expert *e = &m->experts[n];
        const int seen = last != NULL && last->first_op == e->first_op && last->layer == e->layer;
        if (seen || e->ops == 0) {
            continue;
        }
        f.layer = &m->layers[e->layer];
        f.ops = m->ops + e->first_op;
        f.first = 0;
        f.count = e->ops;
        f.samples = f.layer->tile;
        RETURN_IF(!run_in_order(&f, CLB_SPACE_TOKEN_OUT, f.layer->d_out), 0);
        last = e;
    }
    return 1;
}
