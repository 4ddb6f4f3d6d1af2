"""Conversion of a float32 matrix to the stored weight with the least output error.

int8 and int4 are W ≈ Q·S + E. E takes the entries that cost most, so the scales shrink and every other entry gains.
Both are chosen together: where an entry of E is worth `price`, a scale costs Σ min(price, energy · error²); each row
(int8) or group of 32 (int4) takes the cheapest of a few scales, and the price is the one at which E is just full.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from colibri._engine import ffi, lib
from colibri.errors import ExportError
from colibri.ir.graph import Array
from colibri.ir.weights import WEIGHT_GROUP, Fp16Weight, Int4Weight, Int8Weight, Outliers, StoredWeight, outlier_bytes

SHARE = 0.01  # of a weight's bytes, for its E

_HALF_MAX = np.float32(65504)  # largest float16
_HALF_NORMAL = np.float32(2.0**-14)  # smallest normal float16: rows below it are too fine for an E
_INT8_MAX = 1e12  # keeps every squared error far inside float32
_ENERGY_FLOOR = 0.01  # of the mean energy: an input that calibration never uses still counts a little
_SHRINK = tuple(np.float32(s) for s in (1.0, 0.94, 0.88, 0.82, 0.76, 0.7))  # of the int4 scale that holds a peak
_SAMPLE = 1 << 19  # weights on which the price of an entry is found
_CHUNK, _TURNED = 1 << 16, 1 << 19  # weights handled at once, so that they stay in the cache, or rows are long
_INT8, _INT4 = (-127, 127), (-8, 7)

Limits = tuple[int, int]


def encode(kind: str, matrix: Array, energy: Array | None, share: float) -> StoredWeight:
    """The matrix as `kind`: fp16, int8 or int4; energy and share are int8's and int4's."""
    if kind == "fp16":
        return fp16(matrix)
    return (int8 if kind == "int8" else int4)(matrix, energy, share)


def fp16(matrix: Array) -> Fp16Weight:
    """`matrix` (rows, cols) rounded to float16; raises ExportError where a value does not fit."""
    _check(matrix, float(_HALF_MAX), "fp16", "int8 or fp32")
    return Fp16Weight(matrix.astype(np.float16))


def int8(matrix: Array, energy: Array | None = None, share: float = SHARE) -> Int8Weight:
    """`matrix` (rows, cols) as ±127 with a float32 scale a row, and an E of at most `share` of these bytes.

    `energy` (cols,) is the mean square of each input; without it all inputs count alike. Raises ExportError where a
    value does not fit.
    """
    _check(matrix, _INT8_MAX, "int8", "fp32")
    rows, cols = matrix.shape
    entries = outlier_entries(rows, cols, share, "int8")
    energy = _relative(energy, cols)
    candidates = _clips(matrix, entries)[..., None] / np.float32(127)
    scale = _best_scale(matrix[:, None, :], energy[None], candidates, _INT8, entries)[:, 0]
    q, outliers = _split(matrix, energy, np.broadcast_to(scale[:, None], matrix.shape), _INT8, entries)
    return Int8Weight(q, scale, outliers)


def int4(matrix: Array, energy: Array | None = None, share: float = SHARE) -> Int4Weight:
    """`matrix` (rows, cols) as -8 … 7 with a float16 scale for 32 inputs, and an E of at most `share` of these bytes.

    `energy` as for `int8`. Raises ExportError where a value does not fit.
    """
    _check(matrix, float(_HALF_MAX), "int4", "int8 or fp32")
    rows, cols = matrix.shape
    entries = outlier_entries(rows, cols, share, "int4")
    energy = _relative(energy, cols)
    groups = -(-cols // WEIGHT_GROUP)
    padding = (0, groups * WEIGHT_GROUP - cols)
    grouped = np.pad(matrix, ((0, 0), padding)).reshape(rows, groups, WEIGHT_GROUP)
    grouped_energy = np.pad(energy, padding).reshape(groups, WEIGHT_GROUP)
    scale = _best_scale(grouped, grouped_energy, _int4_scales(grouped), _INT4, entries)
    spread = np.repeat(scale, WEIGHT_GROUP, axis=1)[:, :cols]
    q, outliers = _split(matrix, energy, spread, _INT4, entries)
    return Int4Weight(q, scale.astype(np.float16), outliers)


def outlier_entries(rows: int, cols: int, share: float, kind: str) -> int:
    """Entries of E in every `kind` ("int8", "int4") weight of this shape: as many as `share` of its bytes pays for."""
    scales = 4 * rows if kind == "int8" else 2 * rows * -(-cols // WEIGHT_GROUP)
    weight_bytes = (rows * cols if kind == "int8" else rows * cols // 2) + scales
    return max(0, min(int(share * weight_bytes - outlier_bytes((rows, cols), 0)) // 4, rows * cols))


def _check(matrix: Array, most: float, kind: str, other: str) -> None:
    peak = float(np.abs(matrix).max(initial=0))
    if not np.isfinite(peak):
        raise ExportError("a weight is NaN or infinite: train or load the model again")
    if peak > most:
        raise ExportError(f"a weight of size {peak:.6g} does not fit {kind} (at most {most:.6g}): use {other} for it")


def _relative(energy: Array | None, cols: int) -> Array:
    """Energies (cols,) with a mean of 1, none of them zero; all 1 where nothing is known."""
    mean = 0.0 if energy is None else float(energy.mean(dtype=np.float64))
    if energy is None or not np.isfinite(mean) or mean <= 0:
        return np.ones(cols, np.float32)
    return np.asarray((energy / mean + _ENERGY_FLOOR) / (1 + _ENERGY_FLOOR), np.float32)


def _clips(matrix: Array, entries: int) -> Array:
    """Magnitudes (candidates, rows) to clip at: each row's largest, and smaller ones that leave a few entries above."""
    rows, cols = matrix.shape
    deepest = min(cols - 1, 8 + 8 * entries // rows)
    ranks = [0, *sorted({int(1.3**n) for n in range(22)} & set(range(1, deepest + 1)))]
    size = np.sort(np.partition(np.abs(matrix), cols - 1 - deepest, axis=1)[:, cols - 1 - deepest :], axis=1)[:, ::-1]
    peak = size[:, :1]
    reach = np.where(peak < _HALF_NORMAL, peak, peak - _HALF_MAX)  # what an entry of E can add to the clip is limited
    return np.ascontiguousarray(np.maximum(size[:, ranks], reach).T)


def _int4_scales(weight: Array) -> Array:
    """Scales (candidates, rows, groups), exact in float16, that put a group's largest, or next, value at -8 or at 7."""
    found = np.empty((2 * (len(_SHRINK) + len(_SHRINK[::2])), *weight.shape[:2]), np.float32)
    for part in _parts(weight, _TURNED):
        columns = _turned(weight[part])
        sizes = np.abs(columns)
        largest, peak, second = columns[0].copy(), sizes[0].copy(), np.zeros_like(sizes[0])
        for value, size in zip(columns[1:], sizes[1:], strict=True):
            np.copyto(largest, value, where=size > peak)
            np.maximum(second, np.minimum(peak, size), out=second)
            np.maximum(peak, size, out=peak)
        np.copysign(second, largest, out=second)
        tops = [largest * shrink for shrink in _SHRINK] + [second * shrink for shrink in _SHRINK[::2]]
        ends = np.stack([top / end for top in tops for end in _INT4]).astype(np.float16)
        found[:, part] = ends.reshape(len(found), -1, weight.shape[1])
    return found


def _parts(weight: Array, size: int) -> Iterator[slice]:
    """Chunks of rows of (rows, groups, width) with about `size` weights each."""
    step = max(1, size // weight[0].size)
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


def _turned(weight: Array) -> Array:
    """Short groups (rows, groups, width) as (width, rows · groups): NumPy is fast on long rows only."""
    return np.ascontiguousarray(weight.reshape(-1, weight.shape[-1]).T)


def _integers(weight: Array, scale: Array, limits: Limits) -> Array:
    """The integers, as float32, nearest to `weight` over `scale`, which broadcasts to it."""
    q: Array = np.divide(weight, np.where(scale == 0, np.float32(1), scale), dtype=np.float32)
    np.rint(q, out=q)
    return np.clip(q, *limits, out=q)


def _errors(weight: Array, energy: Array, scale: Array, limits: Limits) -> Array:
    """energy · error² of every weight, without E."""
    error = _integers(weight, scale[..., None], limits)
    error *= scale[..., None]
    np.subtract(weight, error, out=error)
    error *= error
    error *= energy
    return error


def _best_scale(weight: Array, energy: Array, scales: Array, limits: Limits, entries: int) -> Array:
    """The cheapest (rows, groups) of `scales` (candidates, rows, groups) for `weight` (rows, groups, width)."""
    price = _price(weight, energy, scales, limits, entries) if entries else np.float32(np.inf)
    best = np.empty(scales.shape[1:], np.float32)
    for part in _parts(weight, _CHUNK):
        costs = _costs(weight[part], energy, scales[:, part], limits, price)
        best[part] = np.take_along_axis(scales[:, part], np.argmin(costs, axis=0)[None], 0)[0]
    return best


def _costs(weight: Array, energy: Array, scales: Array, limits: Limits, price: np.float32) -> Array:
    """Σ min(price, energy · error²) (candidates, rows, groups) over the width of `weight` (rows, groups, width).

    In C, but the numbers are those of NumPy's sums of `_errors`.
    """
    rows, groups, width = weight.shape
    arrays = [np.ascontiguousarray(a, np.float32) for a in (weight, energy, scales)]
    costs = np.empty((len(scales), rows, groups), np.float32)
    x, e, s, out = (ffi.from_buffer("float[]", a) for a in (*arrays, costs))
    even = bool((energy == 1).all())
    lib.scale_costs(x, ffi.NULL if even else e, s, out, len(scales), rows * groups, groups, width, *limits, price)
    return costs


def _price(weight: Array, energy: Array, scales: Array, limits: Limits, entries: int) -> np.float32:
    """The energy · error² above which about `entries` weights are left, each scale chosen at that price."""
    # A sample of the rows, spread over how far their peaks stand out, so that it has its share of every kind.
    flat = weight.reshape(len(weight), -1)
    order = np.argsort(np.abs(flat).max(axis=1) / np.sqrt((flat * flat).mean(axis=1) + 1e-30), kind="stable")
    count = min(len(flat), max(8, _SAMPLE // flat.shape[1]))
    rows = order[(2 * np.arange(count) + 1) * len(flat) // (2 * count)]
    errors = np.stack([_errors(weight[rows], energy, s[rows], limits) for s in scales])
    low, high = np.float64(errors.max()) * 1e-20, np.float64(errors.max())
    if high == 0:
        return np.float32(np.inf)
    for _ in range(13):  # to within 1 %
        middle = np.sqrt(low * high)
        chosen = np.argmin(np.minimum(errors, np.float32(middle)).sum(axis=-1), axis=0)
        left = np.count_nonzero(np.take_along_axis(errors, chosen[None, ..., None], 0) > middle)
        low, high = (middle, high) if left * len(flat) > entries * count else (low, middle)
    return np.float32(high)


def _split(
    matrix: Array, energy: Array, scale: Array, limits: Limits, entries: int
) -> tuple[np.ndarray[Any, np.dtype[np.int8]], Outliers | None]:
    """Q (rows, cols), and E of exactly `entries` where Q·S alone costs most; `scale` is (rows, cols)."""
    q = _integers(matrix, scale, limits)
    if entries == 0:
        return q.astype(np.int8), None
    left = matrix - q * scale
    row, col = np.divmod(_largest(left * left * energy, entries), matrix.shape[1])
    exact, step, rest = matrix[row, col], scale[row, col], left[row, col]
    # Beyond the clip E holds the whole value, and Q what float16 loses of it.
    value = np.clip(np.where(np.abs(rest) > np.abs(step), exact, rest), -_HALF_MAX, _HALF_MAX).astype(np.float16)
    q[row, col] = _integers(exact - value, step, limits)
    counts = np.bincount(row, minlength=len(matrix)).astype(np.uint32)
    return q.astype(np.int8), Outliers(counts, col.astype(np.uint32), value)


def _largest(cost: Array, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Flat places, ascending, of the `count` largest costs; of equal ones the first."""
    flat = cost.reshape(-1)
    limit = np.partition(flat, flat.size - count)[flat.size - count]
    above = np.flatnonzero(flat > limit)
    return np.sort(np.concatenate([above, np.flatnonzero(flat == limit)[: count - len(above)]]))
