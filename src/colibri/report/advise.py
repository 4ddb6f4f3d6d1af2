"""Advice on which experts to lock in memory, from a trace: how uneven and local their use is, what would be read.

Nothing is judged on the rows it was learned from: experts to pin are chosen on the first half of the trace, and every
policy is compared on the second. Statistics are NumPy and the standard library alone; docs/routes.md has the formulas.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from colibri.errors import ColibriError
from colibri.format.package import Package
from colibri.report import replay
from colibri.report.traces import Routes, RouteTrace, positions, requests

PAGE = 4096  # bytes; the kernel reads and locks whole pages
LEAST_ROWS = 40
LEVEL = 0.05  # of the skew tests, all layers together
LEAST_GAIN = 0.01  # of what LRU reads; less is not worth a lock
SHARES = (0.125, 0.25, 0.5, 0.75)  # of all experts' bytes: the budgets tried where none is given
POLICIES = ("lru", "lfu", "static", "optimum")

_DRAWS, _RESAMPLES = 999, 999
_FEW = 5  # expected choices of an expert below which the chi-square distribution is not trusted
_SEED = 0

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Skew:
    """Whether a layer's experts are used more unevenly than chance: a test against tokens that choose evenly.

    `statistic` is divided by `design_effect` already; `p` is this layer's, `p_all` corrected for the number of layers.
    """

    statistic: float
    freedom: int
    design_effect: float
    method: str  # "chi-square", "Monte Carlo", or "no choice" where k is all experts
    p: float
    p_all: float


@dataclass(frozen=True)
class Locality:
    """The share of a row's experts that the row before asked for too, and that share for rows in random order."""

    overlap: float
    chance: float


@dataclass(frozen=True)
class Estimate:
    """A mean over the second half's rows with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Policy:
    """Bytes read for a row, and the share of the bytes asked for that were in memory."""

    bytes: Estimate
    hits: Estimate


@dataclass(frozen=True)
class Pin:
    """An expert to lock: layer, original number, its place in the expert directory, and its bytes in the file."""

    layer: int
    expert: int
    entry: int
    offset: int
    bytes: int
    share: float  # of the first half's rows, those that asked for it


@dataclass(frozen=True)
class Pinning:
    """What a budget gives: every policy on the second half, and what to do.

    `gain` are the bytes a row that static saves over LRU; `gain_exchanged` the same where what to pin is learned on the
    second half and judged on the first.
    """

    budget: int
    policies: dict[str, Policy]
    gain: Estimate
    gain_exchanged: Estimate
    pin: bool
    reason: str
    pins: list[Pin]

    @property
    def pinned_bytes(self) -> int:
        """What locking them takes, in whole pages."""
        return sum(_pages(p.offset, p.bytes) for p in self.pins)


@dataclass(frozen=True)
class Advice:
    """The verdict on a trace; `asked` are the experts' bytes a row of the second half asks for."""

    path: str
    rows: int
    tokens: int  # a row
    expert_bytes: int
    asked: float
    skew: list[Skew]
    locality: list[Locality]
    plans: list[Pinning]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        plans = [{**asdict(p), "pinned_bytes": p.pinned_bytes} for p in self.plans]
        return {**asdict(self), "plans": plans}


