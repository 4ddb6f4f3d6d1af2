/* Products in registers, written once for all vector instruction sets. A tile of vectors × rows is
 * held in registers, so that every weight and every input loaded is used several times. Same sums
 * in the same order as plain.c.
 *
 * The including file says what a vector is: WIDE blocks of 8 output rows, `stride` bytes apart (0
 * where only one is left, whose copy is then computed and dropped).
 *   vf, vi                  WIDE × 8 floats, int32
 *   q8w q8x q8sum q4x q4sum     weights, inputs and sums of the integer products in whatever form
 *                               suits the machine
 *   add mul broadcast(const float *) to_float(vi)
 *   add_to(float *, vf)         to what lies there
 *   f32_at f16_at(place)        weights of one input, as floats
 *   bytes_at(place)             32 bytes a block: 4 inputs × 8 rows
 *   byte_of(vi, i)              input i of the four, as floats
 *   q8_start(x, start, end) q8_weights(vi) q8_input(q) q8_dot(sum, weights, input) q8_end(sum)
 *                               int8: exact sums, of a row's inputs from `start` to below `end`
 *   q4_start(inputs) q4_input(q) q4_dot(sum, nibbles, input) q4_end(sum)
 *                               int4: likewise; nibbles are weight + 8
 *   low_nibbles(vi) high_nibbles(vi)
 *   COVER(TILE)                 the shapes of tiles, by SHAPE(TILE, rows, vectors); COVER_INT4
 *                               likewise */
#define MOST_VECTORS (CLB_PANEL / WIDE)

/* Bytes a stream of weights is fetched ahead, beyond its end in the next tile's. */
enum { AHEAD = 1024 };
enum format { F32, F16, I8 };

/* Of a tile. */
#define EACH_ROW    UNROLL_8 for (uint32_t r = 0; r < rows; ++r)
#define EACH_VECTOR UNROLL_8 for (uint32_t v = 0; v < vectors; ++v)

typedef float totals[CLB_WIDTH]; /* of one row */

/* What to fetch while a tile of some vectors is at byte `at` of its streams; short ones pass faster
 * than memory answers. */
FORCE_INLINE const uint8_t *ahead_of(const uint8_t *w, size_t at, size_t stride, uint32_t vectors) {
    return w + (stride <= 2 * AHEAD   ? 16 * AHEAD
                : at + AHEAD < stride ? AHEAD
                                      : AHEAD + (vectors * WIDE - 1) * stride);
}

/* The streams of some vectors, a cache line each; one row reads them faster than it computes. */
FORCE_INLINE void prefetch(const uint8_t *at, size_t stride, uint32_t vectors) {
    UNROLL_8 for (uint32_t b = 0; b < vectors * WIDE; ++b) { __builtin_prefetch(at + b * stride); }
}

/* total[r][v] += part of every row r and vector v, after `prepare` for the row. */
#define ADD_TOTALS(prepare, part)                                                                  \
    EACH_ROW {                                                                                     \
        prepare;                                                                                   \
        EACH_VECTOR { add_to(total[r] + v * WIDE * CLB_LANES, part); }                             \
    }

FORCE_INLINE place both_at(const uint8_t *first, size_t stride) {
    return (place){first, first + stride};
}

FORCE_INLINE vf float_weights(enum format format, const uint8_t *block, size_t stride, uint32_t k) {
    return format == F32   ? f32_at(both_at(block + (size_t)k * CLB_LANES * 4, stride))
           : format == F16 ? f16_at(both_at(block + (size_t)k * CLB_LANES * 2, stride))
                           : byte_of(bytes_at(both_at(block + 32 + (size_t)(k / 4) * 32, stride)),
                                     (int)(k % 4));
}

