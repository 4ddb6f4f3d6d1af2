/* Matrix products. A matrix is stored in blocks of 8 output rows side by side, so that a lane is
 * one output row and its sum one chain whatever the vector width. Here is what all formats and
 * instruction sets share: which rows and blocks are computed when, the outliers and the activation;
 * a kernel computes a panel of blocks. */
#include "../core/parallel.h"

enum {
    CELL_BLOCKS = CLB_CELL_ROWS / CLB_LANES, /* a task computes whole cells of the outliers */
    CHUNK_BYTES = 1 << 18, /* of a matrix that stay in the cache while every row passes over them */
    TASKS = 8, /* of a matrix that is spread over threads, at least: none waits long for the last */
    PARALLEL_MACS = 1 << 16, /* below, handing work to threads costs more than it saves */
};

typedef struct {
    clb_matrix matrix;
    const clb_op *op;
    const clb_frame *frame;
    uint32_t first, samples, blocks, chunk; /* chunk: blocks a task computes */
} product_task;

/* A matrix without outliers. */
CLB_STATIC_WALK clb_matrix matrix_of(const void *blocks, const float *bias, uint32_t layout,
                                     uint32_t code, uint32_t cols, uint32_t outputs) {
    return (clb_matrix){
        .blocks = blocks,
        .bias = bias,
        .layout = layout,
        .cols = cols,
        .outputs = outputs,
        .stride = (size_t)clb_block_bytes(layout, cols),
        .quantized = code == CLB_OP_LINEAR_Q,
        .scaled = layout == CLB_LAYOUT_ROWS8_I8,
        .from_bias = layout == CLB_LAYOUT_ROWS8_F32 || layout == CLB_LAYOUT_ROWS8_F16,
    };
}

#if CLB_SHARED_PRODUCTS
/* All of a matrix times one row. It takes numbers, which a folded call has at hand, and no structs,
 * which it would fill. */
static NOINLINE void shared_product(const void *blocks, const float *bias, const float *x,
                                    float *out, uint32_t layout, uint32_t code, uint32_t cols,
                                    uint32_t outputs) {
    const clb_matrix matrix = matrix_of(blocks, bias, layout, code, cols, outputs);
    const clb_tile tile = {.rows = 1, .computed = 1, .a = {x}, .out = {out}};
    for (uint32_t at = 0; at < clb_ceil(outputs, CLB_LANES); ++at) {
        panel(&matrix, &tile, at, 1);
    }
}
#endif

/* Task `index`: its chunk of the matrix, for every row. */
CLB_STATIC_WALK void run_chunk(void *arg, uint32_t index) {
    const product_task *t = arg;
    const clb_op *op = t->op;
    const clb_kernels *kernels = CLB_KERNELS(t->frame->ctx);
    const uint32_t first = index * t->chunk;
    const uint32_t end = first + clb_min(t->blocks - first, t->chunk);
    const uint32_t begin = first * CLB_LANES;
    const uint32_t outputs = clb_min(op->linear.outputs, end * CLB_LANES) - begin;
    uint32_t sample = t->first;
    uint32_t row = 0;
    clb_tile tile;
    tile.w0 = tile.w1 = NULL;
    while (sample < t->samples) {
        clb_next_tile(op, t->samples, t->frame, &sample, &row, &tile);
#if CLB_SHARED_PRODUCTS
        shared_product(t->matrix.blocks, t->matrix.bias, tile.a[0], tile.out[0], t->matrix.layout,
                       op->code, t->matrix.cols, t->matrix.outputs);
#else
        for (uint32_t at = first; at < end; at += CLB_PANEL) {
            CLB_PANEL_OF(kernels)(&t->matrix, &tile, at, clb_min(end - at, CLB_PANEL));
        }
#endif
        if (CLB_USED_OUTLIERS && t->matrix.outliers != NULL) {
            kernels->outliers(&t->matrix, &tile, first / CELL_BLOCKS, clb_ceil(end, CELL_BLOCKS));
        }
        for (uint32_t i = 0; op->func != CLB_UNARY_IDENTITY && i < tile.rows; ++i) {
            float *out = tile.out[i] + begin;
            kernels->unary(op->func, op->linear.alpha, op->linear.beta, out, out, outputs);
        }
    }
}

