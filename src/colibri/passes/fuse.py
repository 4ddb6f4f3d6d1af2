"""Fusion of a matrix product, or an operation on two values, with the function that follows it."""

from __future__ import annotations

from colibri.ir.graph import Graph, Node
from colibri.passes.rewrite import rebuild

_WITH_PARAMETERS = ("leaky_relu", "clamp")


def fuse_activations(graph: Graph) -> Graph:
    """`linear` or `binary` whose only reader is a `unary` applies that function itself; the bits stay the same."""
    readers = graph.consumers()

    def rewrite(new: Graph, node: Node, names: dict[str, str]) -> str | None:
        if node.op != "unary":
            return None
        before = next((n for n in new.nodes if n.output == names[node.inputs[0]]), None)
        alone = len(readers[node.inputs[0]]) == 1 and node.inputs[0] not in graph.outputs
        if before is None or not alone:
            return None
        if before.op == "binary" and not before.attrs.get("then") and node.attrs["func"] not in _WITH_PARAMETERS:
            new.nodes.remove(before)
            attrs = {**before.attrs, "then": node.attrs["func"]}
            return new.add("binary", *before.inputs, output=node.output, **attrs)
        if before.op != "linear" or before.attrs.get("activation"):
            return None
        new.nodes.remove(before)
        attrs = {**before.attrs, **{k: v for k, v in node.attrs.items() if k != "func"}}
        return new.add("linear", *before.inputs, output=node.output, **{**attrs, "activation": node.attrs["func"]})

    return rebuild(graph, fuse_activations, rewrite)