FORCE_INLINE void float_step(enum format format, const uint8_t *w, size_t stride, uint32_t vectors,
                             const float *const *x, uint32_t rows, uint32_t k,
                             vf chain[MOST_VECTORS][CLB_TILE]) {
    vf input[CLB_TILE];
    EACH_ROW { input[r] = broadcast(x[r] + k); }
    EACH_VECTOR {
        const vf weight = float_weights(format, w + v * WIDE * stride, stride, k);
        EACH_ROW { chain[v][r] = add(chain[v][r], mul(weight, input[r])); }
    }
}

FORCE_INLINE void float_tile(enum format format, const uint8_t *w, size_t stride, uint32_t vectors,
                             const float *const *x, uint32_t rows, uint32_t start, uint32_t end,
                             totals *total) {
    const uint32_t each = format == F32   ? 32
                          : format == F16 ? 16
                                          : 8; /* bytes of an input's weights */
    const uint32_t steps = rows == 1 ? 64 / each : 2;
    const uint8_t *ahead = ahead_of(w, (size_t)start * each, stride, vectors);
    vf chain[MOST_VECTORS][CLB_TILE] = {0};
    uint32_t k = start;
    for (; k + steps <= end; k += steps) {
        if (rows == 1) {
            prefetch(ahead + (size_t)k * each, stride, vectors);
        }
        UNROLL_8 for (uint32_t i = 0; i < steps; ++i) {
            float_step(format, w, stride, vectors, x, rows, k + i, chain);
        }
    }
    for (; k < end; ++k) {
        float_step(format, w, stride, vectors, x, rows, k, chain);
    }
    ADD_TOTALS((void)0, chain[v][r])
}

FORCE_INLINE void int8_tile(const uint8_t *w, size_t stride, uint32_t vectors,
                            const clb_quantized *x, uint32_t rows, uint32_t start, uint32_t end,
                            totals *total) {
    const uint8_t *ahead = ahead_of(w, (size_t)start * CLB_LANES, stride, vectors);
    q8sum sum[MOST_VECTORS][CLB_TILE];
    EACH_ROW {
        const q8sum first = q8_start(x + r, start, end);
        EACH_VECTOR { sum[v][r] = first; }
    }
    UNROLL_2 for (uint32_t k = start; k < end; k += 4) {
        if (rows == 1 && k % 8 == 0) {
            prefetch(ahead + 32 + (size_t)k * CLB_LANES, stride, vectors);
        }
        q8w weight[MOST_VECTORS];
        EACH_VECTOR {
            weight[v] = q8_weights(
                bytes_at(both_at(w + v * WIDE * stride + 32 + (size_t)k * CLB_LANES, stride)));
        }
        EACH_ROW {
            const q8x input = q8_input(x[r].q + k);
            EACH_VECTOR { sum[v][r] = q8_dot(sum[v][r], weight[v], input); }
        }
    }
    ADD_TOTALS(const vf scale = broadcast(x[r].scale + start / CLB_ACTIVATION_GROUP),
               mul(to_float(q8_end(sum[v][r])), scale))
}

FORCE_INLINE void int4_tile(const uint8_t *w, size_t stride, uint32_t vectors,
                            const clb_quantized *x, uint32_t rows, uint32_t start, uint32_t end,
                            totals *total) {
    const uint8_t *ahead =
        ahead_of(w, (size_t)start / CLB_WEIGHT_GROUP * CLB_INT4_BYTES, stride, vectors);
    vf inner[MOST_VECTORS][CLB_TILE] = {0};
    for (uint32_t g = start / CLB_WEIGHT_GROUP; g < clb_ceil(end, CLB_WEIGHT_GROUP); ++g) {
        EACH_VECTOR {
            const size_t at = v * WIDE * stride + (size_t)g * CLB_INT4_BYTES;
            const uint8_t *group = w + at;
            for (size_t line = 0; rows == 1 && line < CLB_INT4_BYTES; line += 64) {
                prefetch(ahead + at + line, stride, 1);
            }
            const vf scale = f16_at(both_at(group, stride));
            vi low[4];
            vi high[4];
            UNROLL_8 for (uint32_t c = 0; c < 4; ++c) {
                const vi both = bytes_at(both_at(group + 16 + (size_t)c * 32, stride));
                low[c] = low_nibbles(both);
                high[c] = high_nibbles(both);
            }
            EACH_ROW {
                const int8_t *q = x[r].q + (size_t)g * CLB_WEIGHT_GROUP;
                q4sum sum = q4_start((uint32_t)x[r].sum[g]);
                UNROLL_8 for (uint32_t c = 0; c < 4; ++c) {
                    sum = q4_dot(sum, low[c], q4_input(q + c * 4));
                    sum = q4_dot(sum, high[c], q4_input(q + 16 + c * 4));
                }
                inner[v][r] = add(inner[v][r], mul(to_float(q4_end(sum)), scale));
            }
        }
    }
    ADD_TOTALS(const vf scale = broadcast(x[r].scale + start / CLB_ACTIVATION_GROUP),
               mul(inner[v][r], scale))
}

