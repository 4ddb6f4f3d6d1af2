"""Weight matrices in the formats the engine reads: the stored values, and the float32 matrix they stand for.

A constant of a graph is a float32 array, or one of these where it is the weight of a `linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.errors import ExportError

Floats = np.ndarray[Any, np.dtype[np.float32]]
Halves = np.ndarray[Any, np.dtype[np.float16]]
Bytes = np.ndarray[Any, np.dtype[np.int8]]

ACTIVATION_GROUP = 128  # inputs that share one activation scale
WEIGHT_GROUP = 32  # inputs that share one int4 weight scale
CELL_ROWS, CELL_COLS = 64, 1024  # weights of a cell: an entry of E is stored as its place in one, 16 bits


@dataclass(frozen=True)
class Outliers:
    """The sparse E of W ≈ Q·S + E: entries a row (`counts`), their `columns`, ascending in a row, and `values`."""

    counts: np.ndarray[Any, np.dtype[np.uint32]]
    columns: np.ndarray[Any, np.dtype[np.uint32]]
    values: Halves

    @property
    def rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The row of every entry."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def dense(self, shape: tuple[int, int]) -> Floats:
        """As a float32 matrix."""
        matrix = np.zeros(shape, np.float32)
        matrix[self.rows, self.columns] = self.values
        return matrix


def outlier_bytes(shape: tuple[int, int], entries: int) -> int:
    """Bytes of sparse outliers with this many entries for a matrix of this shape: the cell index, and 4 per entry."""
    return 4 * (-(-shape[0] // CELL_ROWS) * -(-shape[1] // CELL_COLS) + 1 + entries)


def _bytes_of(outliers: Outliers | None, shape: tuple[int, int]) -> int:
    return 0 if outliers is None else outlier_bytes(shape, len(outliers.values))


@dataclass(frozen=True)
class Fp16Weight:
    """float16 `values` (rows, cols)."""

    values: Halves

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)"""
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored numbers, padding left out."""
        return self.values.nbytes

    def dense(self) -> Floats:
        """The float32 matrix it stands for."""
        return self.values.astype(np.float32)


@dataclass(frozen=True)
class Int8Weight:
    """q (rows, cols) int8, in ±127 where it is quantised here, times `scale` (rows,) float32, plus outliers."""

    q: Bytes
    scale: Floats
    outliers: Outliers | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)"""
        return self.q.shape[0], self.q.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored numbers, padding left out."""
        return self.q.nbytes + self.scale.nbytes + _bytes_of(self.outliers, self.shape)

    def dense(self) -> Floats:
        """The float32 matrix it stands for."""
        matrix = self.q.astype(np.float32) * self.scale[:, None]
        return matrix if self.outliers is None else matrix + self.outliers.dense(self.shape)


@dataclass(frozen=True)
class Int4Weight:
    """q (rows, cols) in -8 … 7 times `scale` (rows, ceil(cols / 32)) float16, plus outliers."""

    q: Bytes
    scale: Halves
    outliers: Outliers | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)"""
        return self.q.shape[0], self.q.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored numbers, padding left out."""
        return self.q.size // 2 + self.scale.nbytes + _bytes_of(self.outliers, self.shape)

    def dense(self) -> Floats:
        """The float32 matrix it stands for."""
        scale = np.repeat(self.scale.astype(np.float32), WEIGHT_GROUP, axis=1)[:, : self.q.shape[1]]
        matrix = self.q.astype(np.float32) * scale
        return matrix if self.outliers is None else matrix + self.outliers.dense(self.shape)


StoredWeight = Fp16Weight | Int8Weight | Int4Weight


@dataclass(frozen=True, eq=False)
class Deferred:
    """A weight of known shape and format that is read, and perhaps quantised, only when it is needed.

    `kind` is the type `load` gives, `entries` the outliers it stores (-1: it has none). What a model of many gigabytes
    is made of: a graph holds it, and one weight at a time is in memory. `rows(start, stop)`, where there is one, gives
    those rows of a matrix without outliers and reads no others, so that not even one weight need be whole in memory.
    """

    shape: tuple[int, ...]
    kind: type
    load: Callable[[], Loaded]
    entries: int = -1
    rows: Callable[[int, int], Loaded] | None = None


Loaded = Floats | StoredWeight
Weight = Loaded | Deferred


def loaded(value: Weight) -> Loaded:
    """The weight itself; raises ExportError where what is read is not what was announced."""
    return _announced(value.load(), value, value.shape) if isinstance(value, Deferred) else value


def take_rows(value: Weight, start: int, stop: int) -> Loaded:
    """Rows `start` … `stop` of a matrix, outliers left out; raises ExportError like `loaded`."""
    if isinstance(value, Deferred) and value.rows is not None:
        return _announced(value.rows(start, stop), value, (stop - start, *value.shape[1:]))
    value = loaded(value)
    if isinstance(value, Fp16Weight):
        return Fp16Weight(value.values[start:stop])
    if isinstance(value, np.ndarray):
        return value[start:stop]
    if isinstance(value, Int8Weight):
        return Int8Weight(value.q[start:stop], value.scale[start:stop])
    return Int4Weight(value.q[start:stop], value.scale[start:stop])


def _announced(found: Loaded, value: Deferred, shape: tuple[int, ...]) -> Loaded:
    if (*kind_of(found), found.shape) != (*kind_of(value), shape):
        raise ExportError(f"a {kind_of(found)[0]} of shape {found.shape} was read where a {kind_of(value)[0]} of shape "
                          f"{shape} was announced")  # fmt: skip
    return found


def dense(value: Weight) -> Floats:
    """The float32 array it stands for."""
    value = loaded(value)
    return value if isinstance(value, np.ndarray) else value.dense()


def kind_of(value: Weight) -> tuple[str, int]:
    """The format of a constant, and how many outliers it stores: with its shape, all that fixes its layout."""
    if isinstance(value, Deferred):
        return value.kind.__name__, value.entries
    outliers = getattr(value, "outliers", None)
    return type(value).__name__, -1 if outliers is None else len(outliers.values)


def stackable(a: Weight, b: Weight) -> bool:
    """Whether two constants are of one shape and stored alike, so that `stack` can make one of them."""
    (kind, entries), (other, others) = kind_of(a), kind_of(b)
    return kind == other and a.shape == b.shape and (entries < 0) == (others < 0)


def stack(a: Weight, b: Weight) -> Weight:
    """The rows of `a`, then those of `b`; for biases the elements."""

    if isinstance(a, Deferred) or isinstance(b, Deferred):
        entries, more = kind_of(a)[1], kind_of(b)[1]
        shape = (a.shape[0] + b.shape[0], *a.shape[1:])
        kind = a.kind if isinstance(a, Deferred) else type(a)

        def rows(start: int, stop: int) -> Loaded:
            upper = a.shape[0]
            if start >= upper:
                return take_rows(b, start - upper, stop - upper)
            if stop <= upper:
                return take_rows(a, start, stop)
            return loaded(stack(take_rows(a, start, upper), take_rows(b, 0, stop - upper)))

        partly = entries < 0 and all(not isinstance(x, Deferred) or x.rows is not None for x in (a, b))
        return Deferred(shape, kind, lambda: loaded(stack(loaded(a), loaded(b))), -1 if entries < 0 else entries + more,
                        rows if partly and len(shape) == 2 else None)  # fmt: skip

    def both(name: str) -> Any:
        return np.concatenate([getattr(a, name), getattr(b, name)])

    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        return np.concatenate([a, b])
    if isinstance(a, Fp16Weight):
        return Fp16Weight(both("values"))
    assert isinstance(b, Int8Weight | Int4Weight)
    outliers = None
    if a.outliers is not None and b.outliers is not None:
        parts = [(r.counts, r.columns, r.values) for r in (a.outliers, b.outliers)]
        outliers = Outliers(*(np.concatenate(pair) for pair in zip(*parts, strict=True)))
    return type(a)(both("q"), both("scale"), outliers)


def check(weight: StoredWeight) -> None:
    """Raise ExportError where a weight breaks what the engine relies on."""
    problems: list[str] = []
    if isinstance(weight, Int8Weight):
        if weight.scale.shape != (weight.shape[0],) or not np.isfinite(weight.scale).all():
            problems.append("int8 scales are missing or not finite")
    elif isinstance(weight, Int4Weight):
        if weight.q.size and (weight.q.min() < -8 or weight.q.max() > 7):
            problems.append("an int4 weight is not in -8 … 7")
        if weight.scale.shape != (weight.shape[0], -(-weight.shape[1] // WEIGHT_GROUP)):
            problems.append("int4 scales have the wrong shape")
        elif not np.isfinite(weight.scale).all():
            problems.append("an int4 scale is not finite")
    elif not np.isfinite(weight.values).all():
        problems.append("a weight does not fit float16")
    outliers = getattr(weight, "outliers", None)
    if outliers is not None:
        if len(outliers.counts) != weight.shape[0] or int(outliers.counts.sum()) != len(outliers.values):
            problems.append("the counts of outliers do not add up")
        if not np.isfinite(outliers.values).all():
            problems.append("an outlier is not finite")
    if problems:
        raise ExportError(f"weight of shape {weight.shape}: {problems[0]}")
