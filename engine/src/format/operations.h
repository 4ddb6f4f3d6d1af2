/* One row for each operation. Generated from src/colibri/format/spec.py. */
#ifndef COLIBRI_OPERATIONS_H
#define COLIBRI_OPERATIONS_H

#include "format.h"

enum clb_trait {
    /* may write the rows that it reads */
    CLB_IN_PLACE = 1 << 0,
    /* its operands have axes; constants may be among them */
    CLB_HAS_AXES = 1 << 1,
    /* the rows that it reads have no place in common */
    CLB_READS_ONCE = 1 << 2,
    /* its last step is the `unary` function `func`, or its only one */
    CLB_ENDS_IN_FUNCTION = 1 << 3,
    /* in models of texts and streams only */
    CLB_KNOWS_POSITIONS = 1 << 4,
    /* outside experts, and before the tail: later tokens see what it does */
    CLB_RUNS_ALL_SAMPLES = 1 << 5,
    /* what it keeps lies behind what colibri_init clears */
    CLB_KEEPS_CACHE = 1 << 6,
    /* reads what another operation keeps for it */
    CLB_READS_KEPT = 1 << 7,
    /* stores all that it reads before it writes */
    CLB_STORES_FIRST = 1 << 8,
};

/* code, its proof clb_…_proof, how many functions it knows, traits */
#define CLB_OPERATIONS(X)                                                                          \
    X(LINEAR, linear, CLB_UNARY_COUNT, CLB_ENDS_IN_FUNCTION)                                       \
    X(LINEAR_Q, linear, CLB_UNARY_COUNT, CLB_ENDS_IN_FUNCTION)                                     \
    X(QUANTIZE, quantize, UINT16_MAX + 1, 0)                                                       \
    X(UNARY, map, CLB_UNARY_COUNT, CLB_IN_PLACE | CLB_HAS_AXES | CLB_ENDS_IN_FUNCTION)             \
    X(BINARY, map, CLB_BINARY_COUNT, CLB_IN_PLACE | CLB_HAS_AXES)                                  \
    X(SOFTMAX, norm, UINT16_MAX + 1, CLB_IN_PLACE)                                                 \
    X(LAYERNORM, norm, UINT16_MAX + 1, CLB_IN_PLACE)                                               \
    X(RMSNORM, norm, UINT16_MAX + 1, CLB_IN_PLACE)                                                 \
    X(REDUCE, reduce, CLB_REDUCE_COUNT, CLB_READS_ONCE)                                            \
    X(LOOP, loop, UINT16_MAX + 1, 0)                                                               \
    X(MOE, moe, UINT16_MAX + 1, CLB_RUNS_ALL_SAMPLES)                                              \
    X(EMBED, embed, UINT16_MAX + 1, CLB_RUNS_ALL_SAMPLES)                                          \
    X(ROPE, rope, UINT16_MAX + 1, CLB_RUNS_ALL_SAMPLES | CLB_KNOWS_POSITIONS | CLB_IN_PLACE)       \
    X(CACHE, cache, CLB_CACHE_COUNT, CLB_RUNS_ALL_SAMPLES | CLB_KNOWS_POSITIONS | CLB_KEEPS_CACHE) \
    X(ATTENTION, attention, CLB_CACHE_COUNT,                                                       \
      CLB_RUNS_ALL_SAMPLES | CLB_KNOWS_POSITIONS | CLB_KEEPS_CACHE | CLB_READS_KEPT)               \
    X(DELAY, delay, UINT16_MAX + 1, CLB_RUNS_ALL_SAMPLES | CLB_KNOWS_POSITIONS | CLB_STORES_FIRST) \
    X(DELTA, delta, UINT16_MAX + 1, CLB_RUNS_ALL_SAMPLES | CLB_KNOWS_POSITIONS)

/* what computes each row by itself: code, clb_… */
#define CLB_ROW_KERNELS(X)                                                                         \
    X(QUANTIZE, quantize)                                                                          \
    X(UNARY, map)                                                                                  \
    X(BINARY, map)                                                                                 \
    X(SOFTMAX, softmax)                                                                            \
    X(LAYERNORM, norm)                                                                             \
    X(RMSNORM, norm)                                                                               \
    X(REDUCE, reduce)

/* what runs all samples of a batch together: code, clb_… */
#define CLB_BATCH_KERNELS(X)                                                                       \
    X(EMBED, embed)                                                                                \
    X(ROPE, rope)                                                                                  \
    X(CACHE, cache)                                                                                \
    X(ATTENTION, attention)                                                                        \
    X(DELAY, delay)                                                                                \
    X(DELTA, delta)

/* Words of a record, of an operation from w0 on, that have a range. */
typedef struct {
    uint16_t code; /* an operation's, or a record's */
    uint8_t first, count;
    uint32_t least, most;
} clb_range;
enum {
    CLB_RANGES_OF_HEADER = CLB_OP_COUNT,
    CLB_RANGES_OF_PORT,
    CLB_RANGES_OF_OPERAND,
    CLB_RANGES_OF_TENSOR,
    CLB_RANGES_OF_EXPERT,
    CLB_RANGES_OF_LAYER
};