/* All rows are covered with tiles of constant size. */
#define SHAPE(TILE, nr, nv)                                                                        \
    for (; (nr) <= CLB_TILE && row + (nr) <= rows; row += (nr)) {                                  \
        uint32_t v = 0;                                                                            \
        for (; v + (nv) <= full; v += (nv)) {                                                      \
            TILE(VECTOR(v), stride, nv, x + row, nr, start, end, TOTAL(v, row));                   \
        }                                                                                          \
        for (; v * WIDE < blocks; ++v) {                                                           \
            TILE(VECTOR(v), v < full ? stride : 0, 1, x + row, nr, start, end, TOTAL(v, row));     \
        }                                                                                          \
    }
#define VECTOR(v)     (matrix + (size_t)(v) * WIDE * stride)
#define TOTAL(v, row) ((totals *)(void *)(total[row] + (v) * WIDE * CLB_LANES))
#define F32_TILE(...) float_tile(F32, __VA_ARGS__)
#define F16_TILE(...) float_tile(F16, __VA_ARGS__)
#define I8_TILE(...)  float_tile(I8, __VA_ARGS__)

/* The rows `x` of a product. */
#define FLOATS const float *const *x = tile->a;
#define QUANTIZED                                                                                  \
    clb_quantized x[CLB_TILE];                                                                     \
    for (uint32_t i = 0; i < tile->computed; ++i) {                                                \
        x[i] = clb_quantized_at(tile->a[i], cols);                                                 \
    }

/* One group of inputs at a time, whose weights stay in the first cache while all rows of the tile
 * pass over them. */
#define PRODUCT(name, ROWS, group, COVER, TILE)                                                    \
    OF_MATRIX void name(const uint8_t *matrix, size_t stride, uint32_t outputs,                    \
                        const clb_tile *tile, uint32_t cols, float total[CLB_TILE][CLB_WIDTH]) {   \
        ROWS                                                                                       \
        for (uint32_t start = 0; start < cols; start += (group)) {                                 \
            const uint32_t end = start + clb_min(cols - start, group);                             \
            const uint32_t rows = tile->computed;                                                  \
            const uint32_t blocks = clb_ceil(outputs, CLB_LANES);                                  \
            const uint32_t full = blocks / WIDE;                                                   \
            uint32_t row = 0;                                                                      \
            COVER(TILE)                                                                            \
        }                                                                                          \
    }

PRODUCT(product_f32, FLOATS, CLB_GROUP, COVER, F32_TILE)
PRODUCT(product_f16, FLOATS, CLB_GROUP, COVER, F16_TILE)
PRODUCT(product_i8, FLOATS, CLB_GROUP, COVER, I8_TILE)
PRODUCT(product_q_i8, QUANTIZED, CLB_ACTIVATION_GROUP, COVER, int8_tile)
PRODUCT(product_q_i4, QUANTIZED, CLB_ACTIVATION_GROUP, COVER_INT4, int4_tile)
