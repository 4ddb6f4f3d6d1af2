"""Reconstruction of a graph node by node, including the experts inside it."""

from __future__ import annotations

from collections.abc import Callable

from colibri.ir.graph import Graph, Node

Rewrite = Callable[[Graph, Node, dict[str, str]], "str | None"]


def rebuild(graph: Graph, whole: Callable[[Graph], Graph], rewrite: Rewrite) -> Graph:
    """A new graph from `rewrite(new, node, names)` for every node, in order.

    `rewrite` returns the value that replaces the node's output in the new graph, or None for a plain copy; `names`
    maps old names to new ones. Experts are rebuilt with `whole`, the pass itself. Constants and nodes that nothing
    reads any more are dropped.
    """
    new = Graph(graph.name, context=graph.context, start=graph.start)
    names: dict[str, str] = {}
    for name in graph.inputs:
        names[name] = new.add_input(name, graph.shapes[name])
    for name, value in graph.constants.items():
        names[name] = new.add_constant(name, value)
    for node in graph.nodes:
        if node.op == "moe":
            node = Node(
                node.op, node.output, node.inputs, {**node.attrs, "experts": list(map(whole, node.attrs["experts"]))}
            )
        replacement = rewrite(new, node, names)
        if replacement is None:
            replacement = new.add(node.op, *(names[i] for i in node.inputs), output=node.output, **node.attrs)
        names[node.output] = replacement
    new.outputs = [names[name] for name in graph.outputs]
    return drop_unused(new)


def drop_unused(graph: Graph) -> Graph:
    """The graph without nodes and constants that no output depends on."""
    needed = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.output in needed:
            needed.update(node.inputs)
            kept.append(node)
    graph.nodes = kept[::-1]
    graph.constants = {name: value for name, value in graph.constants.items() if name in needed}
    live = {*graph.inputs, *graph.constants, *(node.output for node in graph.nodes)}
    graph.shapes = {name: shape for name, shape in graph.shapes.items() if name in live}
    return graph
