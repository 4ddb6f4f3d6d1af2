"""Checks of a caller's options: the wrong type or range is refused by the option's name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from colibri.errors import ExportError


def whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number from low to high."""
    plain = isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)
    if not plain or not low <= value <= high:
        raise ExportError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")
    return int(value)


def number(name: str, value: Any, low: float, high: float = math.inf) -> float:
    """A finite number from low to high."""
    plain = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not plain or not math.isfinite(value) or not low <= value <= high:
        limit = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise ExportError(f"{name} is {value!r}; it must be a number {limit}")
    return float(value)


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in allowed:
        raise ExportError(f"{name} {value!r} is not one of {', '.join(allowed)}")
    return value


def text(name: str, value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ExportError(f"{name} is {value!r}; it must be a text")
    return value


def path(name: str, value: Any) -> Path:
    """A place in the file system."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ExportError(f"{name} is {value!r}; it must be a path")
    return Path(value)


def pairs(name: str, value: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of whole numbers of at least 0."""
    try:
        found = tuple((whole(name, a, 0, 1 << 31), whole(name, b, 0, 1 << 31)) for a, b in value)
    except (TypeError, ValueError):
        raise ExportError(f"{name} is {value!r}; it must be pairs (layer, expert)") from None
    return found


__all__ = ["choice", "number", "pairs", "path", "text", "whole"]
