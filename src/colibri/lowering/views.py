"""Strided views of values: which values can be read without a copy, and how."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from colibri.ir.graph import Shape
from colibri.lowering.program import Operand, View


def contiguous(shape: Shape) -> tuple[int, ...]:
    """Row-major strides of `shape`."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides)) if shape else ()


def broadcast_strides(view: View, shape: Shape) -> tuple[int, ...]:
    """The view's strides when read as `shape`, 0 along the axes it repeats."""
    lead = len(shape) - len(view.shape)
    own = [0 if n == 1 else s for n, s in zip(view.shape, view.strides, strict=True)]
    return (*(0,) * lead, *own)


def collapse(shape: Shape, strides: Sequence[tuple[int, ...]]) -> tuple[Shape, list[tuple[int, ...]]]:
    """`shape` with axes of size 1 dropped and neighbours merged wherever every stride allows it."""
    dims: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            continue
        if dims and all(s[axis] == k[0] * dims[0] for s, k in zip(strides, kept, strict=True)):
            dims[0] *= shape[axis]
            continue
        dims.insert(0, shape[axis])
        for s, k in zip(strides, kept, strict=True):
            k.insert(0, s[axis])
    return tuple(dims), [tuple(k) for k in kept]


def as_rows(view: View) -> tuple[Operand, int] | None:
    """The view as equally spaced rows of contiguous elements, with their number; None where it is not that."""
    if view.shape[-1] > 1 and view.strides[-1] != 1:
        return None
    dims, (strides,) = collapse(view.shape[:-1], [view.strides[:-1]])
    if len(dims) > 1:
        return None
    return Operand(view.place, view.offset, strides[0] if dims else 0, view.step), prod(dims)


def first_row(view: View) -> Operand:
    """The view as an operand of one row, whose strides the operation has."""
    return Operand(view.place, view.offset, 0, view.step)


def indexed(view: View, axis: int, index: int) -> View:
    """One index of an axis."""
    shape, strides = (v[:axis] + v[axis + 1 :] for v in (view.shape, view.strides))
    return view.like(view.offset + index * view.strides[axis], shape, strides)


def reshaped(view: View, shape: Shape) -> View | None:
    """The same elements in the same order as `shape`, without a copy; None where that takes one."""
    dummy = np.lib.stride_tricks.as_strided(np.empty(1, np.int8), view.shape, view.strides)
    try:
        strides = dummy.reshape(shape, copy=False).strides
    except ValueError:
        return None
    return view.like(view.offset, shape, strides)


def reduction(view: View, axis: int) -> tuple[int, ...] | None:
    """Strides (outer, reduced, inner) for a reduction along `axis`; None where the view must be copied first."""
    outer, (so,) = collapse(view.shape[:axis], [view.strides[:axis]])
    inner, (si,) = collapse(view.shape[axis + 1 :], [view.strides[axis + 1 :]])
    reach = 1 + sum(s * (n - 1) for s, n in zip(view.strides, view.shape, strict=True))
    repeats = prod(view.shape) > reach  # as overlapping windows do
    if len(outer) > 1 or len(inner) > 1 or repeats or view.place.space == "const":
        return None
    return (*so, 0)[0], view.strides[axis], (*si, 0)[0]


def must(rows: tuple[Operand, int] | None) -> tuple[Operand, int]:
    assert rows is not None, "a contiguous value is always rows"
    return rows
