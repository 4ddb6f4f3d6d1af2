/* An operation that computes each row by itself: its rows, in tiles for its kernel, spread over the
 * caller's threads. */
#include "parallel.h"

typedef struct {
    const clb_op *op;
    const clb_frame *frame;
    clb_kernel *kernel;
    uint32_t first, samples;
    size_t rows; /* a task takes */
} row_task;

/* gcc -Og follows no pointer to a function that must be inlined, and refuses it: folded code calls
 * by name. */
CLB_STATIC_WALK void compute(clb_kernel *kernel, const clb_op *op, const clb_tile *tile) {
#if defined(CLB_FOLDED) && defined(__OPTIMIZE__)
    (void)kernel;
    switch (op->code) {
#define CALL(code, name)                                                                           \
    case CLB_OP_##code: clb_##name(op, tile); break;
        CLB_ROW_KERNELS(CALL)
#undef CALL
    }
#else
    kernel(op, tile);
#endif
}

/* Task `index` of an operation that computes every row by itself. */
CLB_STATIC_WALK void run_rows(void *arg, uint32_t index) {
    const row_task *t = arg;
    const clb_op *op = t->op;
    const size_t first = index * t->rows;
    const size_t all = (size_t)(t->samples - t->first) * op->rows;
    const size_t end = all - first < t->rows ? all : first + t->rows;
    uint32_t sample = t->first + (uint32_t)(first / op->rows);
    uint32_t row = (uint32_t)(first % op->rows);
    clb_tile tile;
    tile.w0 = clb_tensor_at(t->frame, op->w0);
    tile.w1 = clb_tensor_at(t->frame, op->w1);
    tile.kernels = CLB_KERNELS(t->frame->ctx);
    for (size_t at = first; at < end; at += CLB_TILE) {
        clb_next_tile(op, t->samples, t->frame, &sample, &row, &tile);
        compute(t->kernel, op, &tile);
    }
}

CLB_WALK void clb_run_rows(clb_kernel *kernel, const clb_op *op, uint32_t first, uint32_t samples,
                           const clb_frame *frame) {
    enum { TASK_FLOATS = 1 << 12 }; /* below, handing work to threads costs more than it saves */
    const size_t all = (size_t)(samples - first) * op->rows;
    row_task task = {.op = op,
                     .frame = frame,
                     .kernel = kernel,
                     .first = first,
                     .samples = samples,
                     .rows = all};
    /* sizes that count nothing are 0; a row of more floats than fit 64 bits is one no memory
     * holds */
    const uint64_t floats = CLB_SCALAR || frame->ctx->parallel == NULL
                                ? CLB_LIMIT + 1ull
                                : (uint64_t)(op->dims[0] | !op->dims[0]) *
                                      (op->dims[1] | !op->dims[1]) * (op->dims[2] | !op->dims[2]) *
                                      (op->dims[3] | !op->dims[3]);
    const int spread = !CLB_SCALAR && floats <= CLB_LIMIT && all * floats > TASK_FLOATS;
    if (spread) {
        const size_t tiles = (size_t)(TASK_FLOATS / (floats * CLB_TILE));
        task.rows = (tiles != 0 ? tiles : 1) * CLB_TILE;
    }
    CLB_SPREAD(frame->ctx, spread, run_rows, &task,
               spread ? (uint32_t)((all + task.rows - 1) / task.rows) : 1);
}
