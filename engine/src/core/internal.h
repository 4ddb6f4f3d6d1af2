/* What the engine's files share: the parsed model, the tile a kernel works on, and each file's
 * entry points. */
#ifndef COLIBRI_INTERNAL_H
#define COLIBRI_INTERNAL_H

#include "arithmetic.h"
#include "colibri.h"
#include "../format/operations.h"

#include <string.h>

/* Under -ffreestanding or -fno-builtin their names are calls whatever the size; the built-in ones
 * are moves where that is known, and the same calls where it is not. */
#ifdef __GNUC__
#undef memcpy
#undef memset
#define memcpy __builtin_memcpy
#define memset __builtin_memset
#endif

#define CLB_COUNT(array) (sizeof(array) / sizeof(array)[0])

#define FORCE_INLINE static inline __attribute__((always_inline))
#define NOINLINE     __attribute__((noinline))
#define UNUSED       __attribute__((unused))

/* An exported model.c includes the engine's files as one unit (generated.h): nothing in them is
 * seen from outside. Where that takes little flash (CLB_FOLDED), what walks the program is folded
 * with its records into straight code; otherwise operations share it, and keep their records. */
#ifdef COLIBRI_GENERATED
#define CLB_INTERNAL static UNUSED
#else
#define CLB_INTERNAL
#endif
#if defined(CLB_FOLDED) && defined(__OPTIMIZE__)
#define CLB_WALK        FORCE_INLINE
#define CLB_STATIC_WALK CLB_WALK
#else
#define CLB_WALK        CLB_INTERNAL
#define CLB_STATIC_WALK static
#endif

/* Generated code says what its model uses; what it does not use is not compiled. */
#ifndef CLB_USED_UNARY
#define CLB_USED_UNARY        (~0ull)
#define CLB_USED_BINARY       (~0ull)
#define CLB_USED_PRODUCTS     (~0ull)
#define CLB_USED_PRODUCTS_Q   (~0ull)
#define CLB_USED_OUTLIERS     1
#define CLB_USED_TEXT         1                       /* a context */
#define CLB_USED_SOURCE       1                       /* a source text before the text */
#define CLB_USED_BATCH        1                       /* several samples at once */
#define CLB_USED_COMPUTED     1                       /* matrices that are no tensors */
#define CLB_GOLDEN_AT(header) (header)->golden_offset /* in the bytes at hand */
#endif

/* Generated code with many products, of one row each, calls one function for all of a format where
 * lanes are no vector. */
#ifndef CLB_SHARED_PRODUCTS
#define CLB_SHARED_PRODUCTS 0
#endif
#define USED(which, number) (CLB_USED_##which >> (number) & 1)

/* Rows a kernel is handed at once. Generated code says how many its model can need: 1, 2, 4 or
 * 8. */
#ifndef CLB_TILE
#define CLB_TILE 8u
#endif

/* Blocks of 8 output rows a product computes at once: several streams from memory and independent
 * sums. One where every byte of stack counts. */
#if defined(__x86_64__) || defined(__aarch64__)
#define CLB_PANEL 8u
#elif defined(__wasm__) || (defined(__riscv) && __riscv_xlen == 64)
#define CLB_PANEL 4u
#else
#define CLB_PANEL 1u
#endif
#define CLB_WIDTH  (CLB_PANEL * CLB_LANES) /* its outputs */
#define CLB_SCALAR (CLB_PANEL == 1u) /* loops over lanes gain nothing, and a call to memcpy costs */

/* Bytes of a group of int4 weights: 8 scales, and the nibbles of 8 rows. */
#define CLB_INT4_BYTES (CLB_LANES * (2 + CLB_WEIGHT_GROUP / 2))

/* What lies there. */
FORCE_INLINE const void *clb_at(const uint8_t *bytes, uint64_t offset) { return bytes + offset; }

/* A model whose structure has been proven; every pointer looks into the caller's read-only
 * bytes. */
typedef struct {
    const uint8_t *bytes;
    const clb_header *header;
    const clb_port *ports;
    const clb_op *ops;
    const clb_tensor *tensors;
    const clb_layer *layers;
    const clb_expert *experts;
} clb_model;

