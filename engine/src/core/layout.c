/* Sizes of what is stored: blocks of matrices, cells of outliers. */
#include "internal.h"

CLB_WALK uint64_t clb_block_bytes(uint32_t layout, uint32_t cols) {
    switch (layout) {
    case CLB_LAYOUT_ROWS8_F32: return (uint64_t)cols * CLB_LANES * sizeof(float);
    case CLB_LAYOUT_ROWS8_F16: return (uint64_t)cols * CLB_LANES * sizeof(uint16_t);
    case CLB_LAYOUT_ROWS8_I8: return CLB_LANES * (sizeof(float) + (uint64_t)clb_ceil(cols, 4) * 4);
    case CLB_LAYOUT_ROWS8_I4: return (uint64_t)clb_ceil(cols, CLB_WEIGHT_GROUP) * CLB_INT4_BYTES;
    default: return 0;
    }
}

CLB_INTERNAL uint64_t clb_outlier_cells(uint32_t rows, uint32_t cols) {
    return (uint64_t)clb_ceil(rows, CLB_CELL_ROWS) * clb_ceil(cols, CLB_CELL_COLS);
}
