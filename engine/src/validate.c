/* Proves a model file once, so that running it needs no checks: every offset, size, alignment, dimension and
 * enumeration, and that no operation can reach outside its memory. Trusts nothing but the bytes it has been given. */
#include "internal.h"

/* All of n values are from `least` to `most`. */
static int within(const uint32_t *values, size_t n, uint32_t least, uint32_t most)
{
    for (size_t i = 0; i < n; ++i) {
        RETURN_IF(values[i] < least || values[i] > most, 0);
    }
    return 1;
}

int clb_read_header(const uint8_t *model, const clb_header **header)
{
    RETURN_IF(model == NULL, COLIBRI_ERR_NULL);
    RETURN_IF((uintptr_t)model % CLB_ALIGN_MODEL != 0, COLIBRI_ERR_MISALIGNED);
    RETURN_IF(memcmp(model, CLB_MAGIC, sizeof CLB_MAGIC) != 0, COLIBRI_ERR_MAGIC);
    const union { uint16_t word; uint8_t first; } one = {1};
    RETURN_IF(one.first != 1, COLIBRI_ERR_BIG_ENDIAN);
    const clb_header *h = (const clb_header *)(const void *)model;
    RETURN_IF(h->version != CLB_FORMAT_VERSION, COLIBRI_ERR_VERSION);
    RETURN_IF(clb_crc32(model, sizeof *h - sizeof h->header_crc) != h->header_crc, COLIBRI_ERR_HEADER);
    /* A quarter of the address space keeps every later sum of two sizes from wrapping. */
    const uint64_t most = SIZE_MAX / 4;
    RETURN_IF(h->total_bytes > most || h->context_bytes > most || h->max_batch > CLB_MAX_BATCH ||
              (uint64_t)h->max_batch * h->input_floats > most / sizeof(float) ||
              (uint64_t)h->max_batch * h->output_floats > most / sizeof(float), COLIBRI_ERR_TOO_LARGE);
    RETURN_IF(h->cleared_bytes < CLB_HEAD_BYTES || h->cleared_bytes > h->context_bytes, COLIBRI_ERR_HEADER);
    RETURN_IF(h->max_batch < 1 || h->input_floats < 1 || h->output_floats < 1 ||
              h->inputs < 1 || h->outputs < 1 || h->experts > CLB_LIMIT || h->main_ops > h->ops ||
              h->context_tokens > CLB_LIMIT || !within(h->reserved, sizeof h->reserved / sizeof h->reserved[0], 0, 0) ||
              h->meta_bytes < sizeof *h || h->meta_bytes > CLB_MAX_META || h->meta_bytes > h->total_bytes ||
              h->shared_bytes > h->total_bytes - h->meta_bytes, COLIBRI_ERR_HEADER);
    *header = h;
    return COLIBRI_OK;
}

void clb_parse(const uint8_t *model, clb_model *m)
{
    const clb_header *h = (const clb_header *)(const void *)model;
    m->bytes = model;
    m->header = h;
    m->ports = (const clb_port *)(const void *)(model + h->ports_offset);
    m->ops = (const clb_op *)(const void *)(model + h->ops_offset);
    m->tensors = (const clb_tensor *)(const void *)(model + h->tensors_offset);
    m->layers = (const clb_layer *)(const void *)(model + h->layers_offset);
    m->experts = (const clb_expert *)(const void *)(model + h->experts_offset);
}

/* `count` records of `size` bytes lie inside the metadata, aligned for their 64-bit fields; `*whole` counts these bytes. */
static int section(const clb_header *h, uint32_t offset, uint64_t count, uint64_t size, uint64_t *whole)
{
    *whole = clb_plus(*whole, clb_times(count, size) + 7);
    return offset >= sizeof *h && offset % 8 == 0 && offset <= h->meta_bytes && count * size <= h->meta_bytes - offset;
}

