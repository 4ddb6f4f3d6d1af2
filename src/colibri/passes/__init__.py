"""Passes: plain functions from graph to graph that do not change what the model computes.

`PASSES` lists them in the order they run; `colibri inspect --stage NAME` shows the graph after each.
"""

from __future__ import annotations

from collections.abc import Callable

from colibri.ir.graph import Graph
from colibri.passes.fold import fold_affine, fold_constants
from colibri.passes.fuse import fuse_activations
from colibri.passes.layout import sink_transposes
from colibri.passes.products import constant_products
from colibri.passes.tidy import tidy

PASSES: dict[str, Callable[[Graph], Graph]] = {
    "tidy": tidy,
    "constants": fold_constants,
    "products": constant_products,
    "layout": sink_transposes,
    "affine": fold_affine,
    "fuse": fuse_activations,
}


def optimize(graph: Graph, on_stage: Callable[[str, Graph], None] | None = None) -> Graph:
    """The graph after every pass; `on_stage(name, graph)` is called with each intermediate result."""
    for name, rewrite in PASSES.items():
        graph = rewrite(graph)
        graph.validate()
        if on_stage is not None:
            on_stage(name, graph)
    return graph
