/* A panel of a matrix for one tile of rows: the product, then scale and bias, written to the tile's
 * out. Compiled once for each instruction set, whose compiler turns the loops over 8 lanes into its
 * vectors. */
#include "../core/internal.h"

#ifdef __clang__
#define UNROLL_8 _Pragma("unroll")
#define UNROLL_4 _Pragma("unroll 4")
#define UNROLL_2 _Pragma("unroll 2")
#else
#define UNROLL_8 _Pragma("GCC unroll 8")
#define UNROLL_4 _Pragma("GCC unroll 4")
#define UNROLL_2 _Pragma("GCC unroll 2")
#endif

/* Where lanes are no vector, each has a register. */
#if CLB_SCALAR
#define ALL_LANES UNROLL_8 for (uint32_t lane = 0; lane < CLB_LANES; ++lane)
#define OF_PANEL  static inline
#else
#define OF_PANEL  static NOINLINE /* in panel itself, gcc keeps vectors across other calls */
#define ALL_LANES for (uint32_t lane = 0; lane < CLB_LANES; ++lane)
#endif

/* Where two blocks of 8 output rows have something; a vector that is one block reads the first. */
typedef struct {
    const void *first, *second;
} place;

/* total[row][output] += the product of `outputs` rows of a matrix, in blocks `stride` bytes apart,
 * with the tile's rows `a`; it may compute what fills the last block. The including file has one
 * for each layout, for float rows and for quantised ones (q): functions of their own, whose loops
 * have all registers. */
typedef void product(const uint8_t *blocks_at, size_t stride, uint32_t outputs,
                     const clb_tile *tile, uint32_t cols, float total[CLB_TILE][CLB_WIDTH]);
#if CLB_SCALAR && defined(CLB_FOLDED)
#define OF_MATRIX CLB_WALK
#else
#define OF_MATRIX static NOINLINE
#endif
OF_MATRIX product product_f32, product_f16, product_i8, product_q_i8, product_q_i4;

CLB_STATIC_WALK void multiply(const clb_matrix *m, const uint8_t *at, uint32_t outputs,
                              const clb_tile *tile, float total[CLB_TILE][CLB_WIDTH]) {
#define TIMES(which, its_layout, product)                                                          \
    if (USED(which, CLB_LAYOUT_##its_layout) && m->layout == CLB_LAYOUT_##its_layout) {            \
        product(at, m->stride, outputs, tile, m->cols, total);                                     \
        return;                                                                                    \
    }
    if (m->quantized) {
        TIMES(PRODUCTS_Q, ROWS8_I8, product_q_i8)
        TIMES(PRODUCTS_Q, ROWS8_I4, product_q_i4)
    } else {
        TIMES(PRODUCTS, ROWS8_F32, product_f32)
        TIMES(PRODUCTS, ROWS8_F16, product_f16)
        TIMES(PRODUCTS, ROWS8_I8, product_i8)
    }
#undef TIMES
}

/* Sums begin with what n of them start from. */
static inline void begin(float *total, const float *start, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        total[i] = start[i];
    }
}

/* The sum of a quantised row's inputs from `start` to below `end`, multiples of a group but for the
 * row's end. */
static inline UNUSED uint32_t inputs_of(const clb_quantized *x, uint32_t start, uint32_t end) {
    uint32_t sum = 0;
    for (uint32_t g = start / CLB_WEIGHT_GROUP; g < clb_ceil(end, CLB_WEIGHT_GROUP); ++g) {
        sum += (uint32_t)x->sum[g];
    }
    return sum;
}

/* A row of n sums, times scales and plus biases as `which` says. */
enum { SCALED = 1, BIASED = 2 };
OF_PANEL void finish(int which, float *out, const float *total, uint32_t n, const float *scale,
                     const float *bias) {
    const int scaled = which & SCALED;
    const int biased = which & BIASED;
    for (uint32_t i = 0; i < n; ++i) {
        const float value = scaled ? total[i] * scale[i] : total[i];
        out[i] = biased ? value + bias[i] : value;
    }
}