/* UTF-8 without control characters, zero-padded. A lead byte must have its trail; overlong forms have no way past it. */
static int name_fits(const uint8_t *name, uint32_t bytes)
{
    uint32_t at = 0;
    RETURN_IF(name[0] == 0 || name[bytes - 1] != 0, 0);
    while (name[at] != 0) {
        const uint8_t first = name[at++], next = name[at];
        const uint32_t trail = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : first >= 0x80 ? 1 : 0;
        const int low = (first == 0xC2 || first == 0xE0 || first == 0xF0) && next < (first == 0xF0 ? 0x90 : 0xA0);
        const int high = (first == 0xED && next >= 0xA0) || (first == 0xF4 && next >= 0x90);
        RETURN_IF(first < 0x20 || (first >= 0x7F && first < 0xC2) || first > 0xF4 || low || high, 0);
        for (const uint32_t end = at + trail; at < end; ++at) {
            RETURN_IF((name[at] & 0xC0) != 0x80, 0); /* as a zero is, so that nothing behind it is looked at */
        }
    }
    for (; at < bytes && name[at] == 0; ++at) {
    }
    return at == bytes;
}

static int ports(const clb_port *port, uint32_t count, uint64_t floats)
{
    for (uint32_t n = 0; n < count; ++n) {
        uint64_t product = 1;
        RETURN_IF(!name_fits(port[n].name, sizeof port[n].name), 0);
        RETURN_IF(port[n].rank > 6 || !within(port[n].dims, port[n].rank, 1, CLB_LIMIT), 0);
        for (uint32_t axis = 0; axis < port[n].rank && product <= CLB_LIMIT; ++axis) {
            product *= port[n].dims[axis];
        }
        RETURN_IF(port[n].floats != product || product > CLB_LIMIT || product > floats, 0);
        floats -= product;
    }
    return floats == 0;
}

/* A tensor's own consistency, and its place inside `bytes` bytes from `first`. */
static int tensor_fits(const clb_tensor *t, uint64_t first, uint64_t bytes)
{
    RETURN_IF(t->rows < 1 || t->rows > CLB_LIMIT || t->cols < 1 || t->cols > CLB_LIMIT, 0);
    const uint64_t blocks = (t->rows + CLB_LANES - 1) / CLB_LANES;
    int sized;
    if (t->layout == CLB_LAYOUT_FLAT) {
        sized = t->rows == 1 && t->bytes == (uint64_t)t->cols * sizeof(float);
    } else if (t->layout == CLB_LAYOUT_RESIDUAL) { /* its entries are clamped where they are read */
        const uint64_t index = 4 * (clb_residual_cells(t->rows, t->cols) + 1);
        sized = t->bytes >= index && t->bytes % 4 == 0 && (t->bytes - index) / 4 <= CLB_LIMIT;
    } else {
        const uint64_t each = clb_block_bytes(t->layout, t->cols);
        sized = each != 0 && t->bytes == blocks * each;
    }
    return sized && t->offset % CLB_ALIGN_MODEL == 0 && t->offset >= first && t->offset - first <= bytes &&
           t->bytes <= bytes - (t->offset - first);
}

/* What an operation may touch: the whole model, or, where `expert` is set, one expert on a tile of tokens. Of the arena its
 * operands lie between `arena` and `arena_end`: of the main program in what is cleared, of an expert in its layer's scratch
 * memory, behind the indices that the layer follows while its experts run. */
typedef struct {
    const clb_model *model;
    const clb_expert *expert;
    uint64_t samples, arena, arena_end;
    uint32_t steps, looped; /* of the loop that is open: steps, and operations still to come */
    int early;   /* before the tail, whose rows alone the caller's output may hold */
    int decodes; /* there is a source text, and it has been read */
} scope;

