"""The layer under test: its sizes, weights, inputs, exact outputs, and the work one call must do.

A softmax top-k router (renormalised over the chosen), experts down(silu(gate x) * up x), no biases. Weights and inputs
come from one seeded generator and are stored once a size, so that every peer reads the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.environment import BUILD

Array = np.ndarray[Any, np.dtype[np.float32]]
BATCHES = (1, 4, 32, 128)
COUNTS = {1: 16, 4: 8, 32: 4, 128: 2}  # different inputs of each batch, cycled so that the experts vary


@dataclass(frozen=True)
class Size:
    """One layer: model width d, expert width ff, experts, and how many of them a token visits."""

    name: str
    d: int
    ff: int
    experts: int
    k: int

    @property
    def expert_weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.d * self.ff

    @property
    def weights(self) -> int:
        """Weights of the layer, router included."""
        return self.experts * (self.expert_weights + self.d)

    @property
    def path(self) -> Path:
        """Where everything made for this size is kept."""
        return BUILD / self.name


SIZES = {
    s.name: s
    for s in (
        Size("tiny", 32, 64, 3, 2),
        Size("small", 256, 512, 8, 2),
        Size("medium", 1024, 3584, 8, 2),
        Size("olmoe", 2048, 1024, 64, 8),
        Size("mixtral", 4096, 14336, 8, 2),
    )
}
# The same small expert in layers of more and more of them.
LADDER = {s.name: s for s in (Size(f"experts-{n}", 256, 512, n, 2) for n in (8, 16, 32, 64, 128, 256, 512))}


def by_name(name: str) -> Size:
    """The size, one of the ladder or not."""
    return (SIZES | LADDER)[name]


def weights(size: Size) -> dict[str, Array]:
    """router (experts, d), gate and up (experts, ff, d), down (experts, d, ff), mapped from disk; made if missing."""
    shapes = {
        "router": (size.experts, size.d),
        "gate": (size.experts, size.ff, size.d),
        "up": (size.experts, size.ff, size.d),
        "down": (size.experts, size.d, size.ff),
    }
    size.path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    if not all((size.path / f"{name}.npy").exists() for name in shapes):
        for name, shape in shapes.items():
            partial = size.path / f"{name}.partial"
            stored = np.lib.format.open_memmap(partial, "w+", np.float32, shape)
            for block in stored:  # one expert at a time: the whole need not fit in memory
                rng.standard_normal(out=(values := np.empty(block.shape, np.float32)), dtype=np.float32)
                block[...] = values / np.float32(np.sqrt(shape[-1]))
            stored.flush()
            partial.rename(size.path / f"{name}.npy")
    return {name: np.load(size.path / f"{name}.npy", mmap_mode="r") for name in shapes}


def inputs(size: Size, batch: int) -> Array:
    """(COUNTS[batch], batch, d) standard normal rows."""
    return np.random.default_rng((7, batch)).standard_normal((COUNTS[batch], batch, size.d), np.float32)


@dataclass(frozen=True)
class Rows:
    """Inputs on disk, `count` of `batch` raw float32 rows each."""

    path: str
    batch: int
    count: int


def stored(size: Size, name: str, rows: Array) -> Rows:
    """`rows` (count, batch, d) on disk, for the peers written in C and for rows other than `inputs`."""
    path = size.path / f"{name}.f32"
    if not path.exists() or path.read_bytes() != rows.tobytes():
        rows.tofile(path)
    return Rows(str(path), rows.shape[1], len(rows))


def choices(size: Size, rows: Array) -> np.ndarray[Any, Any]:
    """The experts (…, k) each row of `rows` (…, d) visits, best first, decided in float64."""
    return np.argsort(-_logits(size, rows), axis=-1, kind="stable")[..., : size.k]


def reference(size: Size, batch: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The outputs for `inputs(size, batch)` in float64; kept on disk once computed."""
    path = size.path / f"reference-{batch}.npy"
    if not path.exists():
        rows = inputs(size, batch)
        np.save(path, _layer(size, rows.reshape(-1, size.d)).reshape(rows.shape))
    exact: np.ndarray[Any, np.dtype[np.float64]] = np.load(path)
    return exact


def _logits(size: Size, rows: Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    return rows.astype(np.float64) @ weights(size)["router"].astype(np.float64).T


def _layer(size: Size, rows: Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    w = weights(size)
    chosen = choices(size, rows)
    logits = np.take_along_axis(_logits(size, rows), chosen, -1)
    share = np.exp(logits - logits.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    out = np.zeros(rows.shape)
    for expert in np.unique(chosen):
        row, slot = np.nonzero(chosen == expert)
        x = rows[row].astype(np.float64)
        gate, up, down = (w[name][expert].astype(np.float64) for name in ("gate", "up", "down"))
        gated = x @ gate.T
        out[row] += share[row, slot, None] * ((gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T)
    return out


def work(size: Size, batch: int) -> dict[str, float]:
    """What a call on `inputs(size, batch)` must at least do, averaged over them: macs and distinct `weights` read.

    `held` are the weights of the whole layer.
    """
    chosen = choices(size, inputs(size, batch))
    distinct = float(np.mean([len(np.unique(c)) for c in chosen]))
    router = size.experts * size.d
    macs = batch * (router + size.k * size.expert_weights)
    return {"macs": macs, "weights": router + distinct * size.expert_weights, "held": size.weights}


def switching(size: Size, count: int = 16) -> tuple[Array, Array, float]:
    """Rows (count, 1, d) that all visit the same experts; rows whose experts change each time; experts new each time.

    The second alternates between two sets of experts that have as few in common as the pool of rows offers.
    """
    pool = np.random.default_rng(11).standard_normal((4096, size.d), np.float32)
    sets: dict[frozenset[int], list[int]] = {}
    for n, chosen in enumerate(choices(size, pool)):
        sets.setdefault(frozenset(chosen.tolist()), []).append(n)
    home = max(sets, key=lambda s: len(sets[s]))
    away = min(sets, key=lambda s: (len(s & home), -len(sets[s])))

    def take(chosen: frozenset[int], n: int) -> Array:
        return pool[[sets[chosen][i % len(sets[chosen])] for i in range(n)]]

    same = take(home, count)[:, None]
    alternating = np.stack([take(home, count // 2), take(away, count // 2)], 1).reshape(count, 1, size.d)
    return same, alternating, float(size.k - len(home & away))


def alike(size: Size, batch: int) -> tuple[Array, Array]:
    """Rows (count, batch, d); all rows of an input visit the same experts; the same with one row.

    A row is repeated with a little noise, and rows near a tie are passed over.
    """
    rng = np.random.default_rng(13)
    pool = rng.standard_normal((256, size.d), np.float32)
    noise = np.float32(1e-3) * rng.standard_normal((256, batch, size.d), np.float32)
    repeated = pool[:, None] + noise
    chosen = np.sort(choices(size, repeated), axis=-1)
    sound = np.flatnonzero((chosen == chosen[:, :1]).all(axis=(1, 2)))[: COUNTS[1]]
    return np.ascontiguousarray(repeated[sound]), np.ascontiguousarray(repeated[sound, :1])


def anywhere(size: Size, count: int) -> Array:
    """(count, 1, d) standard normal rows, many enough to visit experts all over a layer of hundreds."""
    return np.random.default_rng(17).standard_normal((count, 1, size.d), np.float32)
