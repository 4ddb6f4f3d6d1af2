/* Matrix products. A matrix is stored in blocks of 8 output rows side by side, so that a lane is one output row and its
 * sum one chain whatever the vector width. Here is what all formats and instruction sets share: which rows and blocks
 * are computed when, scales, residual, bias and activation; the sums themselves are a kernel's. */
#include "internal.h"

enum {
    CHUNK_BYTES = 1 << 17,    /* of a matrix that stay in the cache while every row passes over them */
    PARALLEL_MACS = 1 << 16,  /* below, handing work to threads costs more than it saves */
};

typedef struct {
    const clb_op *op;
    const clb_frame *frame;
    const clb_kernels *kernels;
    clb_product *product;
    const uint8_t *matrix, *residual;
    const float *bias;
    size_t block_bytes;
    uint32_t samples, blocks, chunk; /* chunk: blocks a task computes */
    int scaled, from_bias;           /* the format has a scale a row; its sums start from the bias */
} product_task;

static int is_quantized(const clb_op *op)
{
    return op->code == CLB_OP_LINEAR_Q;
}

size_t clb_block_bytes(uint32_t layout, uint32_t cols)
{
    switch (layout) {
    case CLB_LAYOUT_ROWS8_F32: return (size_t)cols * CLB_LANES * sizeof(float);
    case CLB_LAYOUT_ROWS8_F16: return (size_t)cols * CLB_LANES * sizeof(uint16_t);
    case CLB_LAYOUT_ROWS8_I8: return CLB_LANES * (sizeof(float) + (size_t)clb_ceil(cols, 4) * 4);
    case CLB_LAYOUT_ROWS8_I4: return CLB_LANES * (size_t)clb_ceil(cols, CLB_WEIGHT_GROUP) * (sizeof(uint16_t) + 16);
    default: return 0;
    }
}

/* The residual's part of one block, E·x for each of its 8 rows that has entries, one chain in the order of the columns;
 * an entry is unpacked once for all rows of the tile. Entries come from the file unread, so indices are clamped here, not proven at load. */
static void add_residual(const product_task *t, uint32_t block, const clb_tile *tile, float total[CLB_TILE][CLB_LANES])
{
    const uint32_t cols = t->op->dims[0];
    const clb_tensor *tensor = &t->frame->tensors[t->op->w2];
    const uint8_t *head = t->residual + (size_t)block * 12;
    const uint32_t entries = (uint32_t)((tensor->bytes - (uint64_t)t->blocks * 12) / 4);
    const uint16_t *columns = (const uint16_t *)(const void *)(t->residual + (size_t)t->blocks * 12);
    const uint16_t *values = columns + entries;
    const int quantized = is_quantized(t->op);
    const int8_t *q[CLB_TILE];
    uint32_t at;
    uint64_t counts;
    memcpy(&at, head, sizeof at);
    memcpy(&counts, head + sizeof at, sizeof counts);
    for (uint32_t row = 0; counts != 0 && row < tile->rows; ++row) {
        q[row] = clb_record_at(tile->a[row], cols).q;
    }
    for (uint32_t lane = 0; counts != 0 && lane < CLB_LANES; ++lane) {
        if (head[4 + lane] == 0) {
            continue;
        }
        const uint32_t end = clb_min(entries, clb_min(at, entries) + head[4 + lane]);
        float sum[CLB_TILE] = {0};
        for (; at < end; ++at) {
            const uint32_t k = clb_min(columns[at], cols - 1);
            const float value = clb_half(values[at]);
            for (uint32_t row = 0; quantized && row < tile->rows; ++row) {
                sum[row] += value * ((float)q[row][k] * tile->a[row][k / CLB_ACTIVATION_GROUP]);
            }
            for (uint32_t row = 0; !quantized && row < tile->rows; ++row) {
                sum[row] += value * tile->a[row][k];
            }
        }
        for (uint32_t row = 0; row < tile->rows; ++row) {
            total[row][lane] += sum[row];
        }
    }
}

/* Eight floats, of which the last block may have fewer to copy. Fixed sizes let the compiler use registers. */
static void copy_lanes(float *to, const float *from, uint32_t lanes)
{
    if (lanes == CLB_LANES) {
        memcpy(to, from, CLB_LANES * sizeof(float));
    } else {
        memcpy(to, from, lanes * sizeof(float));
    }
}

static void scale_lanes(float *restrict to, const float *restrict scale)
{
    for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {
        to[lane] *= scale[lane];
    }
}

static void add_lanes(float *restrict to, const float *restrict value)
{
    for (uint32_t lane = 0; lane < CLB_LANES; ++lane) {
        to[lane] += value[lane];
    }
}