/* The rows of an operand stay inside its space; where they are `apart`, no two rows share an element, which bounds the work. */
static int operand_fits(const scope *s, const clb_use *u, const clb_tensor *constant, int written, int apart)
{
    const clb_operand *v = u->at;
    const uint64_t extent = u->floats;
    RETURN_IF(extent == 0, v->space == CLB_SPACE_NONE);
    const clb_layer *layer = s->expert == NULL ? NULL : &s->model->layers[s->expert->layer];
    const clb_header *h = s->model->header;
    const uint64_t rows = (uint64_t)(s->steps - 1) * v->step_stride + (uint64_t)(u->rows - 1) * v->row_stride + extent;
    uint64_t span = (s->samples - 1) * v->sample_stride + rows, space;
    int separate = s->samples == 1 || v->sample_stride >= rows;
    RETURN_IF(v->offset % sizeof(float) != 0 || v->sample_stride > CLB_LIMIT || v->row_stride > CLB_LIMIT ||
              v->step_stride > CLB_LIMIT || (s->steps > 1 && extent > CLB_LIMIT / s->steps / (s->samples * u->rows)), 0);
    switch (v->space) {
    case CLB_SPACE_ARENA:
        RETURN_IF(v->offset < s->arena, 0);
        space = s->arena_end;
        break;
    case CLB_SPACE_INPUT:
    case CLB_SPACE_OUTPUT:
        /* A caller's array holds the rows of its own batch only: each sample stays inside its row. */
        space = v->space == CLB_SPACE_INPUT ? h->input_floats : s->early ? 0 : h->output_floats;
        RETURN_IF(s->expert || v->sample_stride != space || (written && v->space == CLB_SPACE_INPUT), 0);
        space *= sizeof(float);
        span = rows;
        separate = 1;
        break;
    case CLB_SPACE_CONST: space = constant && constant->layout == CLB_LAYOUT_FLAT && !written ? constant->bytes : 0; break;
    case CLB_SPACE_TOKEN_WEIGHT:
    case CLB_SPACE_TOKEN_IN:
    case CLB_SPACE_TOKEN_OUT:
        RETURN_IF(layer == NULL || v->sample_stride != 0 || (written && v->space != CLB_SPACE_TOKEN_OUT) ||
                  (v->space == CLB_SPACE_TOKEN_WEIGHT && layer->apply != CLB_APPLY_INPUT), 0);
        space = sizeof(float) * (v->space == CLB_SPACE_TOKEN_WEIGHT ? 1 : v->space == CLB_SPACE_TOKEN_IN ? layer->d_in
                                                                                                     : layer->d_out);
        span = rows;
        separate |= v->space != CLB_SPACE_TOKEN_WEIGHT;
        break;
    default: return 0;
    }
    RETURN_IF(v->offset > space || span > (space - v->offset) / sizeof(float), 0);
    return !apart || (separate && (u->rows == 1 || v->row_stride >= extent));
}

/* All that an operation reads and writes, once its dimensions are known to be in their range; what it has not is none. */
static int operands_fit(const scope *s, const clb_op *op, const clb_tensor *w0, const clb_tensor *w1)
{
    const int map = op->code == CLB_OP_MAP1 || op->code == CLB_OP_MAP2;
    const clb_tensor *constants[CLB_OPERANDS] = {map ? w0 : NULL, map ? w1 : NULL, NULL};
    clb_use uses[CLB_OPERANDS];
    clb_uses(s->model, op, uses);
    for (uint32_t which = 0; which < CLB_OPERANDS; ++which) {
        const int written = which == CLB_OUT;
        RETURN_IF(!operand_fits(s, &uses[which], constants[which], written, written || op->code == CLB_OP_REDUCE), 0);
    }
    return 1;
}

/* The tensor an operation names, proven to lie inside the scope's weights; NULL where it names none. */
static int tensor_of(const scope *s, uint32_t number, const clb_tensor **tensor)
{
    const clb_model *m = s->model;
    *tensor = NULL;
    RETURN_IF(number == CLB_NONE, 1);
    RETURN_IF(number >= m->header->tensors || (m->tensors[number].scope == CLB_SCOPE_EXPERT) != (s->expert != NULL), 0);
    *tensor = &m->tensors[number];
    return s->expert == NULL || tensor_fits(*tensor, 0, s->expert->bytes);
}

static int is_vector(const clb_tensor *t, uint32_t n) { return !t || (t->layout == CLB_LAYOUT_FLAT && t->cols == n); }

/* Axes are row-major and apart, so that every element is written once and the work is bounded by the memory. */
static int apart(const uint32_t *dims, const uint32_t *strides)
{
    uint64_t below = 1;
    for (int axis = 3; axis >= 0; --axis) {
        RETURN_IF(dims[axis] > 1 && strides[axis] < below, 0);
        below += (uint64_t)(dims[axis] - 1) * strides[axis];
    }
    return 1;
}

