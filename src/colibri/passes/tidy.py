"""Removal of operations that change nothing and of nodes that nothing reads."""

from __future__ import annotations

from colibri.ir.graph import Graph, Node
from colibri.passes.rewrite import rebuild


def tidy(graph: Graph) -> Graph:
    """Without identities: reshape, expand, slice and transpose to the same thing, and unary `identity`."""

    def rewrite(new: Graph, node: Node, names: dict[str, str]) -> str | None:
        source = names[node.inputs[0]]
        if node.op == "unary" and node.attrs["func"] == "identity":
            return source
        if node.op in ("reshape", "expand", "slice") and new.shapes[source] == graph.shapes[node.output]:
            return source
        if node.op == "transpose" and list(node.attrs["perm"]) == sorted(node.attrs["perm"]):
            return source
        if node.op == "concat" and len(node.inputs) == 1:
            return source
        return None

    return rebuild(graph, tidy, rewrite)
