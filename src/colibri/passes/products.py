"""Products with constant matrices become `linear`, whose weights are stored for the kernels and can be quantised."""

from __future__ import annotations

from math import prod

import numpy as np

from colibri.ir.graph import Graph, Node
from colibri.passes.rewrite import rebuild


def constant_products(graph: Graph) -> Graph:
    """`matmul` with a constant on either side as one `linear`, or one for each of a stack of different matrices."""

    def rewrite(new: Graph, node: Node, names: dict[str, str]) -> str | None:
        if node.op != "matmul":
            return None
        a, b = (names[i] for i in node.inputs)
        if isinstance(new.constants.get(b), np.ndarray):
            return _with_constant(new, a, b, node.output)
        if isinstance(new.constants.get(a), np.ndarray):  # A·X is the transpose of Xᵀ·Aᵀ
            turned = new.add_constant(f"{a}.T", new.array(a).swapaxes(-1, -2))
            product = _with_constant(new, _swapped(new, b, f"{node.output}.in"), turned, f"{node.output}.T")
            return _swapped(new, product, node.output)
        return None

    return rebuild(graph, constant_products, rewrite)


def _swapped(graph: Graph, name: str, output: str) -> str:
    rank = len(graph.shapes[name])
    return graph.add("transpose", name, output=output, perm=(*range(rank - 2), rank - 1, rank - 2))


def _with_constant(graph: Graph, x: str, name: str, output: str) -> str:
    (*stack, m, k), n = graph.shapes[x], graph.shapes[name][-1]
    matrices = graph.array(name).reshape(-1, k, n)
    if (matrices == matrices[0]).all():
        return graph.add("linear", x, graph.add_constant(f"{name}.T", matrices[0].T), output=output)
    flat, parts = graph.add("reshape", x, output=f"{output}.flat", shape=(prod(stack), m, k)), []
    for i, matrix in enumerate(matrices):
        part = graph.add("slice", flat, output=f"{output}.in{i}", axis=0, start=i, stop=i + 1, step=1)
        weight = graph.add_constant(f"{name}.{i}.T", matrix.T)
        parts.append(graph.add("linear", part, weight, output=f"{output}.out{i}"))
    joined = graph.add("concat", *parts, output=f"{output}.joined", axis=0)
    return graph.add("reshape", joined, output=output, shape=(*stack, m, n))