/* The product with the matrix at `blocks`. */
CLB_STATIC_WALK void multiply_by(const void *blocks, uint32_t layout, const clb_op *op,
                                 uint32_t first, uint32_t samples, const clb_frame *frame) {
    const colibri_context_t *ctx = frame->ctx;
    const float *bias = clb_tensor_at(frame, op->linear.bias);
    product_task t = {
        .op = op,
        .frame = frame,
        .first = first,
        .samples = samples,
        .blocks = clb_ceil(op->linear.outputs, CLB_LANES),
        .matrix = matrix_of(blocks, bias, layout, op->code, op->linear.inputs, op->linear.outputs),
    };
    t.matrix.outliers = clb_tensor_at(frame, op->linear.outliers);
    if (t.matrix.outliers != NULL) {
        const uint64_t index = 4 * (clb_outlier_cells(op->linear.outputs, op->linear.inputs) + 1);
        t.matrix.entries = (uint32_t)((frame->tensors[op->linear.outliers].bytes - index) / 4);
    }
    const uint32_t fitting = (uint32_t)(CHUNK_BYTES / t.matrix.stride) / CELL_BLOCKS * CELL_BLOCKS;
    const uint64_t macs =
        (uint64_t)(samples - first) * op->rows * op->linear.inputs * op->linear.outputs;
    const int spread = !CLB_SCALAR && ctx->parallel != NULL && macs >= PARALLEL_MACS;
    const uint32_t each = clb_ceil(clb_ceil(t.blocks, TASKS), CELL_BLOCKS) * CELL_BLOCKS;
    t.chunk = spread ? clb_min(fitting, each) : fitting;
    t.chunk = t.chunk > CELL_BLOCKS ? t.chunk : CELL_BLOCKS;
    CLB_SPREAD(ctx, spread, run_chunk, &t, clb_ceil(t.blocks, t.chunk));
}

CLB_WALK void clb_run_linear(const clb_op *op, uint32_t first, uint32_t samples,
                             const clb_frame *frame) {
    const uint32_t number = op->linear.matrix;
    const int computed = CLB_USED_COMPUTED && op->b.space != CLB_SPACE_NONE;
    /* Each sample has a computed matrix of its own. */
    const uint32_t step = computed ? 1 : samples - first;
    const uint32_t layout = computed ? CLB_LAYOUT_ROWS8_F32 : frame->tensors[number].layout;
    for (uint32_t s = first; s < samples; s += step) {
        const void *matrix =
            computed ? clb_locate(&op->b, frame, NULL, s, 0) : clb_tensor_at(frame, number);
        multiply_by(matrix, layout, op, s, s + step, frame);
    }
}

#ifndef COLIBRI_GENERATED
#include "../check/proof.h"

static int linear_shape_fits(const clb_op *op, const clb_tensor *t) {
    return t == NULL || (t->rows == op->linear.outputs && t->cols == op->linear.inputs);
}

static int is_in(uint32_t layouts, uint32_t layout) { return (layouts >> layout & 1u) != 0; }

/* A product whose matrix is no tensor has one that is computed. */
static int linear_fits(const clb_subject *s) {
    const clb_op *op = s->op;
    const uint32_t layout = s->w0 == NULL ? CLB_LAYOUT_ROWS8_F32 : s->w0->layout;
    const uint32_t int8 = 1u << CLB_LAYOUT_ROWS8_I8;
    const uint32_t integers = int8 | 1u << CLB_LAYOUT_ROWS8_I4;
    const uint32_t floats = int8 | 1u << CLB_LAYOUT_ROWS8_F32 | 1u << CLB_LAYOUT_ROWS8_F16;
    if (!is_in(op->code == CLB_OP_LINEAR_Q ? integers : floats, layout)) return 0;
    if (!clb_is_vector(s->w1, op->linear.outputs)) return 0;
    if (!linear_shape_fits(op, s->w0) || !linear_shape_fits(op, s->w2)) return 0;
    return s->w2 == NULL || (is_in(integers, layout) && s->w2->layout == CLB_LAYOUT_OUTLIERS);
}

static void linear_uses(const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    const clb_op *op = s->op;
    const uint32_t inputs = op->linear.inputs;
    const int quantized = op->code == CLB_OP_LINEAR_Q;
    clb_plain(uses, quantized ? clb_quantized_floats(inputs) : inputs, 0, op->linear.outputs);
    uses[CLB_A].cols = quantized ? inputs : 0;
    if (op->linear.matrix == CLB_NONE) { /* a matrix in whole blocks */
        const uint64_t blocks = clb_ceil(op->linear.outputs, CLB_LANES);
        uses[CLB_B].floats = blocks * inputs * CLB_LANES;
        uses[CLB_B].spare = blocks * CLB_LANES - op->linear.outputs;
    }
}

static uint64_t linear_macs(const clb_subject *s) {
    const clb_op *op = s->op;
    return clb_times(clb_times(op->rows, op->linear.inputs), op->linear.outputs);
}

/* Most outliers that a row meets: no cell has more than there are, or than weights. */
static uint64_t outlier_work(const clb_tensor *t) {
    const uint64_t cells = clb_outlier_cells(t->rows, t->cols);
    const uint64_t entries = (t->bytes - 4 * (cells + 1)) / 4;
    const uint64_t most = CLB_CELL_ROWS * CLB_CELL_COLS;
    return clb_times(cells, entries < most ? entries : most);
}

static uint64_t linear_work(const clb_subject *s) {
    const clb_op *op = s->op;
    const uint64_t entries =
        op->linear.outliers == CLB_NONE ? 0 : outlier_work(&s->model->tensors[op->linear.outliers]);
    const uint64_t products = ((uint64_t)op->linear.inputs + 1) * op->linear.outputs;
    return clb_times(op->rows, clb_plus(products, entries));
}

const clb_proof clb_linear_proof = {
    .fits = linear_fits, .uses = linear_uses, .macs = linear_macs, .work = linear_work};

#endif
