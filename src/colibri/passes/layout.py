"""Moves of transposes behind operations that ignore the order of axes, where they meet others and cancel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from colibri.ir.graph import Graph, Node
from colibri.passes.rewrite import rebuild

Perm = tuple[int, ...]


def sink_transposes(graph: Graph) -> Graph:
    """Elementwise operations, reductions, slices, joins and windows run on the value before it is transposed.

    Bits stay the same. A convolution's channels then stay last from one layer to the next, so that its bias, a batch
    norm and an activation behind it follow the product directly. What moves an input stays in front of everything.
    """
    if graph.context:
        return graph
    inside = {graph.nodes[n].output for part in graph.recurrences().values() for n in part}

    def rewrite(new: Graph, node: Node, names: dict[str, str]) -> str | None:
        producers = {n.output: n for n in new.nodes if n.op == "transpose"}
        inputs = [names[i] for i in node.inputs]
        turned = [producers.get(i) for i in inputs]
        first = next((t for t in turned if t is not None), None)
        if first is None or node.output in inside:
            return None
        perm: Perm = tuple(first.attrs["perm"])
        if node.op == "transpose":
            return _transposed(new, first.inputs[0], tuple(perm[p] for p in node.attrs["perm"]), node.output)
        if node.op not in _SINKS:
            return None
        sources = [_before(new, i, t, perm, node.op == "binary") for i, t in zip(inputs, turned, strict=True)]
        if any(s is None for s in sources):
            return None
        if node.op in ("concat", "window") and _given(new, first.inputs[0]):
            return None  # what comes from the caller is turned where its border is put around it
        if node.op == "binary" and graph.shapes[node.output] != new.shapes[first.output]:
            return None
        attrs, after = _SINKS[node.op](node, perm)
        moved = new.add(node.op, *(s for s in sources if s), output=f"{node.output}.moved", **attrs)
        return _transposed(new, moved, after, node.output)

    return rebuild(graph, sink_transposes, rewrite)


def _given(graph: Graph, name: str) -> bool:
    """Whether a value is an input, or a look at one."""
    while name not in graph.inputs:
        node = next((n for n in graph.nodes if n.output == name), None)
        if node is None or node.op not in ("reshape", "transpose", "slice", "expand", "concat", "window"):
            return False
        name = node.inputs[-1] if node.inputs[0] in graph.constants else node.inputs[0]
    return True


def _transposed(graph: Graph, name: str, perm: Perm, output: str) -> str:
    return name if perm == tuple(range(len(perm))) else graph.add("transpose", name, output=output, perm=perm)


def _before(graph: Graph, name: str, turned: Node | None, perm: Perm, broadcasts: bool) -> str | None:
    """What `name` is without the transpose `perm`; None where that takes work."""
    if turned is not None:
        return turned.inputs[0] if tuple(turned.attrs["perm"]) == perm else None
    value = graph.constants.get(name)
    if not isinstance(value, np.ndarray) or value.ndim > len(perm) or (value.ndim < len(perm) and not broadcasts):
        return None
    whole = value.reshape(*(1,) * (len(perm) - value.ndim), *value.shape)
    return graph.add_constant(f"{name}.turned", whole.transpose(np.argsort(perm)))


def _unary(node: Node, perm: Perm) -> tuple[dict[str, Any], Perm]:
    return dict(node.attrs), perm


def _along(node: Node, perm: Perm) -> tuple[dict[str, Any], Perm]:
    return {**node.attrs, "axis": perm[node.attrs["axis"]]}, perm


def _reduce(node: Node, perm: Perm) -> tuple[dict[str, Any], Perm]:
    axis = perm[node.attrs["axis"]]
    return {**node.attrs, "axis": axis}, _renumbered([p for p in perm if p != axis])


def _window(node: Node, perm: Perm) -> tuple[dict[str, Any], Perm]:
    axis = perm[node.attrs["axis"]]
    after = [q for p in perm for q in ((axis, axis + 1) if p == axis else (p + (p > axis),))]
    return {**node.attrs, "axis": axis}, tuple(after)


def _renumbered(axes: Sequence[int]) -> Perm:
    order = sorted(axes)
    return tuple(order.index(a) for a in axes)


_SINKS: dict[str, Callable[[Node, Perm], tuple[dict[str, Any], Perm]]] = {
    "unary": _unary,
    "binary": _unary,
    "slice": _along,
    "concat": _along,
    "reduce": _reduce,
    "window": _window,
}
