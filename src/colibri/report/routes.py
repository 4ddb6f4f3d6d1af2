"""Routing of a model: expert load, balance, flips between two exports, the costliest and cheapest route."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from colibri.errors import ColibriError
from colibri.format import spec
from colibri.format.package import Package
from colibri.ir.graph import Array
from colibri.quantize.report import Flips, compare_routes
from colibri.report.traces import RouteTrace, require_layers
from colibri.runtime.engine import Model

Numbers = np.ndarray[Any, np.dtype[Any]]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


# --- use and balance --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """One layer's use: for each expert its original number and the share of tokens that chose it (they sum to k).

    Balance, of p = share / k and E experts: `entropy` is -Σ p ln p / ln E (1: even, 0: one expert), `effective` is
    exp(-Σ p ln p) experts, `variation` the standard deviation of p over its mean, `largest` the largest p.
    """

    layer: int
    k: int
    experts: list[int]
    shares: list[float]
    entropy: float
    effective: float
    variation: float
    largest: float
    unused: int


def use(layer: int, k: int, experts: Sequence[int], shares: Sequence[float]) -> Use:
    """The balance of one layer's shares; all of it 0 where nothing was chosen."""
    p = np.array(shares, np.float64)
    p = p / p.sum() if p.sum() > 0 else p
    held = p[p > 0]
    nats = float(-(held * np.log(held)).sum()) + 0.0  # + 0.0: no negative zero
    entropy = nats / math.log(len(p)) if len(p) > 1 else 1.0
    variation = float(p.std() / p.mean()) if p.any() else 0.0
    return Use(layer, k, list(experts), [float(s) for s in shares], entropy if p.any() else 0.0,
               math.exp(nats) if p.any() else 0.0, variation, float(p.max()), int((p == 0).sum()))  # fmt: skip


def calibrated_use(package: Package) -> list[Use]:
    """Use as the export measured it; raises ColibriError where it did not."""
    require_layers(package)
    if not package.experts["frequency"].any():
        raise ColibriError(f"{package.path} holds no calibrated frequencies: pass --input with rows to measure them")
    found = []
    for n, layer in enumerate(package.layers):
        shares = package.experts["frequency"][layer["first_expert"] :][: layer["experts"]]
        found.append(use(n, int(layer["k"]), package.numbers(n).tolist(), shares.tolist()))
    return found


def measured_use(package: Package, trace: RouteTrace) -> list[Use]:
    """Use in a trace of this very model."""
    found = []
    for n, layer in enumerate(trace.layers):
        numbers = package.numbers(n)
        shares = [float((layer == e).any(axis=-1).mean()) for e in numbers]
        found.append(use(n, layer.shape[-1], numbers.tolist(), shares))
    return found


# --- flips ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerFlips:
    """One layer's flips, and the reference's margins at QUANTILES: of all tokens, and of those that flipped.

    A token's margin is its k-th largest logit minus the next; None where there is none (or it is not finite).
    """

    flips: Flips
    margins: list[float | None]
    flipped_margins: list[float | None]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        flips = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self.flips).items()}
        return {**flips, "share": self.flips.share, "margin_quantiles": dict(zip(QUANTILES, self.margins, strict=True)),
                "flipped_margin_quantiles": dict(zip(QUANTILES, self.flipped_margins, strict=True))}  # fmt: skip


def flips(model: Model, reference: Model, inputs: Sequence[Any]) -> list[LayerFlips]:
    """Where `model` chooses other experts than `reference`, two exports of one model, on `inputs` (rows, *shape).

    Experts go by their original numbers, so one of them may be pruned. Raises ColibriError for two different models.
    """
    for m in (model, reference):
        require_layers(m.package)
    ours, theirs = model.package, reference.package
    ports = [[p.shape for p in package.inputs] for package in (ours, theirs)]
    if len(ours.layers) != len(theirs.layers) or ports[0] != ports[1]:
        raise ColibriError(f"{ours.path} and {theirs.path} are not exports of one model: they have {len(ours.layers)} "
                           f"and {len(theirs.layers)} MoE layers, and inputs {ports[0]} and {ports[1]}")  # fmt: skip
    before, after = reference.router_logits(*inputs), model.routes(*inputs)
    found = []
    for n, ((first, logits), second) in enumerate(zip(before, after, strict=True)):
        old, new = theirs.numbers(n), ours.numbers(n)
        if first.shape[1] != second.shape[1]:
            raise ColibriError(f"{ours.path} and {theirs.path} are not exports of one model: layer {n} routes "
                               f"{second.shape[1]} and {first.shape[1]} tokens a row")  # fmt: skip
        wide = np.full((*logits.shape[:-1], max(int(old.max()), int(new.max())) + 1), -np.inf, np.float32)
        wide[..., old] = logits
        same = (np.sort(_padded(first, second)) == np.sort(_padded(second, first))).all(axis=-1).reshape(-1)
        gaps = _margins(wide, first.shape[-1])
        found.append(LayerFlips(compare_routes(f"layer {n}", first, second, wide), _quantiles(gaps),
                                _quantiles(gaps[~same])))  # fmt: skip
    return found


