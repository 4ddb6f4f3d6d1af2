"""Scaling of weights too small for float16, such as those of inputs in raw units, into its range.

A matrix is multiplied by a power of two and its input divided by it: the same products and sums to the bit, as long as
nothing of them leaves float32's normal numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection

import numpy as np

from colibri.ir.graph import Graph, Node
from colibri.passes.rewrite import rebuild

_FINE = 2.0**-9  # where a matrix's largest weight is below, float16's normal numbers do not hold the others and scales


def lifted(graph: Graph, kept: Collection[str] = ()) -> Graph:
    """The graph with its linears' fine weights lifted to about 1, experts likewise; linears giving `kept` stay."""
    if not any(map(_fine_in, _graphs(graph))):
        return graph
    return rebuild(graph, lifted, functools.partial(_rewrite, graph, frozenset(kept)))


def _graphs(graph: Graph) -> list[Graph]:
    return [graph, *(part for node in graph.moe_nodes() for body in node.attrs["experts"] for part in _graphs(body))]


def _fine_in(graph: Graph) -> bool:
    return any(node.op == "linear" and _power(graph, node) for node in graph.nodes)


def _power(graph: Graph, node: Node) -> int:
    """The power of two that brings the matrix's largest weight to between 1/2 and 1; 0 where that is not called for."""
    matrix = graph.constants.get(node.inputs[1])
    if not isinstance(matrix, np.ndarray):
        return 0
    peak = float(np.abs(matrix).max(initial=0))
    return -math.frexp(peak)[1] if 2.0**-100 < peak < _FINE else 0


def _rewrite(old: Graph, kept: frozenset[str], new: Graph, node: Node, names: dict[str, str]) -> str | None:
    power = _power(old, node) if node.op == "linear" and node.output not in kept else 0
    if power == 0:
        return None
    x, _, *bias = (names[i] for i in node.inputs)
    small = new.add_constant(f"half{power}", np.float32(2.0**-power))
    low = f"{x}.over{power}"
    if low not in new.shapes:
        new.add("binary", x, small, output=low, func="mul")
    large = new.add_constant(node.inputs[1], np.asarray(old.constants[node.inputs[1]]) * np.float32(2.0**power))
    return new.add("linear", low, large, *bias, output=node.output, **node.attrs)


__all__ = ["lifted"]
