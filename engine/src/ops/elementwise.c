/* Elementwise operations of one and two operands, over up to four strided axes. */
#include "../core/internal.h"

enum { CHUNK = 32 }; /* floats gathered at once where a row is strided */

/* A row of `n` floats `stride` apart, as n contiguous ones: the row itself, or its copy in
 * `buffer`. */
CLB_STATIC_WALK const float *gather(const float *row, size_t stride, size_t n, float *buffer) {
    if (stride == 1) return row;
    for (size_t i = 0; i < n; ++i) {
        buffer[i] = row[i * stride];
    }
    return buffer;
}

/* One innermost row of unary (b is NULL) or binary. */
CLB_STATIC_WALK void map_row(const clb_kernels *kernels, const clb_op *op, const float *a,
                             const float *b, float *out) {
    const size_t n = op->map.sizes[3];
    const size_t stride_a = op->map.strides_a[3];
    const size_t stride_b = op->map.strides_b[3];
    const size_t stride_out = op->map.strides_out[3];
    const int dense = stride_out == 1 && stride_a == 1;
    const size_t step = dense && (b == NULL || stride_b == 1) ? n : CHUNK;
    const uint32_t first = b == NULL ? op->func : op->before;
    float left[CHUNK];
    float right[CHUNK];
    float result[CHUNK];
    for (size_t i = 0; i < n; i += step) {
        const size_t count = n - i < step ? n - i : step;
        const float *x = gather(a + i * stride_a, stride_a, count, left);
        float *y = stride_out == 1 ? out + i : result;
        if (b == NULL || first != CLB_UNARY_IDENTITY) {
            kernels->unary(first, op->map.alpha, op->map.beta, x, y, count);
            x = y;
        }
        if (b != NULL) {
            const float *z = gather(b + i * stride_b, stride_b, count, right);
            kernels->binary(op->func, x, z, y, count);
        }
        if (op->after != CLB_UNARY_IDENTITY) {
            kernels->unary(op->after, 0.0f, 0.0f, y, y, count);
        }
        for (size_t j = 0; stride_out != 1 && j < count; ++j) {
            out[(i + j) * stride_out] = result[j];
        }
    }
}

/* Where a row has the innermost row (i, j, k). */
FORCE_INLINE size_t place_of(const uint32_t *strides, size_t i, size_t j, size_t k) {
    return i * strides[0] + j * strides[1] + k * strides[2];
}

CLB_WALK void clb_map(const clb_op *op, const clb_tile *tile) {
    const int two = op->code == CLB_OP_BINARY;
    const uint32_t *sizes = op->map.sizes;
    for (uint32_t row = 0; row < tile->rows; ++row) {
        for (size_t i = 0; i < sizes[0]; ++i) {
            for (size_t j = 0; j < sizes[1]; ++j) {
                for (size_t k = 0; k < sizes[2]; ++k) {
                    const float *a = tile->a[row] + place_of(op->map.strides_a, i, j, k);
                    const float *b = NULL;
                    if (two) {
                        b = tile->b[row] + place_of(op->map.strides_b, i, j, k);
                    }
                    float *out = tile->out[row] + place_of(op->map.strides_out, i, j, k);
                    map_row(tile->kernels, op, a, b, out);
                }
            }
        }
    }
}

CLB_WALK void clb_quantize(const clb_op *op, const clb_tile *tile) {
    for (uint32_t row = 0; row < tile->rows; ++row) {
        tile->kernels->quantize(tile->a[row], tile->out[row], op->quantize.inputs);
    }
}

#ifndef COLIBRI_GENERATED
#include "../check/proof.h"

/* Sizes and strides have a range. */
static int map_fits(const clb_subject *s) {
    return clb_apart(s->op->map.sizes, s->op->map.strides_out);
}

static void map_uses(const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    const clb_op *op = s->op;
    clb_strided(&uses[CLB_A], op, op->map.strides_a, CLB_ALL_AXES);
    clb_strided(&uses[CLB_OUT], op, op->map.strides_out, CLB_ALL_AXES);
    if (op->code == CLB_OP_BINARY) {
        clb_strided(&uses[CLB_B], op, op->map.strides_b, CLB_ALL_AXES);
    }
}

static uint64_t map_work(const clb_subject *s) {
    uint64_t work = s->op->rows;
    for (uint32_t axis = 0; axis < CLB_AXES; ++axis) {
        work = clb_times(work, s->op->map.sizes[axis]);
    }
    return work;
}

const clb_proof clb_map_proof = {.fits = map_fits, .uses = map_uses, .work = map_work};

static void quantize_uses(const clb_subject *s, clb_use uses[CLB_OPERANDS]) {
    const uint32_t inputs = s->op->quantize.inputs;
    clb_plain(uses, inputs, 0, clb_quantized_floats(inputs));
    uses[CLB_OUT].cols = inputs;
}

const clb_proof clb_quantize_proof = {.uses = quantize_uses};

#endif
