/* The records and enumerations of model.bin. Generated from colibri.format.spec; see docs/format.md. */
#ifndef COLIBRI_FORMAT_H
#define COLIBRI_FORMAT_H

#include <stdint.h>

/* Records are read in place from the caller's bytes. */
#if defined(__GNUC__)
#define CLB_ALIAS __attribute__((may_alias))
#else
#define CLB_ALIAS
#endif

#define CLB_MAGIC            "COLIBRI"
#define CLB_NONE             0xFFFFFFFFu
#define CLB_FORMAT_VERSION   5u
#define CLB_ALIGN_MODEL      64u
#define CLB_ALIGN_CONTEXT    64u
#define CLB_ALIGN_BUFFER     32u
#define CLB_HEAD_BYTES       128u
#define CLB_EXPERT_TILE      64u
#define CLB_LANES            8u
#define CLB_GROUP            256u
#define CLB_PAGE             64u
#define CLB_ACTIVATION_GROUP 128u
#define CLB_WEIGHT_GROUP     32u
#define CLB_LIMIT            1073741824u
#define CLB_MAX_BATCH        65536u
#define CLB_MAX_META         268435456u
#define CLB_MAX_EXPERTS      65535u
#define CLB_CELL_ROWS        64u
#define CLB_CELL_COLS        1024u

enum clb_op {
    CLB_OP_LINEAR,
    CLB_OP_LINEAR_Q,
    CLB_OP_QUANTIZE,
    CLB_OP_UNARY,
    CLB_OP_BINARY,
    CLB_OP_SOFTMAX,
    CLB_OP_LAYERNORM,
    CLB_OP_RMSNORM,
    CLB_OP_REDUCE,
    CLB_OP_LOOP,
    CLB_OP_MOE,
    CLB_OP_EMBED,
    CLB_OP_ROPE,
    CLB_OP_CACHE,
    CLB_OP_ATTENTION,
    CLB_OP_DELAY,
    CLB_OP_DELTA,
    CLB_OP_COUNT
};

enum clb_space {
    CLB_SPACE_NONE,
    CLB_SPACE_ARENA,
    CLB_SPACE_INPUT,
    CLB_SPACE_OUTPUT,
    CLB_SPACE_CONST,
    CLB_SPACE_TOKEN_IN,
    CLB_SPACE_TOKEN_OUT,
    CLB_SPACE_TOKEN_WEIGHT,
    CLB_SPACE_COUNT
};

enum clb_layout {
    CLB_LAYOUT_FLAT,
    CLB_LAYOUT_ROWS8_F32,
    CLB_LAYOUT_ROWS8_F16,
    CLB_LAYOUT_ROWS8_I8,
    CLB_LAYOUT_ROWS8_I4,
    CLB_LAYOUT_OUTLIERS,
    CLB_LAYOUT_COUNT
};

enum clb_scope { CLB_SCOPE_SHARED, CLB_SCOPE_EXPERT, CLB_SCOPE_COUNT };

enum clb_unary {
    CLB_UNARY_IDENTITY,
    CLB_UNARY_RELU,
    CLB_UNARY_LEAKY_RELU,
    CLB_UNARY_CLAMP,
    CLB_UNARY_NEG,
    CLB_UNARY_ABS,
    CLB_UNARY_SQUARE,
    CLB_UNARY_SQRT,
    CLB_UNARY_RSQRT,
    CLB_UNARY_RECIPROCAL,
    CLB_UNARY_EXP,
    CLB_UNARY_LOG,
    CLB_UNARY_EXPM1,
    CLB_UNARY_LOG1P,
    CLB_UNARY_TANH,
    CLB_UNARY_ERF,
    CLB_UNARY_SIGMOID,
    CLB_UNARY_SILU,
    CLB_UNARY_GELU,
    CLB_UNARY_GELU_TANH,
    CLB_UNARY_SOFTPLUS,
    CLB_UNARY_ELU,
    CLB_UNARY_HARDSWISH,
    CLB_UNARY_HARDSIGMOID,
    CLB_UNARY_COUNT
};

enum clb_binary {
    CLB_BINARY_ADD,
    CLB_BINARY_SUB,
    CLB_BINARY_MUL,
    CLB_BINARY_DIV,
    CLB_BINARY_MAXIMUM,
    CLB_BINARY_MINIMUM,
    CLB_BINARY_FILL,
    CLB_BINARY_COUNT
};

enum clb_reduce { CLB_REDUCE_SUM, CLB_REDUCE_MEAN, CLB_REDUCE_MAX, CLB_REDUCE_COUNT };

enum clb_score {
    CLB_SCORE_SOFTMAX,
    CLB_SCORE_SIGMOID,
    CLB_SCORE_LOGIT,
    CLB_SCORE_SQRT_SOFTPLUS,
    CLB_SCORE_SPARSE_MIXER,
    CLB_SCORE_COUNT
};

