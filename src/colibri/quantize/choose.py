"""Choice of every weight's format: one for all, or for `mixed` one for each weight, from measured sensitivity.

Router matrices stay float32, as does a weight that would not get smaller. `mixed` starts from float32 and moves weights
to cheaper formats in the order of squared output error per byte saved; a budget or an error limit says where to stop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from colibri.errors import ExportError
from colibri.ir.graph import Array, Graph, Node, is_absent
from colibri.ir.weights import ACTIVATION_GROUP, Int4Weight, Int8Weight, Loaded, dense, loaded
from colibri.quantize import formats
from colibri.quantize.lift import lifted
from colibri.quantize.report import relative_error, weight_error
from colibri.reference.interpreter import Trace, run
from colibri.reference.ops import quantize_rows

DTYPES = ("fp32", "fp16", "int8", "int4", "mixed")

_MOST_ROWS = 1024  # calibration rows that are run for energies and for the error limit
_SENSITIVITY_ROWS = 256  # of them, run once for every weight and format
_MOST_WORK = 1 << 32  # multiply-accumulates spent on whole runs; beyond, a weight's own output stands for the model's
_TRIED, _TRIED_ROWS = 16, 64  # weights, and rows of each, on which E is tried
_PAYS = 2 / 3  # of the error without E: where more is left, E is not worth the time it takes
_SEE_THROUGH = (
    "unary",
    "binary",
    "reshape",
    "transpose",
    "slice",
    "concat",
    "expand",
)  # between a router and its logits

Key = tuple[str, int, str]  # MoE layer ("" outside), expert (-1 outside), constant


@dataclass(frozen=True)
class Choice:
    """The format of one weight, its bytes, and why it stays float32 where it has to.

    `sensitivity` is the relative output error when only this weight takes the format; None where it was not measured.
    """

    name: str
    format: str
    bytes: int
    sensitivity: float | None = None
    kept: str = ""


@dataclass
class _Tensor:
    """A weight, the rows its linears saw in calibration (n, cols), and what it can become, dearest first."""

    key: Key
    matrix: Array
    kept: str
    seen: Array | None = None
    frequency: float = 1.0  # share of the tokens that reach it
    options: dict[str, Loaded] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)  # squared relative error by option

    @property
    def name(self) -> str:
        layer, expert, constant = self.key
        return constant if not layer else f"{layer}.expert{expert}: {constant}"


def quantize(
    graph: Graph,
    dtype: str,
    rows: Sequence[Array] | None = None,
    *,
    activations: str = "int8",
    share: float | None = None,
    budget: int | None = None,
    max_error: float | None = None,
) -> tuple[Graph, list[Choice]]:
    """The graph with its linears' weights stored as `dtype`, and what was chosen for each of them.

    `rows` holds calibration rows (n, *shape) for each input; `activations` is "int8" or "float"; `share` is of a
    weight's bytes, for its E (None: 1 % where E pays for its time); `budget` is in bytes of all constants together;
    `max_error` is ‖Δ‖ / ‖y‖ of the worst output. Raises ExportError where these cannot be met.
    """
    _check(dtype, rows, activations, budget, max_error)
    rows = None if rows is None else [_spread(x, _MOST_ROWS) for x in rows]
    if dtype in ("fp16", "int4", "mixed"):
        graph = lifted(graph, router_linears(graph))
    # Only integer formats look at the inputs; a run of the whole model is not spent on the others.
    tensors = _tensors(graph, None if dtype in ("fp32", "fp16") else rows)
    kinds = DTYPES[:-1] if dtype == "mixed" else tuple(dict.fromkeys(("fp32", dtype)))
    shares = {kind: _share(tensors, kind) if share is None else share for kind in kinds if kind.startswith("int")}
    for tensor in tensors:
        _add_options(tensor, [k for k in kinds if k != "int4" or activations == "int8"], shares, dtype != "mixed")
    if dtype == "mixed":
        chosen = _mixed(graph, tensors, rows, activations, budget, max_error)
    else:
        chosen = {tensor.key: list(tensor.options)[-1] for tensor in tensors}
    new = _apply(graph, tensors, chosen, activations)
    size = stored_bytes(new)
    if budget is not None and size > budget:
        raise ExportError(f"{dtype} takes {size:,} bytes, more than the {budget:,} of the budget: use --dtype mixed")
    error = _error(graph, new, rows) if max_error is not None and rows is not None else 0.0
    if max_error is not None and error > max_error:
        raise ExportError(f"{dtype} has an output error of {error:.3%}, more than the {max_error:.3%} allowed: raise "
                          "the limit or the budget, or use a wider format")  # fmt: skip
    return new, [_choice(tensor, chosen[tensor.key]) for tensor in tensors]


def stored_bytes(graph: Graph) -> int:
    """Bytes of all constants as they are stored, experts included, padding and headers left out."""
    own = sum(loaded(value).nbytes for value in graph.constants.values())
    experts = (expert for node in graph.moe_nodes() for expert in node.attrs["experts"] if not is_absent(expert))
    return own + sum(map(stored_bytes, experts))


def _check(
    dtype: str, rows: Sequence[Array] | None, activations: str, budget: int | None, max_error: float | None
) -> None:
    problems = [
        (dtype not in DTYPES, f"dtype {dtype!r} is not one of {', '.join(DTYPES)}"),
        (activations not in ("int8", "float"), f"activations {activations!r} are not 'int8' or 'float'"),
        (dtype == "int4" and activations == "float", "int4 weights need int8 activations: use int8 or fp16 for float"),
        (dtype == "mixed" and budget is None and max_error is None, "mixed needs a budget in bytes or a max_error"),
        (max_error is not None and rows is None, "max_error needs calibration rows"),
    ]
    for bad, message in problems:
        if bad:
            raise ExportError(message)


# --- the weights and what they see ------------------------------------------------------------------------------------


def _tensors(graph: Graph, rows: Sequence[Array] | None) -> list[_Tensor]:
    """Every weight of a linear, in program order, with its inputs in a run of the reference on `rows`."""
    trace = Trace()
    if rows is not None:
        run(graph, rows, trace)
    routers = router_linears(graph)
    tensors = [*_weights(graph, ("", -1), trace.values, routers)]
    for layer, node in enumerate(graph.moe_nodes()):
        tokens = np.zeros((0, graph.shapes[node.inputs[0]][-1]), np.float32)
        for e, expert in enumerate(node.attrs["experts"]):
            values, frequency = Trace(), 1.0
            if rows is not None:
                tokens = trace.values[node.inputs[0]].reshape(-1, tokens.shape[1])
                mine = (trace.routes[layer].reshape(len(tokens), -1) == e).any(axis=1)
                frequency = float(mine.mean())
                if mine.any():
                    run(expert, [tokens[mine]], values)
            for tensor in _weights(expert, (node.output, e), values.values, set()):
                tensors.append(replace(tensor, frequency=frequency))
    return tensors


def _weights(graph: Graph, where: tuple[str, int], values: Mapping[str, Array], routers: set[str]) -> Iterator[_Tensor]:
    """The weights of one graph, given the values of a run of it if there was one."""
    readers = graph.consumers()
    for name in dict.fromkeys(node.inputs[1] for node in graph.nodes if node.op == "linear"):
        matrix = graph.constants.get(name)
        if not isinstance(matrix, np.ndarray):
            continue
        uses = [node for node in readers[name] if node.op == "linear" and node.inputs[1] == name]
        elsewhere = len(uses) < len(readers[name]) or any(name in (n.inputs[0], *n.inputs[2:]) for n in uses)
        kept = "router" if any(n.output in routers for n in uses) else ""
        kept = kept or ("read by other operations" if elsewhere or name in graph.outputs else "")
        seen = [values[n.inputs[0]].reshape(-1, matrix.shape[1]) for n in uses if n.inputs[0] in values]
        yield _Tensor((*where, name), matrix, kept, np.concatenate(seen) if seen and len(seen[0]) else None)


def router_linears(graph: Graph) -> set[str]:
    """Outputs of the linears that are routers: what only logits depend on, and whatever gives logits directly."""
    producers = graph.producers()
    useful, direct = set(graph.outputs), {node.inputs[1] for node in graph.moe_nodes()}
    for node in reversed(graph.nodes):
        if node.output in useful:
            useful.update(node.inputs[:1] if node.op == "moe" else node.inputs)
        if node.output in direct and node.op in _SEE_THROUGH:
            direct.update(node.inputs)
    linears = {name for name, node in producers.items() if node.op == "linear"}
    return {name for name in linears if name in direct or name not in useful}


def _share(tensors: Sequence[_Tensor], kind: str) -> float:
    """The share of bytes for E: SHARE where it takes a third off the error of most weights in a sample, otherwise 0."""
    free = [tensor.matrix for tensor in tensors if not tensor.kept]
    ratios = []
    for matrix in free[:: -(-len(free) // _TRIED)] if free else []:
        some = _spread(matrix, _TRIED_ROWS)
        try:
            with_e, without = (weight_error(some, formats.encode(kind, some, None, s)) for s in (formats.SHARE, 0.0))
        except ExportError:
            continue
        ratios.append(with_e / without if without > 0 else 1.0)
    return formats.SHARE if ratios and float(np.median(ratios)) < _PAYS else 0.0


def _add_options(tensor: _Tensor, kinds: Sequence[str], shares: Mapping[str, float], strict: bool) -> None:
    """What `tensor` can become, each option smaller than the one before it; float32 always."""
    tensor.options["fp32"] = tensor.matrix
    if tensor.kept:
        return
    energy = None if tensor.seen is None else np.asarray(np.square(tensor.seen).mean(axis=0), np.float32)
    for kind in kinds[1:]:
        try:
            weight = formats.encode(kind, tensor.matrix, energy, shares.get(kind, 0.0))
        except ExportError as error:
            if strict:
                raise ExportError(f"{tensor.name}: {error}") from None
            continue
        if weight.nbytes < list(tensor.options.values())[-1].nbytes:
            tensor.options[kind] = weight
    if len(tensor.options) == 1 and kinds[1:]:
        tensor.kept = "no smaller in another format"


def _apply(graph: Graph, tensors: Sequence[_Tensor], chosen: Mapping[Key, str], activations: str) -> Graph:
    """A copy of `graph` with the chosen options in place of its weights."""
    weights = {t.key: t.options[chosen[t.key]] for t in tensors if t.key in chosen}

    def copy(part: Graph, layer: str, expert: int) -> Graph:
        constants = {name: weights.get((layer, expert, name), value) for name, value in part.constants.items()}

        def rewrite(node: Node) -> Node:
            if node.op == "moe":
                experts = [copy(body, node.output, e) for e, body in enumerate(node.attrs["experts"])]
                return replace(node, attrs={**node.attrs, "experts": experts})
            if activations == "float" and node.op == "linear" and isinstance(constants.get(node.inputs[1]), Int8Weight):
                return replace(node, attrs={**node.attrs, "activations": "float"})
            return node

        return replace(part, nodes=list(map(rewrite, part.nodes)), constants=constants)

    return copy(graph, "", -1)


def _choice(tensor: _Tensor, kind: str) -> Choice:
    squared = tensor.errors.get(kind)
    sensitivity = None if squared is None else float(np.sqrt(squared))
    return Choice(tensor.name, kind, tensor.options[kind].nbytes, sensitivity, tensor.kept)


# --- mixed ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Move:
    """One weight from one format to a cheaper one: squared error gained per byte saved, and the bytes."""

    slope: float
    tensor: int
    source: str
    target: str
    saved: int


def _mixed(
    graph: Graph,
    tensors: list[_Tensor],
    rows: Sequence[Array] | None,
    activations: str,
    budget: int | None,
    max_error: float | None,
) -> dict[Key, str]:
    """The format of every weight: the first moves that meet the budget, or the last ones that keep the error limit."""
    _measure(graph, tensors, rows, activations)
    moves = sorted((m for n, t in enumerate(tensors) for m in _moves(n, t)), key=lambda m: (m.slope, m.tensor))
    sizes = stored_bytes(graph) - np.cumsum([0, *(m.saved for m in moves)])
    if budget is not None:
        if sizes[-1] > budget:
            raise ExportError(f"a budget of {budget:,} bytes cannot be met: the smallest this model gets is "
                              f"{sizes[-1]:,} bytes")  # fmt: skip
        count = int(np.argmax(sizes <= budget))
        return _fill(tensors, moves[:count], budget - int(sizes[count]))
    count, over = 0, len(moves) + 1
    while rows is not None and max_error is not None and over - count > 1:
        middle = (count + over) // 2
        new = _apply(graph, tensors, _fill(tensors, moves[:middle], 0), activations)
        count, over = (middle, over) if _error(graph, new, rows) <= max_error else (count, middle)
    return _fill(tensors, moves[:count], 0)


def _fill(tensors: Sequence[_Tensor], moves: Sequence[_Move], spare: int) -> dict[Key, str]:
    """The formats after `moves`; those that cost most are taken back where the `spare` bytes allow it."""
    chosen = {t.key: "fp32" for t in tensors}
    for move in moves:
        chosen[tensors[move.tensor].key] = move.target
    for move in reversed(moves):
        if move.saved <= spare and move.slope > 0 and chosen[tensors[move.tensor].key] == move.target:
            chosen[tensors[move.tensor].key] = move.source
            spare -= move.saved
    return chosen


def _moves(number: int, tensor: _Tensor) -> Iterator[_Move]:
    """The steps from float32 to the smallest option along the lower convex hull of (bytes, error): slopes rise."""

    def slope(a: str, b: str) -> float:
        saved = tensor.options[a].nbytes - tensor.options[b].nbytes
        return (tensor.errors[b] - tensor.errors[a]) / saved

    hull = ["fp32"]
    for kind in list(tensor.options)[1:]:
        while len(hull) > 1 and slope(hull[-2], hull[-1]) >= slope(hull[-1], kind):
            hull.pop()
        hull.append(kind)
    for a, b in pairwise(hull):
        yield _Move(slope(a, b), number, a, b, tensor.options[a].nbytes - tensor.options[b].nbytes)


def _measure(graph: Graph, tensors: Sequence[_Tensor], rows: Sequence[Array] | None, activations: str) -> None:
    """Fill in every option's squared error: the model's if there is time for whole runs, else its own output's."""
    options = [(tensor, kind) for tensor in tensors for kind in tensor.options]
    some = None if rows is None else [_spread(x, _SENSITIVITY_ROWS) for x in rows]
    weights = sum(t.matrix.size for t in tensors)
    whole = some is not None and len(options) * weights * len(some[0]) <= _MOST_WORK
    for tensor, kind in options:
        if kind == "fp32":
            tensor.errors[kind] = 0.0
        elif whole and some is not None:
            tensor.errors[kind] = _error(graph, _apply(graph, [tensor], {tensor.key: kind}, activations), some) ** 2
        else:
            tensor.errors[kind] = tensor.frequency * _own_error(tensor, kind, activations) ** 2