/* The tokens of an expert, in the order it sees them. A choice is (token, slot), numbered token · k
 * + slot. */
typedef struct {
    const clb_op *op; /* the MoE operation */
    const float *x;   /* base of its tokens */
    float *y;         /* base of its output; where k > 1, of the slots */
    const uint32_t *order;
    const float *weights; /* of the choices */
    uint32_t k, d_out;
} clb_routed;

/* Where the spaces of an operation's operands are while it runs. */
typedef struct {
    const clb_model *model; /* generated code has none */
    const clb_tensor *tensors;
    const uint8_t *weights; /* base of the tensors' offsets: the model, or one expert's weights */
    uint8_t *arena;         /* the context block */
    const float *input;
    float *output;
    const clb_routed *routed; /* in an expert */
    /* the first sample whose output is wanted: the operations from tail_op on begin with it */
    uint32_t tail;
    uint32_t position; /* of sample 0 in its text */
    uint32_t step;     /* of the loop that runs */
    const colibri_context_t *ctx;
} clb_frame;

/* Up to CLB_TILE rows for a kernel: one pointer a row. */
typedef struct {
    /* a product may compute more rows than there are, where that is quicker, and drop them */
    uint32_t rows, computed;
    const float *w0, *w1; /* NULL: none */
    const float *a[CLB_TILE], *b[CLB_TILE];
    float *out[CLB_TILE];
    const struct clb_kernels *kernels;
} clb_tile;

/* A row quantised to int8, inside float storage: scales, then the sum of every 32 inputs, then the
 * inputs. */
typedef struct {
    const float *scale;
    const int32_t *sum;
    const int8_t *q;
} clb_quantized;

/* A matrix and what is done with its product. */
typedef struct {
    const uint8_t *blocks;
    size_t stride;                           /* bytes of a block */
    const float *bias;                       /* NULL: none */
    const uint8_t *outliers;                 /* NULL: none */
    uint32_t layout, cols, outputs, entries; /* entries: of the outliers */
    _Bool quantized;                         /* its rows are quantised */
    _Bool scaled;                            /* blocks begin with a scale for each row */
    _Bool from_bias; /* sums start from the bias; the integer formats add it to the scaled sum */
    _Bool adds;      /* sums start from what its outputs hold */
} clb_matrix;

/* What one instruction set provides; every table gives the same bits. */
typedef struct clb_kernels {
    const char *name;
    /* writes the tile's out */
    void (*panel)(const clb_matrix *m, const clb_tile *tile, uint32_t first, uint32_t blocks);
    /* rows of cells: out += E·x */
    void (*outliers)(const clb_matrix *m, const clb_tile *tile, uint32_t first, uint32_t end);
    void (*quantize)(const float *x, float *row, uint32_t cols);
    /* out may be x */
    void (*unary)(uint32_t func, float p0, float p1, const float *x, float *out, size_t n);
    /* out may be a or b */
    void (*binary)(uint32_t func, const float *a, const float *b, float *out, size_t n);
    /* total may be value */
    void (*mix)(float weight, const float *value, float *total, size_t n, int first);
    /* whether they compute as they must: clb_sound, as they were compiled */
    int (*sound)(void);
} clb_kernels;

/* The table that simd/v128.c makes of these compiler flags, if any. */
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define CLB_V128 clb_kernels_neon_dot
#elif defined(__aarch64__) || defined(__riscv_vector) || defined(__wasm_simd128__)
#define CLB_V128 clb_kernels_v128
#endif

#ifdef COLIBRI_GENERATED
#define CLB_KERNELS(ctx)      (&MODEL_KERNELS)         /* the only ones there are */
#define CLB_PANEL_OF(kernels) ((void)(kernels), panel) /* by its name, as all that is folded */
#else
extern const clb_kernels clb_kernels_plain, clb_kernels_avx2, clb_kernels_avx512,
    clb_kernels_neon_dot;
#ifdef CLB_V128
extern const clb_kernels CLB_V128;
#endif
#define CLB_KERNELS(ctx)      ((const clb_kernels *)(ctx)->kernels)
#define CLB_PANEL_OF(kernels) (kernels)->panel
#endif