/* The elements read are no more than the memory they come from. */
static int reduce_fits(const clb_op *op)
{
    const uint32_t *d = op->dims;
    const uint32_t left[4] = {d[0], 1, d[2], 1};
    RETURN_IF(!within(d, 3, 1, CLB_LIMIT) || !within(op->sa, 3, 0, CLB_LIMIT) || !within(op->so, 3, 0, CLB_LIMIT), 0);
    clb_use uses[CLB_OPERANDS];
    clb_uses(NULL, op, uses);
    const uint64_t read = clb_times((uint64_t)d[0] * d[1], d[2]);
    return op->func < CLB_REDUCE_COUNT && read <= uses[CLB_A].floats && apart(left, op->so);
}

/* Only an operation on two values has functions around it. An exponential takes no parameter in a program: kernels have one
 * for their own use. */
static int functions_fit(const clb_op *op)
{
    const int two = op->code == CLB_OP_MAP2;
    const uint32_t known = two ? CLB_UNARY_COUNT : 1;
    const int one = op->code == CLB_OP_MAP1 || op->code == CLB_OP_LINEAR || op->code == CLB_OP_LINEAR_Q;
    const uint32_t function = two ? op->before : one ? op->func : CLB_UNARY_IDENTITY;
    RETURN_IF(function == CLB_UNARY_EXP && op->p0 != 0.0f, 0);
    return op->before < known && op->after < known;
}

static int map_fits(const clb_op *op)
{
    RETURN_IF(!within(op->dims, 4, 1, CLB_LIMIT) || !within(op->sa, 4, 0, CLB_LIMIT) ||
              !within(op->sb, 4, 0, CLB_LIMIT) || !within(op->so, 4, 0, CLB_LIMIT) || !apart(op->dims, op->so), 0);
    return op->func < (op->code == CLB_OP_MAP2 ? (uint32_t)CLB_BINARY_COUNT : (uint32_t)CLB_UNARY_COUNT);
}

/* Of a product whose matrix is no tensor, and is computed. */
static int linear_fits(const clb_op *op, const clb_tensor *matrix, const clb_tensor *bias, const clb_tensor *residual)
{
    const uint32_t cols = op->dims[0], rows = op->dims[1];
    const uint32_t layout = matrix == NULL ? CLB_LAYOUT_ROWS8_F32 : matrix->layout;
    const int i8 = layout == CLB_LAYOUT_ROWS8_I8;
    const int i4 = layout == CLB_LAYOUT_ROWS8_I4;
    const int floats = layout == CLB_LAYOUT_ROWS8_F32 || layout == CLB_LAYOUT_ROWS8_F16;
    RETURN_IF(!within(op->dims, 2, 1, CLB_LIMIT) || !is_vector(bias, rows) || op->func >= CLB_UNARY_COUNT, 0);
    RETURN_IF(matrix != NULL && (matrix->rows != rows || matrix->cols != cols), 0);
    RETURN_IF(op->code == CLB_OP_LINEAR_Q ? !i8 && !i4 : !i8 && !floats, 0);
    RETURN_IF(residual == NULL, 1);
    return (i8 || i4) && residual->layout == CLB_LAYOUT_RESIDUAL && residual->rows == rows && residual->cols == cols;
}

/* The memory for an operation's own use ends before `end`. */
static int work_fits(const scope *s, const clb_op *op, uint64_t end)
{
    return op->work.space == CLB_SPACE_ARENA && op->work.offset % CLB_ALIGN_BUFFER == 0 &&
           op->work.offset >= CLB_HEAD_BYTES && op->work.offset <= end &&
           clb_work_floats(s->model, op, s->samples) <= (end - op->work.offset) / sizeof(float);
}

/* The pages of a cache: enough for all a token sees, when the chunk it came in is stored. */
static int cache_fits(const scope *s, const clb_op *op)
{
    const clb_header *h = s->model->header;
    const uint32_t *dims = op->dims, window = op->sa[0];
    RETURN_IF(!within(dims, 4, 1, CLB_LIMIT) || op->func >= CLB_CACHE_COUNT || dims[3] % CLB_PAGE != 0 ||
              window > CLB_LIMIT, 0);
    const uint64_t pages = dims[3] / CLB_PAGE, all = ((uint64_t)h->context_tokens + CLB_PAGE - 1) / CLB_PAGE;
    const uint64_t seen = window == 0 ? all : ((uint64_t)window + h->max_batch - 2) / CLB_PAGE + 2;
    const uint64_t page = clb_page_bytes(op->func, dims[0], dims[1]), most = h->context_bytes / page;
    return pages >= (seen < all ? seen : all) && dims[2] <= most && pages <= most / dims[2] &&
           work_fits(s, op, h->context_bytes);
}

