/* Elementwise operations of one and two operands, over up to four strided axes. */
#include "internal.h"

enum { CHUNK = 32 }; /* floats gathered at once where a row is strided */

/* A row of `n` floats `stride` apart, as n contiguous ones: the row itself, or its copy in `buffer`. */
CLB_STATIC_WALK const float *gather(const float *row, size_t stride, size_t n, float *buffer)
{
    RETURN_IF(stride == 1, row);
    for (size_t i = 0; i < n; ++i) {
        buffer[i] = row[i * stride];
    }
    return buffer;
}

/* One innermost row of map1 (b is NULL) or map2. */
CLB_STATIC_WALK void map_row(const clb_kernels *kernels, const clb_op *op, const float *a, const float *b, float *out)
{
    const size_t n = op->dims[3], sa = op->sa[3], sb = op->sb[3], so = op->so[3];
    const size_t step = sa == 1 && so == 1 && (b == NULL || sb == 1) ? n : CHUNK;
    float left[CHUNK], right[CHUNK], result[CHUNK];
    for (size_t i = 0; i < n; i += step) {
        const size_t count = n - i < step ? n - i : step;
        const float *x = gather(a + i * sa, sa, count, left);
        float *y = so == 1 ? out + i : result;
        if (b == NULL || op->before != CLB_UNARY_IDENTITY) {
            kernels->unary(b == NULL ? op->func : op->before, op->p0, op->p1, x, y, count);
            x = y;
        }
        if (b != NULL) {
            kernels->binary(op->func, x, gather(b + i * sb, sb, count, right), y, count);
        }
        if (op->after != CLB_UNARY_IDENTITY) {
            kernels->unary(op->after, 0.0f, 0.0f, y, y, count);
        }
        for (size_t j = 0; so != 1 && j < count; ++j) {
            out[(i + j) * so] = result[j];
        }
    }
}

CLB_WALK void clb_map(const clb_op *op, const clb_tile *tile)
{
    const int two = op->code == CLB_OP_MAP2;
    for (uint32_t row = 0; row < tile->rows; ++row) {
        for (size_t i = 0; i < op->dims[0]; ++i) {
            for (size_t j = 0; j < op->dims[1]; ++j) {
                for (size_t k = 0; k < op->dims[2]; ++k) {
                    map_row(tile->kernels, op, tile->a[row] + i * op->sa[0] + j * op->sa[1] + k * op->sa[2],
                            two ? tile->b[row] + i * op->sb[0] + j * op->sb[1] + k * op->sb[2] : NULL,
                            tile->out[row] + i * op->so[0] + j * op->so[1] + k * op->so[2]);
                }
            }
        }
    }
}

CLB_WALK void clb_quantize(const clb_op *op, const clb_tile *tile)
{
    for (uint32_t row = 0; row < tile->rows; ++row) {
        tile->kernels->quantize(tile->a[row], tile->out[row], op->dims[0]);
    }
}