def advise(package: Package, trace: RouteTrace, budgets: Sequence[int] = ()) -> Advice:
    """Judge a trace of `package`; raises ColibriError where it is of another model or too short."""
    routes = positions(trace, package)
    if trace.rows < LEAST_ROWS:
        raise ColibriError(f"the trace has {trace.rows} rows; advice needs at least {LEAST_ROWS}, half to learn from "
                           "and half to judge on: record more")  # fmt: skip
    sizes = [_pages(int(e["offset"]), int(e["bytes"])) for e in package.experts]
    asked = requests(routes)
    half = trace.rows // 2
    total = sum(sizes)
    skews = _corrected([skew(r, int(layer["first_expert"]), int(layer["experts"]))
                        for r, layer in zip(routes, package.layers, strict=True)])  # fmt: skip
    shares = {int(total * share) // PAGE * PAGE for share in SHARES}
    chosen = sorted(set(budgets) or {size for size in shares if size >= min(sizes)} or {total})
    plans = [_pinning(package, asked, sizes, budget, half, any(s.p_all < LEVEL for s in skews)) for budget in chosen]
    wanted = sum(sizes[e] for row in asked[half:] for e in row) / (trace.rows - half)
    localities = [locality(r) for r in routes]
    return Advice(package.path, trace.rows, max(r.shape[1] for r in routes), total, wanted, skews, localities, plans)


def _pages(offset: int, size: int) -> int:
    """Bytes of the pages that a part of the file touches."""
    return -(-(offset + size) // PAGE) * PAGE - offset // PAGE * PAGE


# --- skew and locality ------------------------------------------------------------------------------------------------


def skew(routes: Routes, first: int, experts: int) -> Skew:
    """Test one layer's choices (rows, tokens, k), numbered from `first`, against k experts drawn evenly for each token.

    Pearson's statistic times (E - 1) / (E - k), since a token's k experts differ, is chi-square distributed with E - 1
    degrees of freedom for independent tokens. Rows that resemble their neighbours inflate it; it is divided by how much
    larger the counts' variance is between blocks of rows than it would be for independent ones (never by less than 1).
    """
    k = routes.shape[-1]
    taken = routes.reshape(len(routes), -1) - first
    per_row = np.stack([(taken == e).sum(axis=1) for e in range(experts)], axis=1).astype(np.float64)
    counts = per_row.sum(axis=0)
    if k >= experts or counts.sum() == 0:
        return Skew(0.0, 0, 1.0, "no choice", 1.0, 1.0)
    tokens = routes.shape[0] * routes.shape[1]
    effect = _design_effect(per_row, tokens)
    statistic = _pearson(counts, k) / effect
    if counts.sum() / experts / effect < _FEW:
        drawn = _even_statistics(max(1, round(tokens / effect)), experts, k)
        p = (1 + sum(value >= statistic for value in drawn)) / (1 + len(drawn))
        return Skew(statistic, experts - 1, effect, "Monte Carlo", p, p)
    p = chi_square_tail(statistic, experts - 1)
    return Skew(statistic, experts - 1, effect, "chi-square", p, p)


def _pearson(counts: Floats, k: int) -> float:
    even = counts.sum() / len(counts)
    return float(((counts - even) ** 2).sum() / even * (len(counts) - 1) / (len(counts) - k))


def _design_effect(per_row: Floats, tokens: int) -> float:
    """How many times larger the variance of counts (rows, experts) between blocks is than for independent tokens."""
    rows = len(per_row)
    length = math.isqrt(rows - 1) + 1
    blocks = rows // length
    if blocks < 2:
        return 1.0
    sums = per_row[: blocks * length].reshape(blocks, length, -1).sum(axis=1)
    share = per_row.sum(axis=0) / tokens
    independent = length * tokens / rows * share * (1 - share)
    seen = independent > 0
    return max(1.0, float((sums.var(axis=0, ddof=1)[seen] / independent[seen]).mean())) if seen.any() else 1.0


@functools.cache
def _even_statistics(tokens: int, experts: int, k: int) -> tuple[float, ...]:
    """The statistic for `tokens` tokens with k experts drawn evenly, many times."""
    rng = np.random.default_rng(_SEED)
    drawn = []
    for _ in range(_DRAWS):
        chosen = np.argpartition(rng.random((tokens, experts)), k - 1, axis=1)[:, :k]
        drawn.append(_pearson(np.bincount(chosen.reshape(-1), minlength=experts).astype(np.float64), k))
    return tuple(drawn)


def chi_square_tail(x: float, freedom: int) -> float:
    """The probability that a chi-square variable of `freedom` degrees exceeds x: the finite sum for whole degrees.

    Q = e^(-x/2) · Σ (x/2)^i / Γ(i + 1), over i = 0, 1, … below freedom / 2 where that is whole; else over
    i = 1/2, 3/2, … with erfc(√(x/2)) before the sum.
    """
    if x <= 0:
        return 1.0
    half, start = x / 2, freedom % 2 / 2
    total = math.erfc(math.sqrt(half)) if freedom % 2 else 0.0
    for n in range(freedom // 2):
        i = n + start
        total += math.exp(i * math.log(half) - half - math.lgamma(i + 1))
    return min(1.0, total)


def _corrected(skews: Sequence[Skew]) -> list[Skew]:
    """Holm's correction over the layers that had a choice."""
    order = sorted((n for n, s in enumerate(skews) if s.method != "no choice"), key=lambda n: skews[n].p)
    result, worst = list(skews), 0.0
    for rank, n in enumerate(order):
        worst = max(worst, min(1.0, skews[n].p * (len(order) - rank)))
        s = skews[n]
        result[n] = Skew(s.statistic, s.freedom, s.design_effect, s.method, s.p, worst)
    return result


def locality(routes: Routes) -> Locality:
    """How much of a row's experts the row before had, against the mean over all pairs of rows."""
    sets = [frozenset(row) - {-1} for row in routes.reshape(len(routes), -1).tolist()]
    rows = len(sets)
    wanted = sum(map(len, sets[1:]))
    if wanted == 0:
        return Locality(0.0, 0.0)
    shared = sum(len(a & b) for a, b in pairwise(sets))
    pairs = sum(n * (n - 1) for n in Counter(e for s in sets for e in s).values()) / (rows * (rows - 1))
    return Locality(shared / wanted, pairs / (sum(map(len, sets)) / rows))


# --- policies ---------------------------------------------------------------------------------------------------------


def _pinning(
    package: Package, asked: replay.Requests, sizes: Sequence[int], budget: int, half: int, skewed: bool
) -> Pinning:
    pinned = replay.most_used(asked[:half], sizes, budget)
    read = {
        "lru": replay.lru(asked, sizes, budget)[half:],
        "lfu": replay.lfu(asked, sizes, budget)[half:],
        "static": replay.static(asked[half:], sizes, pinned),
        "optimum": replay.optimum(asked[half:], sizes, budget),
    }
    wanted = replay.static(asked[half:], sizes, ())
    sums = _resampled([wanted, *read.values()])
    policies = {
        name: Policy(_estimate(read[name], sums[n + 1]), _hits(wanted, read[name], sums[0], sums[n + 1]))
        for n, name in enumerate(POLICIES)
    }
    gain = _gain(read["lru"], read["static"])
    turned = [*asked[half:], *asked[:half]]
    rest = len(asked) - half
    back = _gain(replay.lru(turned, sizes, budget)[rest:],
                 replay.static(turned[rest:], sizes, replay.most_used(turned[:rest], sizes, budget)))  # fmt: skip
    blind = sum(sizes[e] for e in pinned) / sum(sizes)
    pin, reason = _verdict(budget, sizes, policies, gain, back, blind, skewed)
    pins = []
    for n in pinned if pin else []:
        e = package.experts[n]
        share = sum(n in row for row in asked[:half]) / half
        pins.append(Pin(int(e["layer"]), int(e["index"]), n, int(e["offset"]), int(e["bytes"]), share))
    return Pinning(budget, policies, gain, back, pin, reason, pins)


def _verdict(
    budget: int, sizes: Sequence[int], policies: dict[str, Policy], gain: Estimate, back: Estimate, blind: float,
    skewed: bool,
) -> tuple[bool, str]:  # fmt: skip
    """`blind` is the hit rate to expect of pinning as many bytes of experts drawn by lot."""
    lru = policies["lru"].bytes.value
    share = gain.value / lru if lru else 0.0
    if budget >= sum(sizes):
        return False, "the memory holds every expert: there is nothing to choose"
    if budget < min(sizes):
        return False, "the memory holds no expert"
    if not skewed:
        any_set = f"; pinning any of them would save {share:.1%} of LRU's reads" if gain.low > 0 else ""
        return False, f"the use is even, within chance, so that no expert earns it more than another{any_set}"
    if gain.low <= 0:
        word = "reads no less than LRU" if gain.value <= 0 else "saves no more than noise over LRU"
        return False, f"what the first half used most, pinned, {word} on the second"
    if policies["static"].hits.low <= blind:
        return False, "what the first half used most does no better on the second than experts drawn by lot"
    if back.low <= 0:
        return False, "pinning pays on the second half, but with the halves exchanged it does not: the use drifts"
    if share < LEAST_GAIN:
        return False, f"pinning saves {share:.1%} of LRU's reads, too little to matter"
    return True, f"pinning saves {share:.1%} of LRU's reads on rows it was not chosen on"


def _gain(lru: Sequence[int], static: Sequence[int]) -> Estimate:
    saved = [a - b for a, b in zip(lru, static, strict=True)]
    return _estimate(saved, _resampled([saved])[0])


def _resampled(rows: Sequence[Sequence[int]]) -> Floats:
    """Sums of several measures over the rows of 999 block resamples, the same rows for all: (measures, resamples).

    Blocks of √rows neighbouring rows, round the end to the beginning, keep what neighbours have in common.
    """
    values = np.array(rows, np.float64)
    count = values.shape[1]
    length = math.isqrt(count - 1) + 1
    rng = np.random.default_rng(_SEED)
    blocks = -(-count // length)
    starts = rng.integers(0, count, (_RESAMPLES, blocks))
    lengths = np.full(blocks, length)
    lengths[-1] = count - length * (blocks - 1)
    running = np.concatenate([np.zeros((len(values), 1)), np.cumsum(np.tile(values, 2), axis=1)], axis=1)
    return np.asarray((running[:, starts + lengths] - running[:, starts]).sum(axis=-1))


def _estimate(values: Sequence[int], sums: Floats) -> Estimate:
    low, high = np.percentile(sums / len(values), (2.5, 97.5))
    return Estimate(sum(values) / len(values), float(low), float(high))


def _hits(wanted: Sequence[int], read: Sequence[int], all_wanted: Floats, all_read: Floats) -> Estimate:
    shares = 1 - all_read / np.maximum(all_wanted, 1)
    low, high = np.percentile(shares, (2.5, 97.5))
    return Estimate(1 - sum(read) / max(1, sum(wanted)), float(low), float(high))