/* Operations that know of positions: outside experts, in language models only. */
static int sequence_fits(const scope *s, const clb_op *op, const clb_tensor *w0, const clb_tensor *w1)
{
    const clb_header *h = s->model->header;
    const uint32_t *d = op->dims;
    const uint64_t tokens = h->context_tokens;
    RETURN_IF(s->expert != NULL || (tokens == 0 && op->code != CLB_OP_EMBED), 0);
    if (op->code == CLB_OP_CACHE || op->code == CLB_OP_ATTENTION) {
        const int all = op->sa[1] == CLB_SIGHT_ALL;
        RETURN_IF(op->sa[1] >= CLB_SIGHT_COUNT || (op->sa[1] != CLB_SIGHT_PAST && op->sa[0] != 0) ||
                  (op->sa[1] == CLB_SIGHT_SOURCE && (!s->decodes || w1 != NULL)), 0);
        RETURN_IF(w1 != NULL && (w1->layout != CLB_LAYOUT_FLAT || w1->cols / op->rows < (all ? 2 * tokens - 1 : tokens)), 0);
        RETURN_IF(!cache_fits(s, op), 0);
        RETURN_IF(op->code == CLB_OP_CACHE, op->rows == d[2]);
        return op->rows % d[2] == 0 && is_vector(w0, op->rows) && s->samples * op->rows <= CLB_LIMIT;
    }
    RETURN_IF(d[0] < 1 || d[0] > CLB_LIMIT, 0);
    switch (op->code) {
    case CLB_OP_EMBED: return w0 != NULL && w0->cols == d[0] && clb_block_bytes(w0->layout, d[0]) != 0;
    case CLB_OP_ROPE:
        return d[1] % 2 == 0 && d[1] <= d[0] && w0 != NULL && w0->layout == CLB_LAYOUT_FLAT && w0->cols >= tokens * d[1];
    default: /* CLB_OP_DELAY; its slots hold a chunk and what it looks back at */
        return d[1] >= 1 && d[1] <= CLB_LIMIT && d[2] <= CLB_LIMIT && (op->rows - 1) * (uint64_t)op->sa[0] <= d[1] &&
               d[2] >= d[1] + (s->samples < tokens ? s->samples : tokens) && work_fits(s, op, s->arena_end);
    }
}

static int op_fits(const scope *s, const clb_op *op)
{
    const clb_tensor *w0, *w1, *w2;
    const uint32_t n = op->dims[0];
    int sound;
    RETURN_IF(op->rows < 1 || op->rows > CLB_LIMIT || !functions_fit(op) ||
              !tensor_of(s, op->w0, &w0) || !tensor_of(s, op->w1, &w1) || !tensor_of(s, op->w2, &w2), 0);
    switch (op->code) {
    case CLB_OP_LINEAR:
    case CLB_OP_LINEAR_Q: sound = linear_fits(op, w0, w1, w2); break;
    case CLB_OP_QUANTIZE: sound = n >= 1 && n <= CLB_LIMIT / 2; break;
    case CLB_OP_MAP1:
    case CLB_OP_MAP2: sound = map_fits(op); break;
    case CLB_OP_SOFTMAX:
    case CLB_OP_LAYERNORM:
    case CLB_OP_RMSNORM: sound = n >= 1 && n <= CLB_LIMIT && is_vector(w0, n) && is_vector(w1, n); break;
    case CLB_OP_REDUCE: sound = reduce_fits(op); break;
    case CLB_OP_LOOP: /* no step without its state in memory */
        sound = op->work.space == CLB_SPACE_NONE && s->looped == 0 && within(op->dims, 2, 1, CLB_LIMIT) &&
                op->dims[2] <= 1 && op->dims[0] <= s->model->header->context_bytes / sizeof(float);
        break;
    default: sound = op->code > CLB_OP_MOE && op->code < CLB_OP_COUNT && sequence_fits(s, op, w0, w1);
    }
    return sound && operands_fit(s, op, w0, w1);
}

/* Multiply-accumulates, all elementary steps, and bytes of experts that are read, along the costliest route. */
typedef struct {
    uint64_t macs, work, bytes;
} cost;

