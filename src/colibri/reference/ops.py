"""Reference of every operation, to the last bit: the executable specification of the engine's arithmetic.

Only float32 additions, subtractions, multiplications, divisions and square roots, each rounded to nearest even, in the
order written here; see docs/design.md, "One answer everywhere". Arrays carry the batch first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from colibri.format.spec import GROUP, LANES
from colibri.ir.graph import Array, Router
from colibri.ir.weights import ACTIVATION_GROUP, WEIGHT_GROUP, Fp16Weight, Int4Weight, Int8Weight, Loaded, Outliers
from colibri.reference import elementary

F = np.float32


def linear(x: Array, weight: Loaded, bias: Array | None, activations: str = "int8") -> Array:
    """y[…, n] = bias[n] + Σ_k weight[n, k]·x[…, k], in the order and precision the weight's format prescribes.

    `activations` says, for int8 weights, whether x is quantised to int8 first or read as `float`.
    """
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, Int8Weight | Int4Weight):
        if isinstance(weight, Int4Weight):
            q, scale = quantize_rows(rows)
            y, seen = _dot_int4(q, scale, weight), _seen(q, scale)
        elif activations == "int8":
            q, scale = quantize_rows(rows)
            y, seen = _dot_int8(q, scale, weight) * weight.scale, _seen(q, scale)
        else:
            y, seen = _chains(np.zeros((len(rows), len(weight.q)), F), rows, weight.q.astype(F)) * weight.scale, rows
        y = y if bias is None else y + bias
        if weight.outliers is not None:
            y = _add_outliers(y, seen, weight.outliers)
    else:
        matrix = weight.dense() if isinstance(weight, Fp16Weight) else weight
        start = np.broadcast_to(F(0) if bias is None else bias, (len(rows), len(matrix))).astype(F)
        y = _chains(start, rows, matrix)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _chains(total: Array, rows: Array, matrix: Array) -> Array:
    """total + rows·matrixᵀ: one chain from +0 per group of 256 inputs, the groups added in order."""
    columns = np.ascontiguousarray(matrix.T)
    for start in range(0, rows.shape[1], GROUP):
        chain = np.zeros_like(total)
        for k in range(start, min(start + GROUP, rows.shape[1])):
            chain = chain + rows[:, k, None] * columns[k]
        total = total + chain
    return total


def quantize_rows(rows: Array) -> tuple[np.ndarray[Any, np.dtype[np.int8]], Array]:
    """Rows (n, cols) as int8 q (n, cols) and scales (n, groups): in each group of 128, scale = max|x| / 127.

    q is x·(127 / max|x|) rounded to nearest even; the factor is rounded too, so that the largest may come out a little
    above 127. Where that is not below 127.5, as for infinity, or where the factor overflows, q is 0. A NaN or infinity
    in a group makes its scale, and so every result, NaN or infinite.
    """
    groups = -(-rows.shape[1] // ACTIVATION_GROUP)
    q = np.zeros(rows.shape, np.int8)
    scale = np.zeros((len(rows), groups), F)
    for g in range(groups):
        part = rows[:, g * ACTIVATION_GROUP : (g + 1) * ACTIVATION_GROUP]
        size = np.abs(part).max(axis=1)  # NaN where there is one
        scale[:, g] = size / F(127)
        scaled = part * np.where(size > 0, F(127) / size, F(0))[:, None]
        kept = np.where(np.abs(scaled) < F(127.5), scaled, F(0))
        q[:, g * ACTIVATION_GROUP : (g + 1) * ACTIVATION_GROUP] = np.rint(kept).astype(np.int8)
    return q, scale


def _dot_int8(q: Any, scale: Array, weight: Int8Weight) -> Array:
    """Σ over groups, in order, of (float of the exact integer sum) · activation scale."""
    total = np.zeros((len(q), weight.shape[0]), F)
    for g in range(scale.shape[1]):
        part = slice(g * ACTIVATION_GROUP, (g + 1) * ACTIVATION_GROUP)
        total = total + _exact(q[:, part], weight.q[:, part]) * scale[:, g, None]
    return total


def _dot_int4(q: Any, scale: Array, weight: Int4Weight) -> Array:
    """Like int8, the integer sums taken over 32 inputs and multiplied by the weight's scale for them first."""
    total = np.zeros((len(q), weight.shape[0]), F)
    halves = weight.scale.astype(F)
    for g in range(scale.shape[1]):
        inner = np.zeros_like(total)
        for start in range(g * ACTIVATION_GROUP, min((g + 1) * ACTIVATION_GROUP, q.shape[1]), WEIGHT_GROUP):
            part = slice(start, min(start + WEIGHT_GROUP, (g + 1) * ACTIVATION_GROUP))
            inner = inner + _exact(q[:, part], weight.q[:, part]) * halves[:, start // WEIGHT_GROUP]
        total = total + inner * scale[:, g, None]
    return total


def _exact(a: Any, b: Any) -> Array:
    """a·bᵀ of small integers as float32; at most 128·127·127 < 2²⁴, so every step is exact."""
    return np.asarray(a.astype(np.float64) @ b.astype(np.float64).T, F)


def _seen(q: Any, scale: Array) -> Array:
    """The activations as the integers stand for them."""
    return np.asarray(q.astype(F) * np.repeat(scale, ACTIVATION_GROUP, axis=1)[:, : q.shape[1]], F)


def _add_outliers(y: Array, x: Array, outliers: Outliers) -> Array:
    """y + E·x: an output's entries are added one by one, in the order of their columns."""
    y = y.copy()
    first = np.cumsum(outliers.counts, dtype=np.int64) - outliers.counts
    values = outliers.values.astype(F)
    for n in range(int(outliers.counts.max(initial=0))):
        rows = np.flatnonzero(outliers.counts > n)
        entry = first[rows] + n
        y[:, rows] = y[:, rows] + values[entry] * x[:, outliers.columns[entry]]
    return y


def lane_sum(x: Array, axis: int) -> Array:
    """The sum along `axis`: 8 strided partial sums from +0, then ((p0+p4)+(p2+p6)) + ((p1+p5)+(p3+p7))."""
    moved = np.moveaxis(x, axis, 0)
    lanes = np.zeros((LANES, *moved.shape[1:]), F)
    for start in range(0, len(moved), LANES):
        part = moved[start : start + LANES]
        lanes[: len(part)] = lanes[: len(part)] + part
    four = lanes[:4] + lanes[4:]
    two = four[:2] + four[2:]
    return np.asarray(two[0] + two[1], F)


def running_max(x: Array, axis: int) -> Array:
    """The largest element along `axis`, scanned from -inf; NaN never replaces a number."""
    moved = np.moveaxis(x, axis, 0)
    best = np.full(moved.shape[1:], -np.inf, F)
    for row in moved:
        best = np.where(row > best, row, best)
    return best


def reduce(x: Array, func: str, axis: int) -> Array:
    """One axis reduced: `sum`, `mean` (sum divided by the count), or `max` (a NaN stays)."""
    if func == "max":
        moved = np.moveaxis(x, axis, 0)
        best = moved[0]
        for row in moved[1:]:
            best = np.where((row > best) | (row != row), row, best)
        return np.asarray(best, F)
    total = lane_sum(x, axis)
    return total if func == "sum" else np.asarray(total / F(x.shape[axis]), F)


def softmax(x: Array) -> Array:
    """exp(x - max) divided by its sum, over the last axis."""
    e = elementary.exp(x - running_max(x, -1)[..., None])
    return np.asarray(e / lane_sum(e, -1)[..., None], F)


def _affine(y: Array, gamma: Array | None, beta: Array | None) -> Array:
    y = y if gamma is None else y * gamma
    return y if beta is None else y + beta


def layernorm(x: Array, gamma: Array | None, beta: Array | None, eps: float) -> Array:
    """(x - mean) · (1 / sqrt(mean((x - mean)²) + eps)) · gamma + beta over the last axis (Ba et al. 2016)."""
    n = F(x.shape[-1])
    centred = x - (lane_sum(x, -1) / n)[..., None]
    inverse = F(1) / np.sqrt(lane_sum(centred * centred, -1) / n + F(eps))
    return _affine(centred * inverse[..., None], gamma, beta)


def rmsnorm(x: Array, gamma: Array | None, beta: Array | None, eps: float) -> Array:
    """x · (1 / sqrt(mean(x²) + eps)) · gamma + beta over the last axis (Zhang & Sennrich 2019)."""
    inverse = F(1) / np.sqrt(lane_sum(x * x, -1) / F(x.shape[-1]) + F(eps))
    return _affine(x * inverse[..., None], gamma, beta)


def _plain(function: Callable[[Array], Array]) -> Callable[[Array, np.float32, np.float32], Array]:
    """A function without parameters as one that ignores alpha and beta."""
    return lambda x, alpha, beta: function(x)


UNARY: dict[str, Callable[[Array, np.float32, np.float32], Any]] = {
    "identity": lambda x, a, b: x,
    "relu": lambda x, a, b: np.where(x < 0, F(0), x),
    "leaky_relu": lambda x, a, b: np.where(x < 0, x * a, x),
    "clamp": lambda x, a, b: np.where(x < a, a, np.where(x > b, b, x)),
    "neg": lambda x, a, b: -x,
    "abs": lambda x, a, b: np.abs(x),
    "square": lambda x, a, b: x * x,
    "sqrt": lambda x, a, b: np.sqrt(x),
    "rsqrt": lambda x, a, b: F(1) / np.sqrt(x),
    "reciprocal": lambda x, a, b: F(1) / x,
    **{
        name: _plain(getattr(elementary, name))
        for name in ("exp", "log", "expm1", "log1p", "tanh", "erf", "sigmoid", "silu", "gelu", "gelu_tanh",
                     "softplus", "elu", "hardswish", "hardsigmoid")
    },
}  # fmt: skip

BINARY: dict[str, Callable[[Array, Array], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "maximum": lambda a, b: np.where((a > b) | (a != a), a, b),
    "minimum": lambda a, b: np.where((a < b) | (a != a), a, b),
    "fill": lambda a, b: np.where(b != b, a, b),
}


def unary(x: Array, func: str, alpha: float = 0.0, beta: float = 0.0) -> Array:
    """`func` of every element."""
    return np.asarray(UNARY[func](x, F(alpha), F(beta)), F)


def route(logits: Array, router: Router) -> tuple[np.ndarray[Any, np.dtype[np.int32]], Array]:
    """Chosen experts (rows, k) int32, best first, and their weights (rows, k) float32, from logits (rows, experts).

    The k largest keys are chosen, equal ones in the order of their index; a NaN counts as -inf. Without bias and groups
    the keys are the logits, whose order is the scores' order. The weights are computed from the logits as they are.
    """
    chosen = _largest(route_keys(logits, router), router.k)
    if router.score == "sparse_mixer":
        weights = _sparse_mix(logits, chosen, F(router.epsilon))
    elif router.normalize == "one":
        weights = np.ones(chosen.shape, F)
    elif router.normalize == "softmax":
        weights = softmax(np.take_along_axis(logits, chosen, -1))
    else:
        weights = np.take_along_axis(_scores(logits, router), chosen, -1)
    if router.normalize in ("sum", "clamped"):
        total, epsilon = lane_sum(weights, -1)[:, None], F(router.epsilon)
        whole = total + epsilon if router.normalize == "sum" else np.where(total < epsilon, epsilon, total)
        weights = np.asarray(weights / whole, F)
    weights = weights * F(router.scale)
    if router.expert_scale:
        weights = weights * np.array(router.expert_scale, F)[chosen]
    return chosen, np.asarray(weights, F)


def route_keys(logits: Array, router: Router) -> Array:
    """What the experts are chosen by (rows, experts), the largest first."""
    if not router.keyed:
        return logits
    keys = _scores(logits, router)
    keys = keys + np.array(router.bias, F) if router.bias else keys
    return _of_best_groups(keys, router)


def _largest(keys: Array, k: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Indices of the k largest, best first, the lower of equals first; a NaN counts as -inf."""
    return np.argsort(-np.where(np.isnan(keys), F(-np.inf), keys), axis=-1, kind="stable")[:, :k].astype(np.int32)


def _scores(logits: Array, router: Router) -> Array:
    if router.score == "softmax":
        return softmax(logits)
    if router.score == "sqrt_softplus":
        return np.sqrt(elementary.softplus(logits))
    return elementary.sigmoid(logits) if router.score == "sigmoid" else logits


def _of_best_groups(keys: Array, router: Router) -> Array:
    """The keys, those of groups that do not take part replaced by -inf."""
    if router.groups == 1:
        return keys
    parts = np.where(np.isnan(keys), F(-np.inf), keys).reshape(len(keys), router.groups, -1)
    best = -np.sort(-parts, axis=-1)
    ranks = best[..., 0] if router.group_rule == "max" else best[..., 0] + best[..., 1]
    kept = np.zeros(ranks.shape, bool)
    np.put_along_axis(kept, _largest(ranks, router.kept_groups), True, -1)
    return np.where(np.repeat(kept, parts.shape[-1], -1), keys, F(-np.inf))


def _sparse_mix(logits: Array, chosen: np.ndarray[Any, np.dtype[np.int32]], epsilon: Any) -> Array:
    weights = np.empty(chosen.shape, F)
    left = np.ones(logits.shape, bool)
    for slot in range(chosen.shape[1]):
        top = np.take_along_axis(logits, chosen[:, slot, None], -1)
        size = np.abs(logits)
        far = (top - logits) / np.where(size < top, top, size) > F(2) * epsilon
        parts = np.where(left & ~far, elementary.exp(logits - top), F(0))
        weights[:, slot] = elementary.exp(top - top)[:, 0] / lane_sum(parts, -1)
        np.put_along_axis(left, chosen[:, slot, None], False, -1)
    return weights


def drop_overflow(chosen: np.ndarray[Any, np.dtype[np.int32]], router: Router, tokens: int) -> None:
    """Replace by -1 what is beyond the experts' capacity, in `chosen` (n · tokens, k), `tokens` by themselves."""
    for sample in chosen.reshape(-1, tokens * router.k) if router.capacity else ():
        for expert in range(router.experts):
            sample[np.flatnonzero(sample == expert)[router.capacity :]] = -1


def combine(slots: Array, weights: Array, chosen: np.ndarray[Any, np.dtype[np.int32]]) -> Array:
    """Σ_j weights[t, j]·slots[t, j] over the slots that have an expert, in their order; 0 where none has.

    From slots (rows, k, d_out), weights and chosen experts (rows, k).
    """
    total, begun = np.zeros_like(slots[:, 0]), np.zeros((len(slots), 1), bool)
    for j in range(slots.shape[1]):
        part, there = weights[:, j, None] * slots[:, j], chosen[:, j, None] >= 0
        total = np.where(there, np.where(begun, total + part, part), total)
        begun = begun | there
    return np.asarray(total, F)
