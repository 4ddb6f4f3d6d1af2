"""Reading of the weights of a graph that fits into memory as a whole."""

from __future__ import annotations

from dataclasses import replace

from colibri.ir.graph import Graph, Node
from colibri.ir.weights import Deferred, loaded


def read_weights(graph: Graph) -> Graph:
    """The graph with every deferred weight loaded, also in experts; the graph itself if there is none."""

    def rewrite(node: Node) -> Node:
        if node.op != "moe":
            return node
        return replace(node, attrs={**node.attrs, "experts": list(map(read_weights, node.attrs["experts"]))})

    nodes = [rewrite(node) for node in graph.nodes]
    constants = {name: loaded(value) for name, value in graph.constants.items()}
    deferred = any(isinstance(value, Deferred) for value in graph.constants.values())
    changed = any(_changed(a, b) for a, b in zip(graph.nodes, nodes, strict=True))
    return replace(graph, nodes=nodes, constants=dict(constants)) if deferred or changed else graph


def _changed(old: Node, new: Node) -> bool:
    pairs = zip(old.attrs.get("experts", ()), new.attrs.get("experts", ()), strict=True)
    return any(a is not b for a, b in pairs)