/* The next operation of a program that goes on with `left` more, or a loop of some of these; adds what it costs. */
static int next_fits(scope *s, const clb_op *op, uint32_t left, cost *c)
{
    RETURN_IF((s->looped != 0 && op->code > CLB_OP_LOOP) || !op_fits(s, op), 0);
    if (op->code == CLB_OP_LOOP) {
        s->steps = op->dims[0];
        s->looped = op->dims[1];
        return s->looped <= left;
    }
    const uint32_t tokens = s->model->header->context_tokens;
    c->macs = clb_plus(c->macs, clb_times(s->steps, clb_macs_of(op, tokens)));
    c->work = clb_plus(c->work, clb_times(s->steps, clb_work_of(op, s->model->tensors, tokens)));
    s->looped -= s->looped != 0;
    s->steps = s->looped != 0 ? s->steps : 1;
    return 1;
}

static int expert_program_fits(scope *s, uint64_t *work)
{
    cost c = {0, 0, 0};
    for (uint32_t i = 0; i < s->expert->ops; ++i) {
        RETURN_IF(!next_fits(s, &s->model->ops[s->expert->first_op + i], s->expert->ops - i - 1, &c), 0);
    }
    *work = c.work > *work ? c.work : *work;
    return c.macs == s->expert->macs;
}

/* The programs of a layer's experts, which lie in the file in the order of the experts (from `*next_op` on), so that proving
 * them takes no longer than reading them. */
static int experts_fit(scope *s, const clb_layer *l, uint32_t *next_op, uint64_t *work)
{
    const clb_expert *last = NULL;
    for (uint32_t n = 0; n < l->experts; ++n) {
        const clb_expert *e = &s->model->experts[l->first_expert + n];
        if (e->ops == 0) { /* pruned */
            continue;
        }
        /* Experts of one shape follow each other and share a program, which is proven once. */
        const int shared = last != NULL && e->first_op == last->first_op && e->ops == last->ops &&
                           e->bytes == last->bytes && e->macs == last->macs;
        s->expert = last = e;
        RETURN_IF(!shared && (e->first_op < *next_op || !expert_program_fits(s, work)), 0);
        *next_op = e->first_op + e->ops;
    }
    return 1;
}

/* An MoE operation, its workspace, and its experts; adds the costliest route. */
static int moe_fits(const scope *whole, const clb_op *op, uint32_t layer_number, uint32_t *next_op, cost *c)
{
    const clb_model *m = whole->model;
    const clb_tensor *bias, *scale;
    RETURN_IF(op->w0 != layer_number || !tensor_of(whole, op->w1, &bias) || !tensor_of(whole, op->w2, &scale) ||
              !functions_fit(op) || op->rows < 1 || op->rows > CLB_LIMIT, 0);
    const clb_layer *l = &m->layers[layer_number];
    RETURN_IF(whole->samples * op->rows > CLB_LIMIT / l->k, 0);
    const uint64_t floats = clb_workspace_floats(op, l, whole->samples);
    RETURN_IF(!is_vector(bias, l->experts) || !is_vector(scale, l->experts) ||
              (l->score == CLB_SCORE_SPARSE_MIXER && bias != NULL) || op->dims[2] > CLB_LIMIT ||
              !work_fits(whole, op, whole->arena_end) || !operands_fit(whole, op, NULL, NULL), 0);
    scope inside = *whole;
    inside.samples = l->tile;
    inside.arena = op->work.offset + floats * sizeof(float);
    inside.arena_end = inside.arena + op->dims[2] * sizeof(float);
    uint64_t most = 0;
    RETURN_IF(!experts_fit(&inside, l, next_op, &most), 0);
    const uint64_t routed = clb_plus((uint64_t)l->experts + l->d_out, most);
    const clb_expert *experts = m->experts + l->first_expert;
    const uint64_t choices = (uint64_t)op->rows * l->k;
    const uint32_t touched = choices < l->experts ? (uint32_t)choices : l->experts;
    c->macs = clb_plus(c->macs, clb_times(op->rows, clb_costliest(experts, l->experts, l->k, CLB_MACS)));
    c->bytes = clb_plus(c->bytes, clb_costliest(experts, l->experts, touched, CLB_BYTES));
    c->work = clb_plus(c->work, clb_plus(l->experts, clb_times(choices, routed)));
    return 1;
}

