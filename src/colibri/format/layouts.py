"""Layouts of tensors in the file: 8 output rows side by side, so that a SIMD lane is one output row."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from colibri.format.spec import LANES, PAGE, align
from colibri.ir.graph import ENDLESS
from colibri.ir.weights import (
    ACTIVATION_GROUP,
    CELL_COLS,
    CELL_ROWS,
    WEIGHT_GROUP,
    Fp16Weight,
    Int4Weight,
    Int8Weight,
    Outliers,
    Weight,
    kind_of,
    loaded,
    outlier_bytes,
)

CACHE_LAYOUTS = {"fp32": "rows8_f32", "fp16": "rows8_f16", "int8": "rows8_i8"}  # of keys and values


def layout_of(weight: Weight) -> str:
    """The layout of a matrix in this format."""
    names = {"Fp16Weight": "rows8_f16", "Int8Weight": "rows8_i8", "Int4Weight": "rows8_i4"}
    return names.get(kind_of(weight)[0], "rows8_f32")


def block_bytes(layout: str, cols: int) -> int:
    """Bytes of 8 rows of a matrix."""
    if layout == "rows8_i8":
        return LANES * (4 + align(cols, 4))
    if layout == "rows8_i4":
        return LANES * -(-cols // WEIGHT_GROUP) * (2 + WEIGHT_GROUP // 2)
    return LANES * cols * {"rows8_f32": 4, "rows8_f16": 2}[layout]


def stored_size(value: Weight, layout: str) -> int:
    """How many bytes `store` gives, without reading the weight."""
    if layout == "flat":
        return 4 * prod(value.shape)
    rows, cols = value.shape
    if layout == "outliers":
        return outlier_bytes((rows, cols), kind_of(value)[1])
    return -(-rows // LANES) * block_bytes(layout, cols)


def page_bytes(cache: str, key: int, value: int) -> int:
    """Bytes of a page of one key head: keys as a matrix with a row a position, values as one with a column a position,
    and for int8 a scale for each value."""
    layout = CACHE_LAYOUTS[cache]
    values = -(-value // LANES) * block_bytes(layout, PAGE)
    return PAGE // LANES * block_bytes(layout, key) + values + (4 * PAGE if cache == "int8" else 0)


def cache_pages(context: int, window: int, samples: int) -> int:
    """Pages of a cache for texts of `context` tokens, run `samples` at a time.

    What the first token of a chunk sees through its `window` (0: everything) is still there when the last is stored.
    """
    pages = -(-context // PAGE)
    return min(pages, (window + samples - 2) // PAGE + 2) if window else pages


def delay_slots(context: int, steps: int, samples: int) -> int:
    """Positions a delay keeps: a chunk, and what its first token looks back at.

    A stream's positions wrap around at a power of two, of which they are a divisor.
    """
    slots = min(samples, context) + steps
    return 1 << (slots - 1).bit_length() if context == ENDLESS else slots


def attention_macs(heads: int, key: int, value: int, window: int, context: int) -> int:
    """Multiply-accumulates of attention for the last token of a full context."""
    return heads * (key + value) * (min(window, context) or context)


def outlier_work(rows: int, cols: int, size: int) -> int:
    """Most outliers, of `size` bytes in all, that a row meets: no cell has more than there are, or than weights."""
    cells = -(-rows // CELL_ROWS) * -(-cols // CELL_COLS)
    entries = (size - 4 * (cells + 1)) // 4  # behind the starts of its cells, and their number, 4 bytes each
    return cells * min(entries, CELL_ROWS * CELL_COLS)


def store(value: Weight, layout: str) -> bytes:
    """The bytes of a constant, or of a matrix's outliers, in `layout`; see docs/format.md."""
    value = loaded(value)
    if layout == "flat":
        return np.ascontiguousarray(value, np.float32).tobytes()
    if layout == "outliers":
        assert isinstance(value, Int8Weight | Int4Weight) and value.outliers is not None
        return _outliers(value.outliers, value.shape[1])
    if isinstance(value, Int8Weight):
        return _int8(value)
    if isinstance(value, Int4Weight):
        return _int4(value)
    blocks = _blocks(value.values if isinstance(value, Fp16Weight) else value)
    return bytes(blocks.transpose(0, 2, 1).tobytes())


def quantized_floats(cols: int) -> int:
    """4-byte words of a quantised row: a float32 scale per 128 inputs; per 32 inputs their sum (int32) and 32 int8."""
    return -(-cols // ACTIVATION_GROUP) + 9 * -(-cols // WEIGHT_GROUP)


def _blocks(matrix: Any, cols: int = 0) -> Any:
    """(rows, cols) as (blocks, 8, cols), zeros added to full blocks and to `cols` columns."""
    cols = max(cols, matrix.shape[1])
    padded = np.zeros((align(matrix.shape[0], LANES), cols), matrix.dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded.reshape(-1, LANES, cols)


def _int8(weight: Int8Weight) -> bytes:
    """A block: 8 float32 scales, then for every 4 inputs 8 rows × 4 int8."""
    q = _blocks(weight.q, align(weight.shape[1], 4))
    quads = q.reshape(len(q), LANES, -1, 4).transpose(0, 2, 1, 3).reshape(len(q), -1)
    scale = _blocks(weight.scale[:, None].astype(np.float32))[:, :, 0]
    return np.concatenate([np.ascontiguousarray(scale).view(np.int8), quads], axis=1).tobytes()


def _int4(weight: Int4Weight) -> bytes:
    """A block: for every 32 inputs 8 float16 scales, then 4 × (8 rows × 4 bytes): input 4c+i low, 16+4c+i high."""
    groups = -(-weight.shape[1] // WEIGHT_GROUP)
    nibbles = (_blocks(weight.q, groups * WEIGHT_GROUP) + 8).astype(np.uint8)  # 0 … 15; zero is 8, in padding too
    halves = nibbles.reshape(-1, LANES, groups, 2, 4, 4)  # block, row, group, half, quad, input
    packed = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).transpose(0, 2, 3, 1, 4)
    scale = _blocks(weight.scale).transpose(0, 2, 1)
    packed = packed.reshape(len(packed), groups, -1)
    return np.concatenate([np.ascontiguousarray(scale).view(np.uint8), packed], axis=2).tobytes()


def _outliers(outliers: Outliers, cols: int) -> bytes:
    """Where each cell's entries start (u32), and their number; the places in their cells (u16); the values (float16).

    Cells follow each other row by row. A cell has the first entry of every row, then the second: neighbours belong to
    different outputs, so that a processor need not wait for one sum to go on with the next.
    """
    segments = -(-cols // CELL_COLS)
    rows, columns = outliers.rows, outliers.columns.astype(np.int64)
    cell = rows // CELL_ROWS * segments + columns // CELL_COLS
    order = np.lexsort((columns, rows, cell))
    start = np.flatnonzero(np.diff(rows[order] * segments + cell[order] % segments, prepend=-1))  # of a row in a cell
    rank = np.arange(len(order)) - np.repeat(start, np.diff(start, append=len(order)))
    order = order[np.lexsort((rows[order], rank, cell[order]))]
    count = np.bincount(cell, minlength=-(-len(outliers.counts) // CELL_ROWS) * segments)
    starts = np.concatenate([[0], np.cumsum(count)]).astype("<u4")
    places = (rows % CELL_ROWS * CELL_COLS + columns % CELL_COLS)[order].astype("<u2")
    return starts.tobytes() + places.tobytes() + outliers.values[order].astype("<f2").tobytes()
