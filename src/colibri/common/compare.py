"""Differences between the results of two programs: every comparison an export depends on goes through here.

Two NaNs, or two equal infinities, agree but show nothing: only finite numbers are evidence, and a
comparison without evidence has failed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Numbers = np.ndarray[Any, np.dtype[Any]]


class Comparison(NamedTuple):
    """The largest |difference| over the largest |expected|, and the rows in which finite numbers were compared."""

    error: float
    rows: int

    def within(self, tolerance: float) -> bool:
        """Whether there was something to compare, and it agrees."""
        return self.rows > 0 and self.error <= tolerance


def compare(expected: Numbers, ours: Numbers) -> Comparison:
    """Compare results (rows, …) of one shape; the error is infinite where one has a number and the other has not."""
    if expected.shape != ours.shape:
        return Comparison(float("inf"), 0)
    finite = np.isfinite(expected)
    rows = int(finite.reshape(len(finite), -1).any(1).sum()) if finite.size else 0
    same = np.where(finite, np.isfinite(ours), (expected == ours) | (np.isnan(expected) & np.isnan(ours)))
    if not same.all():
        return Comparison(float("inf"), rows)
    want = np.where(finite, expected, 0).astype(np.float64)
    difference = np.abs(want - np.where(finite, ours, 0)).max(initial=0)
    return Comparison(float(difference / max(float(np.abs(want).max(initial=0)), 1e-30)), rows)


def finite_rows(*arrays: Numbers) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows hold neither NaN nor infinity in any of the arrays (rows, …)."""
    each = [np.isfinite(x).reshape(len(x), -1).all(1) for x in arrays]
    return np.asarray(np.logical_and.reduce(each), np.bool_)


__all__ = ["Comparison", "compare", "finite_rows"]
