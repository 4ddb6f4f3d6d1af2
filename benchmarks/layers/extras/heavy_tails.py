"""How exact int8 with its sparse outliers E is on weights with heavy tails, beside plain int8 (a scale a row)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

DEGREES = (3, 4, 5)  # of freedom of Student's t: the fewer, the heavier
_ROWS = 16  # inputs of the expert


def measure(columns: tuple[int, ...], step: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row for each degree and K: relative errors of a (K, K) matrix and of a gated expert made of three of them.

    Inputs are standard normal and unquantised, so that only the weights differ. ‖Δ‖ / ‖exact‖ throughout.
    """
    from colibri.quantize.formats import SHARE, int8

    rows = []
    for degrees in DEGREES:
        for k in columns:
            step(f"Student-t weights, df {degrees}, K {k}")
            rng = np.random.default_rng((19, degrees, k))
            exact = [(rng.standard_t(degrees, (k, k)) / np.sqrt(k)).astype(np.float32) for _ in range(3)]
            x = rng.standard_normal((_ROWS, k)).astype(np.float32)
            row: dict[str, Any] = {"degrees": degrees, "k": k}
            held = {}
            for name, share in (("plain", 0.0), ("e", SHARE)):
                stored = [int8(matrix, None, share) for matrix in exact]
                dense = [weight.dense() for weight in stored]
                row[f"{name}_weight_error"] = _error(exact[0], dense[0])
                row[f"{name}_output_error"] = _error(_expert(x, exact), _expert(x, dense))
                held[name] = stored[0].nbytes
            row["e_share"] = 1 - held["plain"] / held["e"]
            rows.append(row)
    return rows


def _expert(x: Any, weights: list[Any]) -> Any:
    gate, up, down = (w.astype(np.float64) for w in weights)
    gated = x @ gate.T
    return (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T


def _error(exact: Any, other: Any) -> float:
    return float(np.linalg.norm(other - exact) / np.linalg.norm(exact))