static int layer_fits(const clb_header *h, const clb_layer *l, uint32_t first_expert)
{
    const int logit = l->score == CLB_SCORE_LOGIT, softmax = l->normalize == CLB_NORMALIZE_SOFTMAX;
    const int mixer = l->score == CLB_SCORE_SPARSE_MIXER;
    RETURN_IF(l->groups < 1 || l->experts % l->groups != 0 || l->kept_groups < 1 || l->kept_groups > l->groups ||
              l->k > (uint64_t)l->kept_groups * (l->experts / l->groups) || l->group_rule >= CLB_GROUP_RULE_COUNT ||
              l->capacity > CLB_LIMIT || l->apply >= CLB_APPLY_COUNT || !(l->epsilon >= 0.0f) ||
              l->epsilon - l->epsilon != 0.0f || (mixer && (l->normalize != CLB_NORMALIZE_NONE || l->groups > 1 ||
              l->k > 8)), 0);
    return l->experts >= 1 && l->first_expert == first_expert && l->experts <= h->experts - first_expert && l->k >= 1 &&
           l->k <= l->experts && l->score < CLB_SCORE_COUNT && l->normalize < CLB_NORMALIZE_COUNT &&
           (logit ? softmax || l->normalize == CLB_NORMALIZE_ONE : !softmax) && l->scale - l->scale == 0.0f &&
           l->d_in >= 1 && l->d_in <= CLB_LIMIT && l->d_out >= 1 && l->d_out <= CLB_LIMIT && l->tile >= 1 &&
           l->tile <= CLB_EXPERT_TILE && l->experts <= CLB_MAX_EXPERTS && l->quantized <= CLB_LIMIT / 2 &&
           (l->quantized == 0 || clb_record_floats(l->quantized) == l->d_in);
}

static int expert_fits(const clb_header *h, const clb_expert *e, uint32_t layer)
{
    return e->layer == layer && e->offset % CLB_ALIGN_MODEL == 0 && e->offset >= h->meta_bytes + h->shared_bytes &&
           e->offset <= h->total_bytes && e->bytes <= h->total_bytes - e->offset && e->first_op >= h->main_ops &&
           e->first_op <= h->ops && e->ops <= h->ops - e->first_op && (e->ops >= 1 || (e->bytes == 0 && e->macs == 0)) &&
           e->frequency >= 0.0f && e->frequency <= 1.0f && within(e->reserved, 4, 0, 0);
}

/* The main program, every MoE layer once and in order; counts the choices one sample makes. The stated costs are true, so
 * that a caller may rely on them: the multiply-accumulates exactly, the work as a limit. */
static int program_fits(const clb_model *m, uint64_t *choices)
{
    const clb_header *h = m->header;
    scope whole = {.model = m, .samples = h->max_batch, .steps = 1, .arena = CLB_HEAD_BYTES, .arena_end = h->cleared_bytes};
    uint32_t layer = 0, next_op = h->main_ops;
    cost c = {0, 0, 0};
    *choices = 0;
    for (uint32_t n = 0; n < h->main_ops; ++n) {
        const clb_op *op = &m->ops[n];
        whole.decodes = n >= h->encoder_ops && h->encoder_ops != 0;
        whole.early = n < h->encoder_ops || (n < h->tail_op && h->tail_op < h->main_ops);
        RETURN_IF(n >= h->tail_op && op->code >= CLB_OP_MOE, 0); /* what later tokens see, or knows of positions */
        RETURN_IF(whole.looped != 0 && (n == h->tail_op || n == h->encoder_ops), 0); /* a loop runs as a whole */
        if (op->code == CLB_OP_MOE) {
            RETURN_IF(whole.looped != 0 || layer >= h->layers || !moe_fits(&whole, op, layer, &next_op, &c), 0);
            *choices += (uint64_t)op->rows * m->layers[layer++].k;
        } else {
            RETURN_IF(!next_fits(&whole, op, h->main_ops - n - 1, &c), 0);
        }
    }
    /* Of a table a row reads a part, which the exporter may leave out. */
    RETURN_IF(h->worst_bytes < c.bytes || h->worst_bytes - c.bytes > h->shared_bytes, 0);
    RETURN_IF(c.macs != h->worst_macs || c.work > h->worst_work || c.work == UINT64_MAX, 0);
    return layer == h->layers && h->tail_op <= h->main_ops && h->encoder_ops <= h->tail_op &&
           (h->encoder_ops == 0 || h->context_tokens != 0);
}

