/* Products in registers, written once for all vector instruction sets. A tile of vectors × rows is held in registers, so
 * that every weight and every input loaded is used several times. Same sums in the same order as plain.c.
 *
 * The including file says what a vector is: WIDE blocks of 8 output rows, `stride` bytes apart (0 where only one is left,
 * whose copy is then computed and dropped).
 *   vf, vi                  WIDE × 8 floats, int32
 *   q8w q8x q8sum q4x q4sum     weights, inputs and sums of the integer products in whatever form suits the machine
 *   load store zero add mul broadcast(const float *) to_float(vi)
 *   f32_at f16_at(p, stride)    weights of one input, as floats
 *   bytes_at(p, stride)         32 bytes a block: 4 inputs × 8 rows
 *   byte_of(vi, i)              input i of the four, as floats
 *   q8_start(x, start, end) q8_weights(vi) q8_input(q) q8_dot(sum, weights, input) q8_end(sum)    int8: exact sums
 *   q4_start(inputs) q4_input(q) q4_dot(sum, nibbles, input) q4_end(sum, inputs)    int4: of 32 inputs whose sum is
 *                               `inputs`; nibbles are weight + 8
 *   low_nibbles(vi) high_nibbles(vi)
 *   COVER(TILE)                 the shapes of tiles, by SHAPE(TILE, rows, vectors); COVER_INT4 likewise */
#define INLINE static inline __attribute__((always_inline))
#define MOST_VECTORS (CLB_PANEL / WIDE)

enum { AHEAD = 1024 }; /* bytes a stream of weights is fetched ahead */
enum format { F32, F16, I8 };

typedef float totals[CLB_WIDTH]; /* of one row */

/* The streams of some vectors, a cache line each; one row reads them faster than it computes. */
INLINE void prefetch(const uint8_t *at, size_t stride, uint32_t vectors)
{
    UNROLL for (uint32_t b = 0; b < vectors * WIDE; ++b) {
        __builtin_prefetch(at + b * stride + AHEAD);
    }
}

INLINE void add_total(float *total, vf part)
{
    store(total, add(load(total), part));
}

INLINE vf float_weights(enum format format, const uint8_t *block, size_t stride, uint32_t k)
{
    return format == F32   ? f32_at(block + (size_t)k * CLB_LANES * 4, stride)
           : format == F16 ? f16_at(block + (size_t)k * CLB_LANES * 2, stride)
                           : byte_of(bytes_at(block + 32 + (size_t)(k / 4) * 32, stride), (int)(k % 4));
}

INLINE void float_step(enum format format, const uint8_t *w, size_t stride, uint32_t vectors, const float *const *x,
                       uint32_t rows, uint32_t k, vf chain[MOST_VECTORS][CLB_TILE])
{
    vf input[CLB_TILE];
    UNROLL for (uint32_t r = 0; r < rows; ++r) {
        input[r] = broadcast(x[r] + k);
    }
    UNROLL for (uint32_t v = 0; v < vectors; ++v) {
        const vf weight = float_weights(format, w + v * WIDE * stride, stride, k);
        UNROLL for (uint32_t r = 0; r < rows; ++r) {
            chain[v][r] = add(chain[v][r], mul(weight, input[r]));
        }
    }
}

INLINE void float_tile(enum format format, const uint8_t *w, size_t stride, uint32_t vectors, const float *const *x,
                       uint32_t rows, uint32_t start, uint32_t end, totals *total)
{
    const uint32_t each = format == F32 ? 32 : format == F16 ? 16 : 8; /* bytes of an input's weights */
    const uint32_t steps = rows == 1 ? 64 / each : 2;
    vf chain[MOST_VECTORS][CLB_TILE];
    UNROLL for (uint32_t v = 0; v < vectors; ++v) {
        UNROLL for (uint32_t r = 0; r < rows; ++r) {
            chain[v][r] = zero();
        }
    }
    uint32_t k = start;
    for (; k + steps <= end; k += steps) {
        if (rows == 1) {
            prefetch(w + (size_t)k * each, stride, vectors);
        }
        UNROLL for (uint32_t i = 0; i < steps; ++i) {
            float_step(format, w, stride, vectors, x, rows, k + i, chain);
        }
    }
    for (; k < end; ++k) {
        float_step(format, w, stride, vectors, x, rows, k, chain);
    }
    UNROLL for (uint32_t r = 0; r < rows; ++r) {
        UNROLL for (uint32_t v = 0; v < vectors; ++v) {
            add_total(total[r] + v * WIDE * CLB_LANES, chain[v][r]);
        }
    }
}