def _padded(choices: Numbers, other: Numbers) -> Numbers:
    """Choices with -1 added until there are as many as the other model makes."""
    more = max(0, other.shape[-1] - choices.shape[-1])
    return np.pad(choices, [(0, 0)] * (choices.ndim - 1) + [(0, more)], constant_values=-1)


def _margins(logits: Array, k: int) -> Numbers:
    flat = logits.reshape(-1, logits.shape[-1]).astype(np.float64)
    if k >= flat.shape[-1]:
        return np.full(len(flat), np.nan)
    ranked = -np.sort(-np.where(np.isnan(flat), -np.inf, flat), axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(ranked[:, k - 1] - ranked[:, k])


def _quantiles(values: Numbers) -> list[float | None]:
    finite = values[np.isfinite(values)]
    return [float(q) for q in np.quantile(finite, QUANTILES)] if len(finite) else [None] * len(QUANTILES)


# --- the budget of a route --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCost:
    """What one row's route costs in one layer, at most and at least, over every choice of k different experts a token.

    Most multiply-accumulates: every token takes the k costliest experts. Most bytes: the tokens' choices differ as much
    as they can. Least of both: every token takes the same k cheapest. Experts go by their original numbers.
    """

    layer: int
    tokens: int
    k: int
    costliest: list[int]
    cheapest: list[int]
    worst_macs: int
    least_macs: int
    worst_bytes: int
    least_bytes: int


@dataclass(frozen=True)
class RouteBudget:
    """Multiply-accumulates and weight bytes of one row over all its routes, and what the file's header says of them."""

    shared_macs: int  # outside the experts
    shared_bytes: int
    layers: list[LayerCost]
    header_macs: int
    header_bytes: int

    @property
    def worst_macs(self) -> int:
        """Of the costliest route."""
        return self.shared_macs + sum(layer.worst_macs for layer in self.layers)

    @property
    def least_macs(self) -> int:
        """Of the cheapest route."""
        return self.shared_macs + sum(layer.least_macs for layer in self.layers)

    @property
    def worst_bytes(self) -> int:
        """Of the route that reads most."""
        return self.shared_bytes + sum(layer.worst_bytes for layer in self.layers)

    @property
    def least_bytes(self) -> int:
        """Of the route that reads least."""
        return self.shared_bytes + sum(layer.least_bytes for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        totals = {name: getattr(self, name) for name in ("worst_macs", "least_macs", "worst_bytes", "least_bytes")}
        return {**totals, **asdict(self)}


def budget(package: Package) -> RouteBudget:
    """The costliest and the cheapest route of a model, from its operations and its expert directory."""
    main = package.ops[: int(package.header["main_ops"])]
    products = [op for known in spec.operations("product") for op in spec.named_all(main, known.name)]
    shared = sum(int(op["rows"]) * int(op["inputs"]) * int(op["outputs"]) for op in products)
    tokens = {int(op["layer"]): int(op["rows"]) for op in spec.named_all(main, "moe")}
    h = package.header
    layers = [_cost(package, n, tokens[n]) for n in range(len(package.layers))]
    return RouteBudget(shared, int(h["shared_bytes"]), layers, int(h["worst_macs"]), int(h["worst_bytes"]))


def _cost(package: Package, number: int, tokens: int) -> LayerCost:
    layer = package.layers[number]
    experts = package.experts[layer["first_expert"] :][: layer["experts"]]
    k = int(layer["k"])
    macs, sizes = ([int(v) for v in experts[name]] for name in ("macs", "bytes"))
    order = sorted(range(len(experts)), key=lambda e: (-macs[e], e))
    touched = min(len(experts), tokens * k)
    return LayerCost(
        number, tokens, k,
        [int(experts["index"][e]) for e in order[:k]], [int(experts["index"][e]) for e in order[::-1][:k]],
        tokens * sum(macs[e] for e in order[:k]), tokens * sum(macs[e] for e in order[-k:]),
        sum(sorted(sizes, reverse=True)[:touched]), sum(sorted(sizes)[:k]),
    )  # fmt: skip
