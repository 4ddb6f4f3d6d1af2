"""Weight formats by role, for models whose weights are read only when they are written.

Unlike `choose.quantize` nothing is looked at: what a weight becomes, and its size, follow from how the graph uses it
and from its shape. A large matrix is quantised some rows at a time, for without an E its rows are independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from colibri.errors import ExportError
from colibri.ir.graph import Array, Graph, Node
from colibri.ir.weights import (
    WEIGHT_GROUP,
    Deferred,
    Fp16Weight,
    Int4Weight,
    Int8Weight,
    Loaded,
    StoredWeight,
    Weight,
    check,
    kind_of,
    loaded,
    outlier_bytes,
    take_rows,
)
from colibri.quantize import formats
from colibri.quantize.choose import router_linears

DTYPES = ("fp32", "fp16", "int8", "int4")
Energies = Mapping["str | tuple[int, int, str]", Array]

_KINDS: dict[str, type] = {"fp16": Fp16Weight, "int8": Int8Weight, "int4": Int4Weight}
_BLOCK = 1 << 21  # elements quantised at once
_MOST_WITH_E = 1 << 25  # elements: a larger matrix has no E, whose choice takes several copies of it


@dataclass(frozen=True)
class _Plan:
    """What the weights of linears become, and those of tables that nothing but `embed` reads."""

    dtype: str
    share: float
    activations: str
    energies: Energies
    masks: frozenset[str]


def quantize_deferred(
    graph: Graph,
    dtype: str,
    *,
    activations: str = "int8",
    share: float = 0.0,
    energies: Energies | None = None,
    masks: frozenset[str] = frozenset(),
) -> Graph:
    """The graph with its linears' weights and embedding tables as `dtype`, quantised when they are loaded.

    Routers stay float32, as do tables that a linear does not read and that are no embedding, vectors, and what would
    not get smaller. An embedding is int8 for int4 too, unless it is tied: also a linear's matrix, whose format it takes
    then, without E. `share` is of a weight's bytes, for its E. `energies` holds the mean squares of a weight's inputs
    by the constant's name, in experts by (layer, expert, name). What stays float32 is checked when it is loaded: -inf
    is allowed in `masks`. Raises ExportError for what no format is.
    """
    if dtype not in DTYPES:
        raise ExportError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if activations not in ("int8", "float") or (dtype == "int4" and activations == "float"):
        raise ExportError(f"activations {activations!r} are not 'int8', or for int8 weights 'float'")
    plan = _Plan(dtype, share, activations, energies or {}, masks)
    layers = {node.output: layer for layer, node in enumerate(graph.moe_nodes())}

    def rewrite(node: Node) -> Node:
        if node.op != "moe":
            return node
        layer, bodies = layers[node.output], node.attrs["experts"]
        experts = [_quantized(body, plan, set(), (layer, e)) for e, body in enumerate(bodies)]
        return replace(node, attrs={**node.attrs, "experts": experts})

    new = _quantized(graph, plan, router_linears(graph), None)
    return replace(new, nodes=list(map(rewrite, new.nodes)))


def _quantized(graph: Graph, plan: _Plan, routers: set[str], where: tuple[int, int] | None) -> Graph:
    """One graph, its experts left as they are; `where` is the expert it is."""
    uses: dict[str, set[str]] = {}  # of a constant: how nodes read it
    for node in graph.nodes:
        for position, name in enumerate(node.inputs):
            if name in graph.constants:
                use = node.op if position == 1 and node.op in ("linear", "embed") else "other"
                uses.setdefault(name, set()).add("router" if use == "linear" and node.output in routers else use)
    constants: dict[str, Weight] = {}
    for name, value in graph.constants.items():
        roles = uses.get(name, {"other"})
        kind, share = plan.dtype, plan.share
        if roles == {"embed"}:
            kind, share = ("int8" if kind == "int4" else kind), 0.0
        elif roles == {"linear", "embed"}:
            share = 0.0
        elif roles != {"linear"} or name in graph.outputs:
            kind = "fp32"
        energy = plan.energies.get(name if where is None else (*where, name))
        constants[name] = _as(value, kind, share, energy, name in plan.masks)

    def rewrite(node: Node) -> Node:
        integer = node.op == "linear" and kind_of(constants[node.inputs[1]])[0] == "Int8Weight"
        if plan.activations == "float" and integer:
            return replace(node, attrs={**node.attrs, "activations": "float"})
        return node

    return replace(graph, nodes=[rewrite(n) if n.inputs[1:2] and n.inputs[1] in constants else n for n in graph.nodes],
                   constants=constants)  # fmt: skip


def _as(value: Weight, kind: str, share: float, energy: Array | None, mask: bool) -> Weight:
    """A float32 weight as one that is quantised when it is loaded; others, and what gets no smaller, stay."""
    if kind_of(value)[0] != "ndarray" or (kind != "fp32" and len(value.shape) != 2):
        return value
    if kind == "fp32":
        return _checked(value, mask)
    rows, cols = value.shape
    entries = 0
    if kind != "fp16" and rows * cols <= _MOST_WITH_E:
        entries = formats.outlier_entries(rows, cols, share, kind)
    size = {"fp16": 2 * rows * cols, "int8": rows * cols + 4 * rows,
            "int4": rows * cols // 2 + 2 * rows * -(-cols // WEIGHT_GROUP)}[kind]  # fmt: skip
    size += outlier_bytes((rows, cols), entries) if entries else 0
    if size >= 4 * rows * cols:
        return _checked(value, mask)

    def part(start: int, stop: int) -> Loaded:
        return formats.encode(kind, _floats(take_rows(value, start, stop)), energy, 0.0)

    def whole() -> Loaded:
        matrix = _floats(loaded(value))
        return formats.encode(kind, matrix, energy, share) if entries else _in_blocks(matrix, kind, energy)

    alone = not entries and (not isinstance(value, Deferred) or value.rows is not None)
    return Deferred(value.shape, _KINDS[kind], whole, entries or -1, part if alone else None)


def _in_blocks(matrix: Array, kind: str, energy: Array | None) -> StoredWeight:
    """The same without E, and without temporaries of the matrix's size."""
    rows, cols = matrix.shape
    step = max(1, _BLOCK // cols)
    if rows <= step:
        return formats.encode(kind, matrix, energy, 0.0)
    fields: dict[str, Any] = {}
    for start in range(0, rows, step):
        block = formats.encode(kind, matrix[start : start + step], energy, 0.0)
        for field in ("values", "q", "scale"):
            if (part := getattr(block, field, None)) is not None:
                if start == 0:
                    fields[field] = np.empty((rows, *part.shape[1:]), part.dtype)
                fields[field][start : start + len(part)] = part
    weight: StoredWeight = _KINDS[kind](**fields)
    return weight


def _floats(value: Loaded) -> Array:
    assert isinstance(value, np.ndarray)
    return value


def _checked(value: Weight, mask: bool) -> Weight:
    """A float32 weight that is looked at when it is loaded: it must be finite, where `mask` is set or -inf."""
    if not isinstance(value, Deferred):
        return value
    rows = value.rows

    def sound(found: Loaded) -> Loaded:
        if isinstance(found, StoredWeight):
            check(found)
        elif not (np.isfinite(found) | (np.isneginf(found) & mask)).all():
            raise ExportError("a weight is NaN or infinite: train or load the model again")
        return found

    part = None if rows is None else lambda start, stop: sound(rows(start, stop))
    return replace(value, load=lambda: sound(value.load()), rows=part)