INLINE void int8_tile(const uint8_t *w, size_t stride, uint32_t vectors, const clb_record *x, uint32_t rows,
                      uint32_t start, uint32_t end, totals *total)
{
    q8sum sum[MOST_VECTORS][CLB_TILE];
    UNROLL for (uint32_t r = 0; r < rows; ++r) {
        const q8sum first = q8_start(&x[r], start, end);
        UNROLL for (uint32_t v = 0; v < vectors; ++v) {
            sum[v][r] = first;
        }
    }
    TWICE for (uint32_t k = start; k < end; k += 4) {
        if (rows == 1 && k % 8 == 0) {
            prefetch(w + 32 + (size_t)k * CLB_LANES, stride, vectors);
        }
        q8w weight[MOST_VECTORS];
        UNROLL for (uint32_t v = 0; v < vectors; ++v) {
            weight[v] = q8_weights(bytes_at(w + v * WIDE * stride + 32 + (size_t)k * CLB_LANES, stride));
        }
        UNROLL for (uint32_t r = 0; r < rows; ++r) {
            const q8x input = q8_input(x[r].q + k);
            UNROLL for (uint32_t v = 0; v < vectors; ++v) {
                sum[v][r] = q8_dot(sum[v][r], weight[v], input);
            }
        }
    }
    UNROLL for (uint32_t r = 0; r < rows; ++r) {
        const vf scale = broadcast(x[r].scale + start / CLB_ACTIVATION_GROUP);
        UNROLL for (uint32_t v = 0; v < vectors; ++v) {
            add_total(total[r] + v * WIDE * CLB_LANES, mul(to_float(q8_end(sum[v][r])), scale));
        }
    }
}

INLINE void int4_tile(const uint8_t *w, size_t stride, uint32_t vectors, const clb_record *x, uint32_t rows,
                      uint32_t start, uint32_t end, totals *total)
{
    vf inner[MOST_VECTORS][CLB_TILE];
    UNROLL for (uint32_t v = 0; v < vectors; ++v) {
        UNROLL for (uint32_t r = 0; r < rows; ++r) {
            inner[v][r] = zero();
        }
    }
    for (uint32_t g = start / CLB_WEIGHT_GROUP; g < clb_ceil(end, CLB_WEIGHT_GROUP); ++g) {
        UNROLL for (uint32_t v = 0; v < vectors; ++v) {
            const uint8_t *group = w + v * WIDE * stride + (size_t)g * (CLB_LANES * 18);
            if (rows == 1) {
                prefetch(group, stride, 1);
                prefetch(group + 64, stride, 1);
            }
            const vf scale = f16_at(group, stride);
            vi low[4], high[4];
            UNROLL for (uint32_t c = 0; c < 4; ++c) {
                const vi both = bytes_at(group + 16 + (size_t)c * 32, stride);
                low[c] = low_nibbles(both);
                high[c] = high_nibbles(both);
            }
            UNROLL for (uint32_t r = 0; r < rows; ++r) {
                const int8_t *q = x[r].q + (size_t)g * CLB_WEIGHT_GROUP;
                q4sum sum = q4_start(x[r].sum[g]);
                UNROLL for (uint32_t c = 0; c < 4; ++c) {
                    sum = q4_dot(sum, low[c], q4_input(q + c * 4));
                    sum = q4_dot(sum, high[c], q4_input(q + 16 + c * 4));
                }
                inner[v][r] = add(inner[v][r], mul(to_float(q4_end(sum, x[r].sum[g])), scale));
            }
        }
    }
    UNROLL for (uint32_t r = 0; r < rows; ++r) {
        const vf scale = broadcast(x[r].scale + start / CLB_ACTIVATION_GROUP);
        UNROLL for (uint32_t v = 0; v < vectors; ++v) {
            add_total(total[r] + v * WIDE * CLB_LANES, mul(inner[v][r], scale));
        }
    }
}