OF_MATRIX void panel(const clb_matrix *m, const clb_tile *tile, uint32_t first, uint32_t blocks) {
    float total[CLB_TILE][CLB_WIDTH];
    float scales[CLB_WIDTH];
    const uint32_t width = CLB_PANEL == 1 ? CLB_LANES : blocks * CLB_LANES;
    const uint32_t rows = clb_rows(tile);
    const uint32_t at = first * CLB_LANES;
    const uint32_t outputs = clb_min(m->outputs - at, width);
    const int which = (m->scaled ? SCALED : 0) | (m->bias != NULL && !m->from_bias ? BIASED : 0);
    const uint8_t *matrix = m->blocks + first * m->stride;
    const float *scale = clb_at(matrix, 0);
    const float *bias = m->bias == NULL ? NULL : m->bias + at;
    const float *const sums = m->from_bias ? bias : NULL;
    const int whole = CLB_SHARED_PRODUCTS && outputs == CLB_LANES; /* a constant number: moves */
    for (uint32_t row = 0; row < (CLB_TILE == 1 ? 1 : tile->computed); ++row) {
        UNROLL_8 for (uint32_t i = 0; i < width; ++i) { total[row][i] = 0.0f; }
        const float *start = m->adds ? tile->out[row] + at : sums;
        if (start != NULL && whole) {
            begin(total[row], start, CLB_LANES);
        } else if (start != NULL) {
            begin(total[row], start, outputs);
        }
    }
    multiply(m, matrix, outputs, tile, total);
    if (CLB_PANEL > 1 && m->scaled) { /* side by side */
        for (uint32_t b = 0; b < blocks; ++b) {
            memcpy(scales + b * CLB_LANES, matrix + b * m->stride, CLB_LANES * sizeof(float));
        }
        scale = scales;
    }
    for (uint32_t row = 0; row < rows; ++row) {
        if (whole) {
            finish(which, tile->out[row] + at, total[row], CLB_LANES, scale, bias);
        } else {
            finish(which, tile->out[row] + at, total[row], outputs, scale, bias);
        }
    }
}

/* E·x of the outputs in some rows of cells, added one by one in the order of the columns. Entries
 * come from the file unread, so their places are clamped here, not proven at load, and a cell has
 * no more of them than weights. */
static void outliers(const clb_matrix *m, const clb_tile *tile, uint32_t first, uint32_t end) {
    enum { BATCH = 64 };
    const uint32_t segments = clb_ceil(m->cols, CLB_CELL_COLS);
    const uint32_t *starts = clb_at(m->outliers, 0);
    const uint64_t index = clb_outlier_index(m->outputs, m->cols);
    const uint16_t *places = clb_at(m->outliers, index);
    const uint16_t *values = places + m->entries;
    const int quantized = m->quantized;
    for (uint32_t cell = first * segments; cell < end * segments; ++cell) {
        const uint32_t output = cell / segments * CLB_CELL_ROWS;
        const uint32_t input = cell % segments * CLB_CELL_COLS;
        const uint32_t last_output = clb_min(m->outputs - output, CLB_CELL_ROWS) - 1;
        const uint32_t last_input = clb_min(m->cols - input, CLB_CELL_COLS) - 1;
        uint32_t at = clb_min(starts[cell], m->entries);
        const uint32_t most = clb_min(m->entries - at, CLB_CELL_ROWS * CLB_CELL_COLS);
        const uint32_t stop = clb_min(starts[cell + 1], at + most);
        while (at < stop) {
            const uint32_t count = clb_min(stop - at, BATCH);
            uint32_t n[BATCH];
            uint32_t k[BATCH];
            float value[BATCH];
            float part[BATCH];
            for (uint32_t i = 0; i < count; ++i) { /* unpacked once for all rows of the tile */
                n[i] = clb_min(places[at + i] / CLB_CELL_COLS, last_output);
                k[i] = clb_min(places[at + i] % CLB_CELL_COLS, last_input);
                value[i] = clb_half(values[at + i]);
            }
            for (uint32_t row = 0; row < tile->rows; ++row) {
                float *out = tile->out[row] + output;
                const float *x = tile->a[row] + input;
                const clb_quantized quantised = clb_quantized_at(tile->a[row], m->cols);
                const int8_t *q = quantised.q + input;
                const float *scale = quantised.scale + input / CLB_ACTIVATION_GROUP;
                for (uint32_t i = 0; i < count; ++i) {
                    part[i] =
                        value[i] *
                        (quantized ? (float)q[k[i]] * scale[k[i] / CLB_ACTIVATION_GROUP] : x[k[i]]);
                }
                for (uint32_t i = 0; i < count; ++i) {
                    out[n[i]] += part[i];
                }
            }
            at += count;
        }
    }
}