/* Scale, residual and bias of the integer formats; the float formats start from the bias instead. */
static void finish(const product_task *t, uint32_t block, const clb_tile *tile, const float *bias,
                   float total[CLB_TILE][CLB_LANES])
{
    const float *scale = (const float *)(const void *)(t->matrix + block * t->block_bytes);
    for (uint32_t row = 0; t->scaled && row < tile->rows; ++row) {
        scale_lanes(total[row], scale);
    }
    if (t->residual != NULL) {
        add_residual(t, block, tile, total);
    }
    for (uint32_t row = 0; t->bias != NULL && !t->from_bias && row < tile->rows; ++row) {
        add_lanes(total[row], bias);
    }
}

/* `blocks` blocks from `first` on, for the rows of one tile. */
static void panel(const product_task *t, const clb_tile *tile, uint32_t first, uint32_t blocks)
{
    float total[CLB_PANEL][CLB_TILE][CLB_LANES], bias[CLB_PANEL][CLB_LANES];
    const uint32_t outputs = t->op->dims[1];
    for (uint32_t b = 0; b < blocks; ++b) {
        const uint32_t at = (first + b) * CLB_LANES;
        memset(bias[b], 0, sizeof bias[b]);
        if (t->bias != NULL) {
            copy_lanes(bias[b], t->bias + at, clb_min(outputs - at, CLB_LANES));
        }
        for (uint32_t row = 0; row < tile->rows; ++row) {
            if (t->from_bias) {
                memcpy(total[b][row], bias[b], sizeof bias[b]);
            } else {
                memset(total[b][row], 0, sizeof total[b][row]);
            }
        }
    }
    t->product(t->matrix + first * t->block_bytes, t->block_bytes, blocks, tile, t->op->dims[0], total);
    for (uint32_t b = 0; b < blocks; ++b) {
        const uint32_t at = (first + b) * CLB_LANES;
        finish(t, first + b, tile, bias[b], total[b]);
        for (uint32_t row = 0; row < tile->rows; ++row) {
            copy_lanes(tile->out[row] + at, total[b][row], clb_min(outputs - at, CLB_LANES));
        }
    }
}

/* Task `index`: its chunk of the matrix, for every row. */
static void run_chunk(void *arg, uint32_t index)
{
    const product_task *t = arg;
    const clb_op *op = t->op;
    const uint32_t first = index * t->chunk, end = first + clb_min(t->blocks - first, t->chunk);
    const uint32_t begin = first * CLB_LANES, outputs = clb_min(op->dims[1], end * CLB_LANES) - begin;
    uint32_t sample = 0, row = 0;
    clb_tile tile;
    tile.w0 = tile.w1 = NULL;
    while (sample < t->samples) {
        clb_next_tile(op, t->samples, t->frame, &sample, &row, &tile);
        for (uint32_t at = first; at < end; at += CLB_PANEL) {
            panel(t, &tile, at, clb_min(end - at, CLB_PANEL));
        }
        for (uint32_t i = 0; op->func != CLB_UNARY_IDENTITY && i < tile.rows; ++i) {
            t->kernels->unary(op->func, op->p0, op->p1, tile.out[i] + begin, tile.out[i] + begin, outputs);
        }
    }
}

void clb_run_linear(const clb_op *op, uint32_t samples, const clb_frame *frame)
{
    const clb_tensor *w = &frame->tensors[op->w0];
    const colibri_context_t *ctx = frame->ctx;
    product_task t = {.op = op, .frame = frame, .kernels = ctx->kernels, .samples = samples};
    t.product = is_quantized(op) ? t.kernels->products_q[w->layout] : t.kernels->products[w->layout];
    t.matrix = clb_tensor_at(frame, op->w0);
    t.bias = (const float *)(const void *)clb_tensor_at(frame, op->w1);
    t.residual = clb_tensor_at(frame, op->w2);
    t.scaled = w->layout == CLB_LAYOUT_ROWS8_I8;
    t.from_bias = w->layout == CLB_LAYOUT_ROWS8_F32 || w->layout == CLB_LAYOUT_ROWS8_F16;
    t.block_bytes = clb_block_bytes(w->layout, w->cols);
    t.blocks = clb_ceil(op->dims[1], CLB_LANES);
    const uint32_t fitting = (uint32_t)(CHUNK_BYTES / t.block_bytes) / CLB_PANEL * CLB_PANEL;
    t.chunk = fitting > CLB_PANEL ? fitting : CLB_PANEL;
    const uint32_t chunks = clb_ceil(t.blocks, t.chunk);
    const uint64_t macs = (uint64_t)samples * op->rows * op->dims[0] * op->dims[1];
    if (ctx->parallel != NULL && chunks > 1 && macs >= PARALLEL_MACS) {
        ctx->parallel(ctx->parallel_user, run_chunk, &t, chunks);
        return;
    }
    for (uint32_t i = 0; i < chunks; ++i) {
        run_chunk(&t, i);
    }
}