/* One group of inputs at a time, whose weights stay in the first cache while all rows of the tile pass over them. All rows
 * are covered with tiles of constant size, TILE(first vector, vectors, stride, first row, rows). */
#define SHAPE(TILE, nr, nv)                                                                                            \
    for (; (nr) <= CLB_TILE && row + (nr) <= rows; row += (nr)) {                                                                          \
        uint32_t v = 0;                                                                                                \
        for (; v + (nv) <= full; v += (nv)) {                                                                          \
            TILE(v, nv, stride, row, nr);                                                                              \
        }                                                                                                              \
        for (; v * WIDE < blocks; ++v) {                                                                               \
            TILE(v, 1, v < full ? stride : 0, row, nr);                                                                \
        }                                                                                                              \
    }
#define GROUPS(COVER, TILE, group)                                                                                          \
    for (uint32_t start = 0; start < cols; start += (group)) {                                                         \
        const uint32_t end = start + clb_min(cols - start, group), rows = tile->computed;                              \
        const uint32_t blocks = clb_ceil(outputs, CLB_LANES), full = blocks / WIDE;                                    \
        uint32_t row = 0;                                                                                              \
        COVER(TILE)                                                                                                    \
    }
#define ARGUMENTS                                                                                                      \
    const uint8_t *matrix, size_t stride, uint32_t outputs, const clb_tile *tile, uint32_t cols,                       \
        float total[CLB_TILE][CLB_WIDTH]
#define VECTOR(v) matrix + (size_t)(v) * WIDE * stride
#define TOTAL(v, row) (totals *)(void *)(total[row] + (v) * WIDE * CLB_LANES)
#define FLOAT_TILE(v, nv, step, row, nr)                                                                               \
    float_tile(format, VECTOR(v), step, nv, tile->a + (row), nr, start, end, TOTAL(v, row))
#define INT8_TILE(v, nv, step, row, nr) int8_tile(VECTOR(v), step, nv, x + (row), nr, start, end, TOTAL(v, row))
#define INT4_TILE(v, nv, step, row, nr) int4_tile(VECTOR(v), step, nv, x + (row), nr, start, end, TOTAL(v, row))

#define FLOAT_PRODUCT(name, its_format)                                                                                \
    static void name(ARGUMENTS)                                                                                        \
    {                                                                                                                  \
        const enum format format = its_format;                                                                         \
        GROUPS(COVER, FLOAT_TILE, CLB_GROUP)                                                                                  \
    }
#define QUANTIZED_PRODUCT(name, COVER, TILE)                                                                           \
    static void name(ARGUMENTS)                                                                                        \
    {                                                                                                                  \
        clb_record x[CLB_TILE];                                                                                        \
        for (uint32_t i = 0; i < tile->computed; ++i) {                                                                \
            x[i] = clb_record_at(tile->a[i], cols);                                                                    \
        }                                                                                                              \
        GROUPS(COVER, TILE, CLB_ACTIVATION_GROUP)                                                                      \
    }

FLOAT_PRODUCT(product_f32, F32)
FLOAT_PRODUCT(product_f16, F16)
FLOAT_PRODUCT(product_i8, I8)
QUANTIZED_PRODUCT(product_q_i8, COVER, INT8_TILE)
QUANTIZED_PRODUCT(product_q_i4, COVER_INT4, INT4_TILE)
