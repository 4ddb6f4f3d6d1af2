/* What the engine's files share: the parsed model, the tile a kernel works on, and each file's entry points. */
#ifndef COLIBRI_INTERNAL_H
#define COLIBRI_INTERNAL_H

#if defined(__FAST_MATH__)
#error "Colibri gives the same bits everywhere; -ffast-math does not. Compile without it, and with -ffp-contract=off."
#endif
#if defined(__FLT_EVAL_METHOD__) && (__FLT_EVAL_METHOD__ == 1 || __FLT_EVAL_METHOD__ == 2)
#error "Floats must be computed as floats: on 32-bit x86 compile with -msse2 -mfpmath=sse."
#endif

#include "colibri.h"
#include "elementary.h"
#include "format.h"

#include <string.h>

/* A model whose structure has been proven; every pointer looks into the caller's read-only bytes. */
typedef struct {
    const uint8_t *bytes;
    const clb_header *header;
    const clb_port *ports;
    const clb_op *ops;
    const clb_tensor *tensors;
    const clb_layer *layers;
    const clb_expert *experts;
} clb_model;

/* Where the spaces of an operation's operands are while it runs. */
typedef struct {
    const clb_tensor *tensors;
    const uint8_t *weights; /* base of the tensors' offsets: the model, or one expert's weights */
    uint8_t *arena;         /* the context block */
    const float *input;
    float *output;
    const float *const *token_in; /* in an expert: one pointer a token */
    float *const *token_out;
} clb_frame;

/* Up to CLB_TILE rows for a kernel: one pointer a row. */
typedef struct {
    uint32_t rows;
    const float *w0, *w1; /* NULL: none */
    const float *a[CLB_TILE], *b[CLB_TILE];
    float *out[CLB_TILE];
} clb_tile;

/* validate.c */
int clb_read_header(const uint8_t *model, const clb_header **header);
int clb_validate(const uint8_t *model, uint64_t size, clb_model *parsed);
void clb_parse(const uint8_t *model, clb_model *parsed);
int clb_check_memory(const void *mem, size_t mem_size, const clb_model *parsed);
uint32_t clb_crc32(const void *data, uint64_t bytes);

/* forward.c: run one operation that is not an MoE on rows of `samples` samples */
void clb_run_op(const clb_op *op, uint32_t samples, const clb_frame *frame);

/* moe.c */
void clb_run_moe(const clb_model *model, const clb_op *op, uint32_t samples, const clb_frame *frame,
                 const colibri_context_t *ctx);

/* routing.c: experts (k) best first and their weights (k), from one token's logits (layer->experts) */
void clb_route(const clb_layer *layer, const float *logits, int32_t *experts, float *weights);

/* linear.c, elementwise.c, reduce.c: the kernels, indexed by enum clb_op */
typedef void clb_kernel(const clb_op *op, const clb_tile *tile);
clb_kernel clb_linear, clb_map1, clb_map2, clb_softmax, clb_layernorm, clb_rmsnorm, clb_reduce;

/* elementwise.c: out[i] = func(x[i]); out may be x */
void clb_unary(uint32_t func, float p0, float p1, const float *x, float *out, size_t n);

/* reduce.c: the sum of n floats `stride` apart, in the one order defined for reductions */
float clb_lane_sum(const float *x, size_t stride, size_t n);
float clb_lane_tree(const float lanes[CLB_LANES]);

static inline uint32_t clb_min(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

#endif
