"""Reference of the operations of language models, to the last bit: those that read other positions, and embedding.

Samples are the tokens of one text, sample n at position n. As in `ops`: float32 operations in the order written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.format.spec import PAGE
from colibri.ir.graph import Array
from colibri.ir.weights import Weight, dense
from colibri.reference import elementary, ops

F = np.float32


def embed(ids: Array, table: Weight) -> Array:
    """Rows (batch, width) of a table (ids, width), as the numbers it stores; NaN where an id is none of its rows."""
    matrix = dense(table)
    known = (ids >= 0) & (ids < len(matrix))
    rows = matrix[np.where(known, ids, F(0)).astype(np.int64)]
    return np.where(known[:, None], rows, F(np.nan))


def rope(x: Array, table: Array) -> Array:
    """x (batch, …, dim) with the pairs (i, i + half) of its first elements turned by the angles of its position.

    `table` (positions, 2 · half) holds cosines, then sines (Su et al. 2021).
    """
    half = table.shape[1] // 2
    rows = table[: len(x)].reshape(len(x), *(1,) * (x.ndim - 2), 2 * half)
    cos, sin = rows[..., :half], rows[..., half:]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


def delay(x: Array, steps: int) -> Array:
    """x (batch, width) of `steps` positions before; zeros before the first."""
    zeros = np.zeros((min(steps, len(x)), *x.shape[1:]), F)
    return np.concatenate([zeros, x[: len(x) - len(zeros)]])


def delta(q: Array, k: Array, v: Array, decay: Array, beta: Array, scale: float) -> Array:
    """The gated delta rule (Yang et al. 2025, arXiv:2412.06464): what a memory of keys and values gives for q.

    q and k (positions, kv, dim), v (positions, heads, width), decay and beta (positions, heads); heads share queries
    and keys in groups. From zeros on, at every position the state S (dim, width) of a head becomes S · exp(decay),
    then S + k (beta · (v - Sᵀk))ᵀ, and gives Sᵀ(q · scale). Sums over dim are in its order.
    """
    group = v.shape[1] // k.shape[1]
    q, k = np.repeat(q * F(scale), group, axis=1), np.repeat(k, group, axis=1)
    kept = elementary.exp(decay)
    state, out = np.zeros((*k.shape[1:], v.shape[2]), F), np.zeros_like(v)
    for t in range(len(v)):
        state = state * kept[t, :, None, None]
        new = (v[t] - _recalled(state, k[t])) * beta[t, :, None]
        state = state + k[t, :, :, None] * new[:, None]
        out[t] = _recalled(state, q[t])
    return out


def _recalled(state: Array, key: Array) -> Array:
    """Σ key[:, i] · state[:, i], in the order of i: (heads, width)."""
    total = key[:, 0, None] * state[:, 0]
    for i in range(1, key.shape[1]):
        total = total + key[:, i, None] * state[:, i]
    return total


def cached(x: Array, cache: str) -> tuple[Array, Array]:
    """Rows as the cache keeps them: numbers, and a scale (…, 1) they are to be multiplied by, 1 but for int8."""
    one = np.ones((*x.shape[:-1], 1), F)
    if cache == "fp32":
        return x, one
    if cache == "fp16":
        return x.astype(np.float16).astype(F), one
    size = ops.running_max(np.abs(x), -1)[..., None]  # a NaN is nothing
    finite = (size > 0) & (size < np.inf)
    factor = np.where(finite, F(127) / size, F(0))
    scaled = x * factor
    q = np.where(np.abs(scaled) < F(127.5), np.rint(scaled), F(0))
    return np.asarray(q, F), np.asarray(size / F(127), F)


@dataclass(frozen=True)
class Attention:
    """What an attention does besides the product: see `attention`."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    cache: str = "fp32"
    mask: str = "causal"


def attention(q: Array, k: Array, v: Array, sinks: Array | None, biases: Array | None, how: Attention) -> Array:
    """softmax(q·kᵀ · scale)·v over the positions that a token sees (Vaswani et al. 2017).

    These are, by mask: `causal` those up to the own, of a `window` the last; `full` all; `cross` all of another text.
    q (batch, heads, dim), k (positions, kv, dim), v (positions, kv, width); heads share key and value heads in groups.
    With a `softcap` c a score s becomes c · tanh(s / c). `biases` (heads, n) are added to scores, by distance: the last
    is the own position's, for mask `full` the middle one (Raffel et al. 2020). `sinks` are a further score for each
    head whose value is nothing.

    Positions are taken in pages of 64, from the one where the window begins. With m the largest score so far, from
    -inf or the sink on, and l the sum of exp(score - m), from 0 or 1 on, a page with the largest score m' gives
    l · c + Σ exp(score - m') and total · c + Σ exp(score - m') · v, where c = exp(m - m'). In the page where the window
    begins, what is before it counts with a score of -inf. The result is total / l.
    """
    tokens, heads, _ = q.shape
    kv, width = v.shape[1:]
    group = heads // kv
    (keys, key_scale), (values, value_scale) = cached(k, how.cache), cached(v, how.cache)
    out = np.zeros((tokens, heads, width), F)
    for head in range(heads):
        own = head // group
        start = F(-np.inf) if sinks is None else sinks[head]
        for t in range(tokens):
            best, total_weight = start, F(0 if sinks is None else 1)
            total = np.zeros(width, F)
            end = t + 1 if how.mask == "causal" else len(k)
            first = max(0, end - how.window) if how.window else 0
            for page in range(first // PAGE, (end - 1) // PAGE + 1):
                rows = slice(page * PAGE, min((page + 1) * PAGE, end))
                scores = _product(q[t, None, head], keys[rows, own])[0] * key_scale[rows, own, 0]
                scores = scores * F(how.scale)
                if how.softcap:
                    scores = elementary.tanh(scores / F(how.softcap)) * F(how.softcap)
                if biases is not None:
                    middle = biases.shape[1] // 2 if how.mask == "full" else biases.shape[1] - 1
                    scores = scores + biases[head, middle - t + rows.start : middle - t + rows.stop]
                scores[: max(0, first - page * PAGE)] = -np.inf
                new = max_of(best, scores)
                weights = elementary.exp(scores - new)
                kept = elementary.exp(np.asarray(best - new, F).reshape(1))[0]
                best = new
                total_weight = total_weight * kept + ops.lane_sum(weights, 0)
                seen = _product((weights * value_scale[rows, own, 0])[None], values[rows, own].T)[0]
                total = total * kept + seen
            out[t, head] = total / total_weight
    return out


def max_of(best: Any, scores: Array) -> Any:
    """The largest of `best` and the scores; NaN never replaces a number."""
    for score in scores:
        best = score if score > best else best
    return best


def _product(rows: Array, matrix: Array) -> Array:
    """rows·matrixᵀ as `linear` takes float rows: chains over 256 inputs."""
    return ops.linear(rows, np.ascontiguousarray(matrix), None, "float")