enum clb_normalize {
    CLB_NORMALIZE_NONE,
    CLB_NORMALIZE_SUM,
    CLB_NORMALIZE_SOFTMAX,
    CLB_NORMALIZE_ONE,
    CLB_NORMALIZE_CLAMPED,
    CLB_NORMALIZE_COUNT
};

enum clb_group_rule { CLB_GROUP_RULE_MAX, CLB_GROUP_RULE_TOP2, CLB_GROUP_RULE_COUNT };

enum clb_apply { CLB_APPLY_OUTPUT, CLB_APPLY_INPUT, CLB_APPLY_COUNT };

enum clb_cache { CLB_CACHE_FP32, CLB_CACHE_FP16, CLB_CACHE_INT8, CLB_CACHE_COUNT };

enum clb_mask { CLB_MASK_CAUSAL, CLB_MASK_FULL, CLB_MASK_CROSS, CLB_MASK_COUNT };

/* The first bytes of the file. */
typedef struct {
    uint8_t magic[8];
    uint32_t version, max_batch;
    uint64_t total_bytes, meta_bytes, shared_bytes, context_bytes, worst_macs, worst_bytes;
    uint32_t input_floats, output_floats, ports_offset, inputs, outputs, ops_offset, ops, main_ops,
        tensors_offset, tensors, layers_offset, layers, experts_offset, experts, golden_offset,
        golden_rows, golden_bytes, info_offset, info_bytes, meta_crc, shared_crc, context_tokens,
        tail_op, encoder_ops;
    uint64_t worst_work, cleared_bytes;
    uint32_t reserved[19], header_crc;
} CLB_ALIAS clb_header;
_Static_assert(sizeof(clb_header) == 256, "no padding");

/* One input or output of the model. */
typedef struct {
    uint8_t name[32];
    uint32_t floats, rank, dims[6];
} CLB_ALIAS clb_port;
_Static_assert(sizeof(clb_port) == 64, "no padding");

/* Where an operation finds one row of a value: offset + sample · sample_stride + row · row_stride +
 * step · step_stride. */
typedef struct {
    uint64_t offset;
    uint32_t sample_stride, row_stride, space, step_stride;
} CLB_ALIAS clb_operand;
_Static_assert(sizeof(clb_operand) == 24, "no padding");