def _own_error(tensor: _Tensor, kind: str, activations: str) -> float:
    """Relative error of the output of one weight's linears on what they saw, quantised activations included."""
    weight = tensor.options[kind]
    if tensor.seen is None:
        return weight_error(tensor.matrix, weight)
    x = _spread(tensor.seen, _SENSITIVITY_ROWS)
    read = x
    if isinstance(weight, Int4Weight) or (isinstance(weight, Int8Weight) and activations == "int8"):
        q, scale = quantize_rows(x)
        read = np.asarray(q * np.repeat(scale, ACTIVATION_GROUP, axis=1)[:, : x.shape[1]], np.float32)
    return relative_error(x @ tensor.matrix.T, read @ dense(weight).T)


def own_errors(
    reference: Graph, new: Graph, rows: Sequence[Array], activations: str
) -> list[tuple[str, float, float, float]]:
    """For every quantised matrix that rows reach: its name, its relative error on the inputs it sees, and the largest
    and the least size (root mean square) of one of these."""
    graph = (
        lifted(reference, router_linears(reference)) if set(reference.constants) != set(new.constants) else reference
    )
    graphs = {("", -1): new}
    for node in new.moe_nodes():
        graphs |= {(node.output, e): body for e, body in enumerate(node.attrs["experts"])}
    found = []
    for tensor in _tensors(graph, rows):
        layer, expert, name = tensor.key
        stored = graphs[layer, expert].constants.get(name)
        if tensor.seen is None or stored is None or isinstance(stored, np.ndarray):
            continue
        tensor.options["stored"] = loaded(stored)
        sizes = np.sqrt(np.square(tensor.seen.astype(np.float64)).mean(axis=0))
        error = tensor.frequency * _own_error(tensor, "stored", activations)
        found.append((tensor.name, error, float(sizes.max()), float(sizes.min())))
    return found


def _spread(rows: Array, most: int) -> Array:
    """At most `most` of the rows, evenly spaced: neighbours are often alike."""
    return rows[np.arange(min(len(rows), most)) * len(rows) // min(len(rows), most)]


def _error(reference: Graph, new: Graph, rows: Sequence[Array]) -> float:
    """‖Δ‖ / ‖y‖ of the worst output."""
    return max(relative_error(a, b) for a, b in zip(run(reference, rows), run(new, rows), strict=True))
