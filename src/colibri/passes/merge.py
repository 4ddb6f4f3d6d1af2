"""Merging of two matrices that read the same value and are multiplied: an expert's gate and up projection."""

from __future__ import annotations

from colibri.ir.graph import Graph, Node
from colibri.ir.weights import stack, stackable
from colibri.passes.rewrite import rebuild


def merge_gates(graph: Graph) -> Graph:
    """`binary mul` of two `linear`s on one input becomes one `linear` of both, and a product of its halves.

    The gate's activation moves into the product, which reads the halves where they are. The bits stay the same. Runs
    after quantising, for the two weights must be stored alike.
    """
    readers = graph.consumers()

    def rewrite(new: Graph, node: Node, names: dict[str, str]) -> str | None:
        if node.op != "binary" or node.attrs["func"] != "mul":
            return None
        pair = [next((n for n in new.nodes if n.output == names[i] and n.op == "linear"), None) for i in node.inputs]
        alone = all(len(readers[i]) == 1 and i not in graph.outputs for i in node.inputs)
        if pair[0] is None or pair[1] is None or not alone or not _alike(new, pair[0], pair[1]):
            return None
        gate, up = (pair[1], pair[0]) if pair[1].attrs.get("activation") else (pair[0], pair[1])
        merged = []
        for a, b in zip(gate.inputs[1:], up.inputs[1:], strict=True):
            merged.append(new.add_constant(f"{a}+{b}", stack(new.constants[a], new.constants[b])))
        new.nodes.remove(gate)
        new.nodes.remove(up)
        extra = {k: v for k, v in up.attrs.items() if k == "activations"}
        both = new.add("linear", gate.inputs[0], *merged, output=f"{gate.output}+{up.output}", **extra)
        width = new.shapes[both][-1] // 2
        axis = len(new.shapes[both]) - 1
        halves = [
            new.add("slice", both, output=f"{node.output}.{half}", axis=axis, start=start, stop=start + width, step=1)
            for half, start in (("gate", 0), ("up", width))
        ]
        kept = {k: gate.attrs[k] for k in ("activation", "alpha", "beta") if k in gate.attrs}
        return new.add("binary", *halves, output=node.output, func="mul", **kept)

    return rebuild(graph, merge_gates, rewrite)


def _alike(graph: Graph, a: Node, b: Node) -> bool:
    """Whether two linears read the same value with constants that can be stacked, and at most one has an activation."""
    if a is b or a.inputs[0] != b.inputs[0] or len(a.inputs) != len(b.inputs):
        return False
    if a.attrs.get("activations") != b.attrs.get("activations") or (
        a.attrs.get("activation") and b.attrs.get("activation")
    ):
        return False
    pairs = [(graph.constants.get(x), graph.constants.get(y)) for x, y in zip(a.inputs[1:], b.inputs[1:], strict=True)]
    return all(x is not None and y is not None and stackable(x, y) for x, y in pairs)