/* One operation on `rows` rows of every sample. */
typedef struct {
    uint16_t code, func;
    uint32_t rows;
    clb_operand a, b, out, work;
    union { /* what each operation calls these words */
        struct {
            uint32_t w0, w1, w2, dims[4], strides_a[4], strides_b[4], strides_out[4];
            float alpha, beta;
        };
        struct {
            uint32_t unused_0[3];
            uint32_t floats; /* floats of a row, where an operation's own proof does not say */
        } row;
        struct {
            /* tensor (outputs, inputs); none: operand b is the matrix, in layout rows8_f32 */
            uint32_t matrix;
            uint32_t bias; /* tensor (outputs), or none */
            /* tensor: the sparse outliers E of an int8 or int4 matrix, or none */
            uint32_t outliers;
            uint32_t inputs;  /* floats of a row that is read; 1 to CLB_LIMIT */
            uint32_t outputs; /* floats of a row that is written; 1 to CLB_LIMIT */
            uint32_t unused_5[14];
            float alpha; /* first parameter of the function */
            float beta;  /* second parameter of the function */
        } linear;
        struct {
            uint32_t unused_0[3];
            uint32_t inputs; /* floats of a row; 1 to CLB_LIMIT / 2 */
        } quantize;
        struct {
            uint32_t constant_a; /* tensor: operand a, or none */
            uint32_t constant_b; /* tensor: operand b, or none */
            uint32_t unused_2[1];
            uint32_t sizes[4]; /* elements along each axis, the innermost last; 1 to CLB_LIMIT */
            uint32_t strides_a[4]; /* floats to the next element along each axis; 0 to CLB_LIMIT */
            uint32_t strides_b[4]; /* likewise; 0 to CLB_LIMIT */
            uint32_t strides_out[4]; /* likewise; 0 to CLB_LIMIT */
            float alpha;             /* first parameter of the `unary` function */
            float beta;              /* second parameter of the `unary` function */
        } map;
        struct {
            uint32_t gamma; /* tensor (size), or none */
            uint32_t beta;  /* tensor (size), or none */
            uint32_t unused_2[1];
            uint32_t size; /* floats of a row; 1 to CLB_LIMIT */
            uint32_t unused_4[15];
            float epsilon; /* added to the mean of squares */
        } norm;
        struct {
            uint32_t unused_0[3];
            uint32_t outer; /* elements before the axis that is reduced; 1 to CLB_LIMIT */
            uint32_t size;  /* elements along it; 1 to CLB_LIMIT */
            uint32_t inner; /* elements behind it; 1 to CLB_LIMIT */
            uint32_t unused_6[1];
            uint32_t from_outer; /* floats between these in a; 0 to CLB_LIMIT */
            uint32_t from_next;  /* floats between these in a; 0 to CLB_LIMIT */
            uint32_t from_inner; /* floats between these in a; 0 to CLB_LIMIT */
            uint32_t unused_10[5];
            uint32_t to_outer; /* floats between outer elements in out; 0 to CLB_LIMIT */
            uint32_t to_next;  /* of no meaning; 0 to CLB_LIMIT */
            uint32_t to_inner; /* floats between inner elements in out; 0 to CLB_LIMIT */
        } reduce;
        struct {
            uint32_t unused_0[3];
            uint32_t steps;    /* times that the body runs; 1 to CLB_LIMIT */
            uint32_t body;     /* how many of the next operations are in it; 1 to CLB_LIMIT */
            uint32_t backward; /* 1 where the last step comes first; 0 to 1 */
        } loop;
        struct {
            uint32_t layer; /* which MoE layer */
            uint32_t bias;  /* tensor (experts): the selection bias, or none */
            uint32_t scale; /* tensor (experts): a factor for each expert, or none */
            uint32_t d_in;  /* floats of a token, as the layer has them */
            uint32_t d_out; /* floats of an expert's output, likewise */
            /* floats of the experts' scratch memory, behind the workspace; 0 to CLB_LIMIT */
            uint32_t scratch;
        } moe;
        struct {
            uint32_t table; /* tensor (vocabulary, width) */
            uint32_t unused_1[2];
            uint32_t width; /* floats of a row of the table; 1 to CLB_LIMIT */
        } embed;
        struct {
            uint32_t table; /* tensor (positions, turned): half cosines, half sines */
            uint32_t unused_1[2];
            uint32_t size;   /* floats of a row; 1 to CLB_LIMIT */
            uint32_t turned; /* how many of them are turned, from the first; even */
        } rope;
        struct {
            uint32_t sinks;  /* tensor (heads): a score that has no value, or none */
            uint32_t biases; /* tensor: a bias for each head and distance, or none */
            uint32_t unused_2[1];
            uint32_t key;   /* floats of a key; 1 to CLB_LIMIT */
            uint32_t value; /* floats of a value; 1 to CLB_LIMIT */
            /* heads of keys and values; each serves rows / key_heads queries; 1 to CLB_LIMIT */
            uint32_t key_heads;
            uint32_t positions; /* positions that the cache holds, in whole pages; 1 to CLB_LIMIT */
            uint32_t window; /* positions a token sees, its own included; 0: all; 0 to CLB_LIMIT */
            uint32_t mask;   /* a `mask` value; 0 to 2 */
            uint32_t unused_9[10];
            float scale;   /* factor on the scores */
            float softcap; /* soft cap of the scores; 0: none */
        } attention;
        struct {
            uint32_t unused_0[3];
            uint32_t width; /* floats of a row; 1 to CLB_LIMIT */
            uint32_t steps; /* time steps that the first row looks back; 1 to CLB_LIMIT */
            uint32_t slots; /* time steps that are kept; 0 to CLB_LIMIT */
            uint32_t unused_6[1];
            uint32_t apart; /* time steps from a row to the next, later one */
        } delay;
        struct {
            uint32_t unused_0[3];
            uint32_t key;   /* floats of a query and of a key; 1 to CLB_LIMIT */
            uint32_t value; /* floats of a value; 1 to CLB_LIMIT */
            /* heads of queries and keys; each serves rows / key_heads values; 1 to CLB_LIMIT */
            uint32_t key_heads;
            uint32_t unused_6[13];
            float scale; /* factor on the queries */
        } delta;
    };
    uint16_t before, after;
} CLB_ALIAS clb_op;
_Static_assert(sizeof(clb_op) == 192, "no padding");

/* One weight tensor. */
typedef struct {
    uint64_t offset, bytes;
    uint32_t layout, rows, cols, scope;
} CLB_ALIAS clb_tensor;
_Static_assert(sizeof(clb_tensor) == 32, "no padding");

/* One MoE layer: how it routes and where its experts are. */
typedef struct {
    uint32_t experts, k, score, normalize;
    float scale;
    uint32_t first_expert, d_in, d_out, tile, groups, kept_groups, group_rule, capacity, apply;
    float epsilon;
    uint32_t quantized;
} CLB_ALIAS clb_layer;
_Static_assert(sizeof(clb_layer) == 64, "no padding");

/* One expert: its weights, its program, its share of the calibration tokens. */
typedef struct {
    uint64_t offset, bytes, macs;
    uint32_t crc, layer, first_op, ops, index;
    float frequency;
    uint32_t reserved[4];
} CLB_ALIAS clb_expert;
_Static_assert(sizeof(clb_expert) == 64, "no padding");

/* The head of one golden row; after it float32 input[input_floats], then u16 choices in the order
 * they are made (layer, token, slot), then zeros to a multiple of 4 bytes. */
typedef struct {
    uint32_t output_crc, choices;
} CLB_ALIAS clb_golden;
_Static_assert(sizeof(clb_golden) == 8, "no padding");

#endif