#define CLB_RANGES(X)                                                                              \
    X(CLB_OP_LINEAR, 3, 2, 1, 1073741824u)                                                         \
    X(CLB_OP_LINEAR_Q, 3, 2, 1, 1073741824u)                                                       \
    X(CLB_OP_QUANTIZE, 3, 1, 1, 536870912u)                                                        \
    X(CLB_OP_UNARY, 3, 4, 1, 1073741824u)                                                          \
    X(CLB_OP_UNARY, 7, 12, 0, 1073741824u)                                                         \
    X(CLB_OP_BINARY, 3, 4, 1, 1073741824u)                                                         \
    X(CLB_OP_BINARY, 7, 12, 0, 1073741824u)                                                        \
    X(CLB_OP_SOFTMAX, 3, 1, 1, 1073741824u)                                                        \
    X(CLB_OP_LAYERNORM, 3, 1, 1, 1073741824u)                                                      \
    X(CLB_OP_RMSNORM, 3, 1, 1, 1073741824u)                                                        \
    X(CLB_OP_REDUCE, 3, 3, 1, 1073741824u)                                                         \
    X(CLB_OP_REDUCE, 7, 3, 0, 1073741824u)                                                         \
    X(CLB_OP_REDUCE, 15, 3, 0, 1073741824u)                                                        \
    X(CLB_OP_LOOP, 3, 2, 1, 1073741824u)                                                           \
    X(CLB_OP_LOOP, 5, 1, 0, 1u)                                                                    \
    X(CLB_OP_MOE, 5, 1, 0, 1073741824u)                                                            \
    X(CLB_OP_EMBED, 3, 1, 1, 1073741824u)                                                          \
    X(CLB_OP_ROPE, 3, 1, 1, 1073741824u)                                                           \
    X(CLB_OP_CACHE, 3, 4, 1, 1073741824u)                                                          \
    X(CLB_OP_CACHE, 7, 1, 0, 1073741824u)                                                          \
    X(CLB_OP_CACHE, 8, 1, 0, 2u)                                                                   \
    X(CLB_OP_ATTENTION, 3, 4, 1, 1073741824u)                                                      \
    X(CLB_OP_ATTENTION, 7, 1, 0, 1073741824u)                                                      \
    X(CLB_OP_ATTENTION, 8, 1, 0, 2u)                                                               \
    X(CLB_OP_DELAY, 3, 2, 1, 1073741824u)                                                          \
    X(CLB_OP_DELAY, 5, 1, 0, 1073741824u)                                                          \
    X(CLB_OP_DELTA, 3, 3, 1, 1073741824u)                                                          \
    X(CLB_RANGES_OF_HEADER, 3, 1, 1, 4294967295u)                                                  \
    X(CLB_RANGES_OF_HEADER, 16, 2, 1, 4294967295u)                                                 \
    X(CLB_RANGES_OF_HEADER, 19, 2, 1, 4294967295u)                                                 \
    X(CLB_RANGES_OF_HEADER, 29, 1, 0, 1073741824u)                                                 \
    X(CLB_RANGES_OF_HEADER, 37, 1, 0, 1073741824u)                                                 \
    X(CLB_RANGES_OF_HEADER, 44, 19, 0, 0u)                                                         \
    X(CLB_RANGES_OF_PORT, 9, 1, 0, 6u)                                                             \
    X(CLB_RANGES_OF_OPERAND, 2, 2, 0, 1073741824u)                                                 \
    X(CLB_RANGES_OF_OPERAND, 5, 1, 0, 1073741824u)                                                 \
    X(CLB_RANGES_OF_TENSOR, 5, 2, 1, 1073741824u)                                                  \
    X(CLB_RANGES_OF_EXPERT, 12, 4, 0, 0u)                                                          \
    X(CLB_RANGES_OF_LAYER, 0, 1, 1, 65535u)                                                        \
    X(CLB_RANGES_OF_LAYER, 1, 1, 1, 1073741824u)                                                   \
    X(CLB_RANGES_OF_LAYER, 2, 2, 0, 4u)                                                            \
    X(CLB_RANGES_OF_LAYER, 6, 2, 1, 1073741824u)                                                   \
    X(CLB_RANGES_OF_LAYER, 8, 1, 1, 64u)                                                           \
    X(CLB_RANGES_OF_LAYER, 9, 2, 1, 1073741824u)                                                   \
    X(CLB_RANGES_OF_LAYER, 11, 1, 0, 1u)                                                           \
    X(CLB_RANGES_OF_LAYER, 12, 1, 0, 1073741824u)                                                  \
    X(CLB_RANGES_OF_LAYER, 13, 1, 0, 1u)                                                           \
    X(CLB_RANGES_OF_LAYER, 15, 1, 0, 536870912u)

#endif
