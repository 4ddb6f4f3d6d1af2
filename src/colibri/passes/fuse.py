"""Lets a matrix product apply the activation that follows it."""

from __future__ import annotations

from colibri.graph import Graph, Node
from colibri.passes.rewrite import rebuild


def fuse_activations(graph: Graph) -> Graph:
    """`linear` whose only reader is a `unary` becomes a `linear` with that activation; the bits stay the same."""
    readers = graph.consumers()

    def rewrite(new: Graph, node: Node, names: dict[str, str]) -> str | None:
        if node.op != "unary":
            return None
        before = next((n for n in new.nodes if n.output == names[node.inputs[0]] and n.op == "linear"), None)
        alone = len(readers[node.inputs[0]]) == 1 and node.inputs[0] not in graph.outputs
        if before is None or before.attrs.get("activation") or not alone:
            return None
        new.nodes.remove(before)
        attrs = {**before.attrs, **{k: v for k, v in node.attrs.items() if k != "func"}}
        return new.add("linear", *before.inputs, output=node.output, **{**attrs, "activation": node.attrs["func"]})

    return rebuild(graph, fuse_activations, rewrite)
