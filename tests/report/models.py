"""Small models whose routes the input chooses, and made-up traces of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from colibri import exporter
from colibri.ir.graph import Graph, Router
from colibri.report.traces import RouteTrace
from tests.graphs import expert

WIDTH = 32  # of a token


def chosen_by_input(
    layers: Sequence[tuple[int, Sequence[int]]], tokens: int = 1, fmt: str = "fp32", max_batch: int = 8
) -> exporter.Export:
    """MoE layers one after another, each (k, hidden width of every expert); logits are the input's own features."""
    graph = Graph("routed")
    x = value = graph.add_input("x", (tokens, WIDTH))
    first = 0
    for n, (k, widths) in enumerate(layers):
        logits = graph.add("slice", x, axis=1, start=first, stop=first + len(widths), step=1)
        experts = [expert(100 * n + e, WIDTH, width, WIDTH, e % 2, fmt) for e, width in enumerate(widths)]
        value = graph.add("moe", value, logits, router=Router(len(widths), k, "softmax", "sum"), experts=experts)
        first += len(widths)
    graph.outputs = [value]
    return exporter.build(graph, max_batch=max_batch)


def every_route(layers: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[tuple[int, ...], ...]]:
    """Every route of one token: the set of experts in each layer."""
    return list(itertools.product(*(itertools.combinations(range(len(widths)), k) for k, widths in layers)))


def token_for(route: tuple[tuple[int, ...], ...], layers: Sequence[tuple[int, Sequence[int]]]) -> Any:
    """A token (WIDTH,) that takes this route."""
    x = np.full(WIDTH, 0.25, np.float32)
    first = 0
    for chosen, (_, widths) in zip(route, layers, strict=True):
        x[first : first + len(widths)] = -1
        x[[first + e for e in chosen]] = 1
        first += len(widths)
    return x


@functools.cache
def eight_experts(layers: int = 1, k: int = 2) -> exporter.Export:
    """Layers of eight experts of two pages each."""
    return chosen_by_input([(k, [12, 18] * 4)] * layers)


def drawn(weights: Any, k: int, rng: np.random.Generator) -> Any:
    """Choices (rows, 1, k) int32, k different experts a row in the order of weighted draws; weights (rows, experts)."""
    keys = np.log(weights) + rng.gumbel(size=weights.shape)
    return np.argsort(-keys, axis=1)[:, None, :k].astype(np.int32)


def random_trace(weights: Any, rows: int, k: int = 2, layers: int = 1, seed: int = 0) -> RouteTrace:
    """Rows that choose independently, with the same `weights` (experts,) in every layer, or (rows, experts)."""
    rng = np.random.default_rng(seed)
    each = np.broadcast_to(np.asarray(weights, float), (rows, np.shape(weights)[-1]))
    return RouteTrace([drawn(each, k, rng) for _ in range(layers)])
