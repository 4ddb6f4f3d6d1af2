"""Constant folding at export: what does not depend on the input, and scales and shifts into the matrix before them."""

from __future__ import annotations

import numpy as np

from colibri.ir.graph import Array, Graph, Node
from colibri.ir.weights import Deferred
from colibri.passes.rewrite import rebuild
from colibri.reference.interpreter import run


def fold_constants(graph: Graph) -> Graph:
    """Nodes whose inputs are all constants become constants, computed by the reference interpreter.

    Weights that are read only when they are written stay out of it, here and in `fold_affine`.
    """

    def rewrite(new: Graph, node: Node, names: dict[str, str]) -> str | None:
        inputs = [names[i] for i in node.inputs]
        if node.op in ("moe", "state", "step", "collect", "delta") or not all(i in new.constants for i in inputs):
            return None
        if any(isinstance(new.constants[i], Deferred) for i in inputs):
            return None
        alone = Graph(node.output)
        trigger = alone.add_input("batch", (1,))  # gives the interpreter a batch of one; nothing reads it
        bound = {i: alone.add_constant(i, new.constants[i]) for i in inputs}
        alone.outputs = [alone.add(node.op, *(bound[i] for i in inputs), output=node.output, **node.attrs)]
        (value,) = run(alone, [np.zeros((1, *alone.shapes[trigger]), np.float32)])
        return new.add_constant(node.output, value[0])

    return rebuild(graph, fold_constants, rewrite)


def fold_affine(graph: Graph) -> Graph:
    """`linear` followed by a constant per-output scale or shift (batch norm, scaled logits) becomes one `linear`.

    Rounds differently from the two steps, as every implementation of a folded batch norm does.
    """
    readers = graph.consumers()

    def rewrite(new: Graph, node: Node, names: dict[str, str]) -> str | None:
        if node.op != "binary" or node.attrs["func"] not in ("add", "sub", "mul", "div"):
            return None
        func, inputs = node.attrs["func"], [names[i] for i in node.inputs]
        for position in (0, 1):
            source, other = inputs[position], inputs[1 - position]
            before = next((n for n in new.nodes if n.output == source and n.op == "linear"), None)
            if before is None or before.attrs.get("activation") or other not in new.constants:
                continue
            if position == 1 and func in ("sub", "div"):
                continue
            alone = len(readers[node.inputs[position]]) == 1 and node.inputs[position] not in graph.outputs
            weight = new.constants[before.inputs[1]]
            if not isinstance(weight, np.ndarray) or isinstance(new.constants[other], Deferred):
                continue
            row = _per_output(new.array(other), weight.shape[0])
            if not alone or row is None:
                continue
            bias = new.array(before.inputs[2]) if len(before.inputs) == 3 else np.zeros(len(weight), np.float32)
            if func in ("mul", "div"):
                factor = row if func == "mul" else np.float32(1) / row
                weight, bias = weight * factor[:, None], bias * factor
            else:
                bias = bias + row if func == "add" else bias - row
            new.nodes.remove(before)
            stem = node.output
            return new.add(
                "linear", before.inputs[0], new.add_constant(f"{stem}.weight", weight),
                new.add_constant(f"{stem}.bias", bias), output=node.output,
            )  # fmt: skip
        return None

    return rebuild(graph, fold_affine, rewrite)


def _per_output(value: Array, outputs: int) -> Array | None:
    """`value` as one number an output where it is constant along every other axis, else None."""
    if value.size == 1:
        return np.broadcast_to(value.reshape(()), (outputs,))
    if value.size == outputs and value.shape[-1] == outputs:
        return value.reshape(outputs)
    return None
