/* Rows of operands: where they are, in tiles for the kernels, and an operation that computes each by itself. */
#include "internal.h"

CLB_STATIC_WALK float *token_at(const clb_routed *r, int out, size_t position)
{
    const uint32_t choice = r->order[position];
    RETURN_IF(!out, clb_row_of(&r->op->a, r->x, r->op->rows, choice / r->k));
    return r->k == 1 ? clb_row_of(&r->op->out, r->y, r->op->rows, choice) : r->y + (size_t)choice * r->d_out;
}

CLB_WALK const float *clb_locate(const clb_operand *v, const clb_frame *f, const float *constant, size_t sample, size_t row)
{
    const float *base;
    switch (v->space) {
    case CLB_SPACE_ARENA: base = (const float *)(const void *)f->arena; break;
    case CLB_SPACE_INPUT: base = f->input; break;
    case CLB_SPACE_OUTPUT: base = f->output; break;
    case CLB_SPACE_CONST: base = constant; break;
    case CLB_SPACE_TOKEN_WEIGHT: return f->routed->weights + f->routed->order[sample];
    case CLB_SPACE_TOKEN_IN:
    case CLB_SPACE_TOKEN_OUT: base = token_at(f->routed, v->space == CLB_SPACE_TOKEN_OUT, sample); break;
    default: return NULL;
    }
    return base + v->offset / sizeof(float) + sample * v->sample_stride + row * v->row_stride +
           (size_t)f->step * v->step_stride;
}

CLB_WALK void clb_no_expert(const clb_routed *routed, uint32_t count)
{
    for (uint32_t n = 0; n < count; ++n) {
        memset(token_at(routed, 1, n), 0, routed->d_out * sizeof(float));
    }
}

CLB_WALK const uint8_t *clb_tensor_at(const clb_frame *frame, uint32_t number)
{
    return number == CLB_NONE ? NULL : frame->weights + frame->tensors[number].offset;
}

CLB_WALK void clb_pad_tile(clb_tile *tile)
{
    const uint32_t n = tile->computed = tile->rows;
    if (n % 4 == 3) { /* four at once take less time than two and one */
        tile->a[n] = tile->a[n - 1];
        tile->out[n] = tile->out[n - 1];
        tile->computed = n + 1;
    }
}

CLB_WALK void clb_next_tile(const clb_op *op, uint32_t samples, const clb_frame *frame, uint32_t *sample, uint32_t *row,
                            clb_tile *tile)
{
    uint32_t n = 0;
    for (; n < CLB_TILE && *sample < samples; ++n) {
        tile->a[n] = clb_locate(&op->a, frame, tile->w0, *sample, *row);
        tile->b[n] = op->b.space == CLB_SPACE_NONE ? NULL : clb_locate(&op->b, frame, tile->w1, *sample, *row);
        tile->out[n] = (float *)(uintptr_t)clb_locate(&op->out, frame, NULL, *sample, *row);
        if (++*row == op->rows) {
            *row = 0;
            ++*sample;
        }
    }
    tile->rows = n;
    clb_pad_tile(tile);
}

typedef struct {
    const clb_op *op;
    const clb_frame *frame;
    clb_kernel *kernel;
    uint32_t first, samples;
    size_t rows; /* a task takes */
} row_task;

/* gcc -Og follows no pointer to a function that must be inlined, and refuses it: folded code calls by name. */
CLB_STATIC_WALK void compute(clb_kernel *kernel, const clb_op *op, const clb_tile *tile)
{
#if defined(CLB_FOLDED) && defined(__OPTIMIZE__)
    (void)kernel;
    switch (op->code) {
    case CLB_OP_QUANTIZE: clb_quantize(op, tile); break;
    case CLB_OP_MAP1:
    case CLB_OP_MAP2: clb_map(op, tile); break;
    case CLB_OP_SOFTMAX: clb_softmax(op, tile); break;
    case CLB_OP_LAYERNORM:
    case CLB_OP_RMSNORM: clb_norm(op, tile); break;
    default: clb_reduce(op, tile);
    }
#else
    kernel(op, tile);
#endif
}

/* Task `index` of an operation that computes every row by itself. */
CLB_STATIC_WALK void run_rows(void *arg, uint32_t index)
{
    const row_task *t = arg;
    const size_t first = index * t->rows, all = (size_t)(t->samples - t->first) * t->op->rows;
    const size_t end = all - first < t->rows ? all : first + t->rows;
    uint32_t sample = t->first + (uint32_t)(first / t->op->rows), row = (uint32_t)(first % t->op->rows);
    clb_tile tile;
    tile.w0 = (const float *)(const void *)clb_tensor_at(t->frame, t->op->w0);
    tile.w1 = (const float *)(const void *)clb_tensor_at(t->frame, t->op->w1);
    tile.kernels = CLB_KERNELS(t->frame->ctx);
    for (size_t at = first; at < end; at += CLB_TILE) {
        clb_next_tile(t->op, t->samples, t->frame, &sample, &row, &tile);
        compute(t->kernel, t->op, &tile);
    }
}

CLB_WALK void clb_run_rows(clb_kernel *kernel, const clb_op *op, uint32_t first, uint32_t samples, const clb_frame *frame)
{
    enum { TASK_FLOATS = 1 << 12 }; /* below, handing work to threads costs more than it saves */
    const size_t all = (size_t)(samples - first) * op->rows;
    row_task task = {.op = op, .frame = frame, .kernel = kernel, .first = first, .samples = samples, .rows = all};
    /* sizes that count nothing are 0; a row of more floats than fit 64 bits is one no memory holds */
    const uint64_t floats = CLB_SCALAR || frame->ctx->parallel == NULL ? CLB_LIMIT + 1ull
                            : (uint64_t)(op->dims[0] | !op->dims[0]) * (op->dims[1] | !op->dims[1]) *
                                  (op->dims[2] | !op->dims[2]) * (op->dims[3] | !op->dims[3]);
    const int spread = !CLB_SCALAR && floats <= CLB_LIMIT && all * floats > TASK_FLOATS;
    if (spread) {
        const size_t tiles = (size_t)(TASK_FLOATS / (floats * CLB_TILE));
        task.rows = (tiles != 0 ? tiles : 1) * CLB_TILE;
    }
    CLB_SPREAD(frame->ctx, spread, run_rows, &task, spread ? (uint32_t)((all + task.rows - 1) / task.rows) : 1);
}