static int certificate_fits(const clb_model *m, uint64_t choices)
{
    const clb_header *h = m->header;
    const uint64_t bytes = sizeof(clb_golden) + (uint64_t)h->input_floats * sizeof(float) + (choices + 1) / 2 * 4;
    for (uint32_t n = 0; n < h->golden_rows; ++n) {
        RETURN_IF(h->golden_bytes != bytes, 0);
        const uint8_t *row = m->bytes + h->golden_offset + (uint64_t)n * bytes;
        RETURN_IF(((const clb_golden *)(const void *)row)->choices != choices, 0);
    }
    return 1;
}

/* By itself, for its stack need not stay for the proof of the order. */
static __attribute__((noinline)) int structure(const uint8_t *model, uint64_t size, clb_model *m)
{
    RETURN_IF(model != NULL && size < sizeof(clb_header), COLIBRI_ERR_TRUNCATED);
    const clb_header *h;
    const int error = clb_read_header(model, &h);
    RETURN_IF(error != COLIBRI_OK, error);
    RETURN_IF(size < h->total_bytes, COLIBRI_ERR_TRUNCATED);
    uint64_t whole = sizeof *h; /* nothing else lies in the metadata but what aligns it */
    RETURN_IF(!section(h, h->ports_offset, (uint64_t)h->inputs + h->outputs, sizeof(clb_port), &whole) ||
              !section(h, h->ops_offset, h->ops, sizeof(clb_op), &whole) ||
              !section(h, h->tensors_offset, h->tensors, sizeof(clb_tensor), &whole) ||
              !section(h, h->layers_offset, h->layers, sizeof(clb_layer), &whole) ||
              !section(h, h->experts_offset, h->experts, sizeof(clb_expert), &whole) ||
              !section(h, h->golden_offset, h->golden_rows, h->golden_bytes, &whole) ||
              !section(h, h->info_offset, h->info_bytes, 1, &whole) ||
              h->meta_bytes > whole + CLB_ALIGN_MODEL, COLIBRI_ERR_HEADER);
    RETURN_IF(clb_crc32(model + sizeof *h, h->meta_bytes - sizeof *h) != h->meta_crc, COLIBRI_ERR_CHECKSUM);
    clb_parse(model, m);
    RETURN_IF(!ports(m->ports, h->inputs, h->input_floats) ||
              !ports(m->ports + h->inputs, h->outputs, h->output_floats), COLIBRI_ERR_HEADER);
    for (uint32_t n = 0; n < h->tensors; ++n) {
        const clb_tensor *t = &m->tensors[n];
        RETURN_IF(t->scope >= CLB_SCOPE_COUNT ||
                  (t->scope == CLB_SCOPE_SHARED && !tensor_fits(t, h->meta_bytes, h->shared_bytes)), COLIBRI_ERR_TENSOR);
    }
    uint32_t first = 0;
    for (uint32_t n = 0; n < h->layers; ++n) {
        RETURN_IF(!layer_fits(h, &m->layers[n], first), COLIBRI_ERR_ROUTING);
        for (uint32_t e = 0; e < m->layers[n].experts; ++e) {
            RETURN_IF(!expert_fits(h, &m->experts[first + e], n), COLIBRI_ERR_EXPERT);
        }
        first += m->layers[n].experts;
    }
    uint64_t choices;
    RETURN_IF(first != h->experts, COLIBRI_ERR_EXPERT);
    RETURN_IF(!program_fits(m, &choices), COLIBRI_ERR_PROGRAM);
    return certificate_fits(m, choices) ? COLIBRI_OK : COLIBRI_ERR_HEADER;
}

int clb_validate(const uint8_t *model, uint64_t size, clb_model *m)
{
    const int error = structure(model, size, m);
    RETURN_IF(error != COLIBRI_OK, error);
    return clb_in_order(m) ? COLIBRI_OK : COLIBRI_ERR_ORDER;
}