/* The n-th best this processor runs, from 0; NULL where there are no more. */
CLB_INTERNAL const clb_kernels *clb_kernels_at(uint32_t n);

/* check/measure.c: words of a record, of an operation from w0 on, are in the range that spec.py has
 * of them */
int clb_words_fit(uint32_t code, const void *record);

/* parse.c, of a header alone; check/file.c */
CLB_INTERNAL int clb_read_header(const uint8_t *model, const clb_header **header);
CLB_INTERNAL int clb_validate(const uint8_t *model, uint64_t size, clb_model *parsed);
void clb_parse(const uint8_t *model, clb_model *parsed);

/* checksum.c: of bytes behind others whose checksum is `before`; 0: there are none */
CLB_INTERNAL uint32_t clb_crc32(uint32_t before, const void *data, uint64_t bytes);

/* context.c: why a context cannot live there */
CLB_INTERNAL int clb_check_memory(const void *mem, size_t mem_size, uint64_t context_bytes);

/* context.c: a number that goes with the fields of the head that steer the engine and that no
 * caller sets */
CLB_INTERNAL uint32_t clb_seal(const colibri_context_t *ctx);

/* Run with these kernels from now on. */
static inline void clb_use_kernels(colibri_context_t *ctx, const clb_kernels *kernels) {
    ctx->kernels = kernels;
    ctx->seal = clb_seal(ctx);
}

/* forward.c, or generated code: the model's program */
CLB_WALK void clb_run_program(uint32_t samples, clb_frame *frame);

/* rowwise.c: an operation that computes each row by itself, on rows of the samples from `first` to
 * below `samples` */
typedef void clb_kernel(const clb_op *op, const clb_tile *tile);
CLB_WALK void clb_run_rows(clb_kernel *kernel, const clb_op *op, uint32_t first, uint32_t samples,
                           const clb_frame *frame);

/* rows.c: fill the next tile from row `row` of sample `sample` on, and advance them; the tensors
 * are set already. */
CLB_WALK void clb_next_tile(const clb_op *op, uint32_t samples, const clb_frame *frame,
                            uint32_t *sample, uint32_t *row, clb_tile *tile);
/* A tensor that an operation names; NULL where it names none. */
CLB_WALK const void *clb_tensor_at(const clb_frame *frame, uint32_t number);

/* Row `row` of sample `sample` of an operand; `constant` is the tensor it reads where its space is
 * `const`. */
CLB_WALK const float *clb_locate(const clb_operand *v, const clb_frame *frame,
                                 const float *constant, size_t sample, size_t row);

/* Likewise of what an operation writes: only what the validator has found to be written is written
 * through this. */
FORCE_INLINE float *clb_out_row(const clb_op *op, const clb_frame *frame, size_t sample,
                                size_t row) {
    return (float *)(uintptr_t)clb_locate(&op->out, frame, NULL, sample, row);
}

/* The memory for an operation's own use. */
FORCE_INLINE void *clb_work_at(const clb_op *op, const clb_frame *frame) {
    return frame->arena + op->work.offset;
}

/* Let a product compute what takes less time than the tile's rows alone. */
CLB_WALK void clb_pad_tile(clb_tile *tile);

/* What a pruned expert gives its `count` tokens: zeros. */
CLB_WALK void clb_no_expert(const clb_routed *routed, uint32_t count);

/* What a layer's router has besides the descriptor, a number for each expert. */
typedef struct {
    const float *bias, *scale; /* NULL: none */
    float *keys;               /* scratch of clb_key_words() */
    const clb_kernels *kernels;
} clb_gate;

/* moe.c: route and combine. `route` turns one token's logits into its k experts, best first, and
 * their weights; `program` runs expert `expert` of the model on a tile of `count` tokens. Where row
 * `token` of an operand is, whose space begins at `base`. */
typedef void clb_router(const clb_layer *layer, const clb_gate *gate, const float *logits,
                        int32_t *experts, float *weights);
typedef void clb_program(uint32_t expert, uint32_t count, clb_frame *frame);
CLB_WALK void clb_run_moe(const clb_layer *layer, const clb_op *op, clb_router *route,
                          clb_program *program, uint32_t samples, const clb_frame *frame);
CLB_WALK float *clb_row_of(const clb_operand *v, const float *base, uint32_t rows, size_t token);

/* routing.c: layer->experts logits */
CLB_WALK clb_router clb_route;

/* layout.c: bytes of 8 rows of a matrix, 0 for a layout that is none; of a model not yet proven
 * more than fit memory */
CLB_WALK uint64_t clb_block_bytes(uint32_t layout, uint32_t cols);

/* layout.c: cells, CLB_CELL_ROWS × CLB_CELL_COLS weights each, into which outliers are
 * sorted; bytes of the index of cells, which the outliers follow */
CLB_INTERNAL uint64_t clb_outlier_cells(uint32_t rows, uint32_t cols);
static inline uint64_t clb_outlier_index(uint32_t rows, uint32_t cols) {
    return 4 * (clb_outlier_cells(rows, cols) + 1);
}

/* linear.c: a matrix product, spread over the caller's threads where it is large */
CLB_WALK void clb_run_linear(const clb_op *op, uint32_t first, uint32_t samples,
                             const clb_frame *frame);

/* ops: each operation's kernel, by enum clb_op; those on all samples of a batch together */
typedef void clb_batch_kernel(const clb_op *op, uint32_t samples, const clb_frame *frame);
#define CLB_DECLARE_KERNEL(code, name) CLB_WALK clb_kernel clb_##name;
CLB_ROW_KERNELS(CLB_DECLARE_KERNEL)
#define CLB_DECLARE_BATCH_KERNEL(code, name) CLB_WALK clb_batch_kernel clb_##name;
CLB_BATCH_KERNELS(CLB_DECLARE_BATCH_KERNEL)

/* sums.c: x = exp(x - the largest), a softmax but for its divisor, their sum, which is returned;
 * without kernels one by one */
CLB_WALK float clb_exp_sum(float *x, uint32_t n, const clb_kernels *kernels);

/* sums.c: the sum of n floats `stride` apart, in the one order defined for reductions */
CLB_INTERNAL float clb_lane_sum(const float *x, size_t stride, size_t n);
CLB_INTERNAL float clb_lane_tree(const float lanes[CLB_LANES]);

/* sums.c: an exponential or sigmoid of each of x; few, which take less time one by one than as
 * vectors, or all without kernels */
CLB_WALK void clb_each(uint32_t func, float *x, uint32_t n, const clb_kernels *kernels);

static inline uint32_t clb_min(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline uint32_t clb_ceil(uint32_t n, uint32_t by) { return n / by + (n % by != 0); }

static inline uint32_t clb_rows(const clb_tile *tile) { return CLB_TILE == 1 ? 1 : tile->rows; }

/* Four inputs of a quantised row, as they lie. */
static inline int32_t clb_four(const int8_t *q) {
    int32_t four;
    memcpy(&four, q, sizeof four);
    return four;
}

/* 4-byte words of a quantised row. */
static inline uint32_t clb_quantized_floats(uint32_t cols) {
    return clb_ceil(cols, CLB_ACTIVATION_GROUP) + 9 * clb_ceil(cols, CLB_WEIGHT_GROUP);
}

static inline clb_quantized clb_quantized_at(const float *row, uint32_t cols) {
    clb_quantized r;
    r.scale = row;
    r.sum = (const int32_t *)(const void *)(row + clb_ceil(cols, CLB_ACTIVATION_GROUP));
    r.q = (const int8_t *)(const void *)(r.sum + clb_ceil(cols, CLB_WEIGHT_GROUP));
    return r;
}

/* The float16 with these bits: exact, for a float32 holds every one. */
static inline float clb_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t rest = (uint32_t)(h & 0x7FFFu) << 13;
    /* Moves the exponent; denormals included. */
    const float finite = clb_from_bits(rest) * 0x1p112f;
    return clb_from_bits(sign | (rest >= 0x0F800000u ? 0x7F800000u | rest : clb_bits(finite)));
}

#endif
