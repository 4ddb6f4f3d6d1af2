"""NumPy interpreter of a graph, exactly as the engine must run it: the reference for every other implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from colibri.errors import ModelError
from colibri.ir.graph import Array, Graph, Node, mask
from colibri.ir.weights import loaded
from colibri.reference import arithmetic, ops, sequence

CANONICAL_NAN = np.uint32(0x7FC00000).view(np.float32)


@dataclass
class Trace:
    """What a run leaves behind on request: every MoE layer's choices and logits, and every value by name."""

    routes: list[np.ndarray[Any, np.dtype[np.int32]]] = field(default_factory=list)  # (batch, tokens, k) a layer
    logits: list[Array] = field(default_factory=list)  # (batch, tokens, experts) a layer
    values: dict[str, Array] = field(default_factory=dict)


@arithmetic.standard()
def run(
    graph: Graph, inputs: Sequence[Any], trace: Trace | None = None, source: Sequence[Any] | None = None
) -> list[Array]:
    """Outputs (batch, *shape) float32 of `graph` for inputs (batch, *shape); NaNs in them are the canonical 0x7FC00000.

    `source` are the inputs of an encoder-decoder model's source text; without it every row is its own source text.
    Raises ModelError where the inputs do not fit the graph.
    """
    arrays = _checked(graph, inputs)
    read = None if source is None else _checked(graph, source)
    with np.errstate(all="ignore"):
        values = _run(graph, arrays, trace, read)
    if trace is not None:
        trace.values.update(values)
    return [np.where(np.isnan(y), CANONICAL_NAN, y) for y in (values[name] for name in graph.outputs)]


def _checked(graph: Graph, inputs: Sequence[Any]) -> list[Array]:
    arrays = [np.ascontiguousarray(x, dtype=np.float32) for x in inputs]
    if len(arrays) != len(graph.inputs):
        raise ModelError(f"{graph.name} takes {len(graph.inputs)} inputs, not {len(arrays)}")
    for name, x in zip(graph.inputs, arrays, strict=True):
        if x.ndim == 0 or x.shape[1:] != graph.shapes[name] or len(x) != len(arrays[0]):
            raise ModelError(f"input {name!r} has shape {x.shape}, not (batch, {graph.shapes[name]})")
    if graph.context and len(arrays[0]) > graph.context:
        raise ModelError(f"{graph.name} takes texts of at most {graph.context} tokens, not {len(arrays[0])}")
    return arrays


def _run(
    graph: Graph, inputs: Sequence[Array], trace: Trace | None, source: Sequence[Array] | None = None
) -> dict[str, Array]:
    batch = len(inputs[0])
    encoder = graph.encoder() if graph.context else set()
    # A constant is the same for every sample: a batch axis of 1, stretched only where an operation needs it.
    values = {name: value[None] for name, value in graph.constants.items() if isinstance(value, np.ndarray)}
    values.update(zip(graph.inputs, inputs if source is None else source, strict=True))
    recurrences = {part.start: part for part in graph.recurrences().values()}
    inside = range(0)  # the nodes of the last recurrence, which have run
    for n, node in enumerate(graph.nodes):
        if n == len(encoder):  # the source text, which comes first, has been read
            values.update(zip(graph.inputs, inputs, strict=True))
        if n in recurrences:
            inside = recurrences[n]
            _recur(graph, inside, values)
        if n in inside:
            continue
        args = _args(node, values)
        for i in range(BY_POSITION.get(node.op, 0)):  # a constant, too, stands at every position
            of_source = node.output in encoder or (i > 0 and mask(node) == "cross")
            text = source if source is not None and of_source else inputs
            args[i] = np.broadcast_to(args[i], (len(text[0]), *args[i].shape[1:]))
        if node.op == "attention" and source is not None:
            y = _attention(node, args, alone=False)
        elif node.op == "moe":
            y = _moe(node, args, trace, node.output in encoder and source is not None)
        else:
            y = OPS[node.op](node, args, graph)
        values[node.output] = np.asarray(y, np.float32)
    for name in graph.outputs:
        values[name] = np.broadcast_to(values[name], (batch, *graph.shapes[name]))
    return values


def _args(node: Node, values: Mapping[str, Array]) -> list[Array]:
    return [values[i] for i in node.inputs if i in values]  # the weight of a linear may be no array


def _recur(graph: Graph, part: range, values: dict[str, Array]) -> None:
    """Run a recurrence; each value inside is left with the rows of all steps, sample after sample."""
    begin, *body, end = graph.nodes[part.start : part.stop]
    steps = end.attrs["steps"]
    rows = max(len(values[i]) for node in (begin, *body) for i in node.inputs if i in values)
    order = range(steps or rows)[:: -1 if end.attrs.get("reverse") else 1]
    state, seen = values[begin.inputs[0]], []
    for t in order:
        # In a stream a step is a sample.
        now = values if steps else {name: v[t : t + 1] if len(v) == rows else v for name, v in values.items()}
        now = {**now, begin.output: state}
        for node in body:
            y = now[node.inputs[0]][:, t] if node.op == "step" else OPS[node.op](node, _args(node, now), graph)
            now[node.output] = np.asarray(y, np.float32)
        state = now[end.output] = now[end.inputs[0]]
        seen.append(now)
    for node in (begin, *body, end):
        found = [step[node.output] for step in seen][:: order.step]
        batch = max(map(len, found))  # the first state may be a constant, with a batch of one
        whole = np.stack([np.broadcast_to(row, (batch, *row.shape[1:])) for row in found], axis=1)
        values[node.output] = whole if node is end and steps else whole.reshape(-1, *whole.shape[2:])


def _aligned(args: Sequence[Array]) -> list[Array]:
    """Per-sample axes aligned from the right, as NumPy would without the batch."""
    rank = max(a.ndim for a in args)
    return [a.reshape(a.shape[0], *(1,) * (rank - a.ndim), *a.shape[1:]) for a in args]


def _linear(node: Node, args: list[Array], graph: Graph) -> Array:
    _, weight, *bias = node.inputs
    matrix = loaded(graph.constants[weight]) if weight in graph.constants else args[1][0]
    y = ops.linear(args[0], matrix, args[-1][0] if bias else None, node.attrs.get("activations", "int8"))
    func = node.attrs.get("activation")
    return y if func is None else ops.unary(y, func, node.attrs.get("alpha", 0.0), node.attrs.get("beta", 0.0))


def _unary(node: Node, args: list[Array], graph: Graph) -> Array:
    return ops.unary(args[0], node.attrs["func"], node.attrs.get("alpha", 0.0), node.attrs.get("beta", 0.0))


def _binary(node: Node, args: list[Array], graph: Graph) -> Array:
    a, b = _aligned(args)
    before = node.attrs.get("activation")
    a = a if before is None else ops.unary(a, before, node.attrs.get("alpha", 0.0), node.attrs.get("beta", 0.0))
    y, then = np.asarray(ops.BINARY[node.attrs["func"]](a, b)), node.attrs.get("then")
    return y if then is None else ops.unary(y, then)


def _norm(which: Callable[..., Array]) -> Callable[[Node, list[Array], Graph], Array]:
    def norm(node: Node, args: list[Array], graph: Graph) -> Array:
        gamma, beta = (*(a[0] for a in args[1:]), None, None)[:2]
        return which(args[0], gamma, beta, node.attrs["eps"])

    return norm


def _slice(node: Node, args: list[Array], graph: Graph) -> Array:
    axis = node.attrs["axis"] % (args[0].ndim - 1) + 1
    index = [slice(None)] * args[0].ndim
    index[axis] = slice(node.attrs["start"], node.attrs["stop"], node.attrs["step"])
    return args[0][tuple(index)]


def _concat(node: Node, args: list[Array], graph: Graph) -> Array:
    batch = max(a.shape[0] for a in args)
    whole = [np.broadcast_to(a, (batch, *a.shape[1:])) for a in args]
    return np.concatenate(whole, axis=node.attrs["axis"] % (args[0].ndim - 1) + 1)


def _expand(node: Node, args: list[Array], graph: Graph) -> Array:
    x, shape = args[0], tuple(node.attrs["shape"])
    return np.broadcast_to(x.reshape(len(x), *(1,) * (len(shape) - x.ndim + 1), *x.shape[1:]), (len(x), *shape))


def _window(node: Node, args: list[Array], graph: Graph) -> Array:
    x, axis = args[0], node.attrs["axis"] % (args[0].ndim - 1) + 1
    count, size = graph.shapes[node.output][axis - 1 : axis + 1]
    places = np.arange(count)[:, None] * node.attrs["step"] + np.arange(size) * node.attrs["dilation"]
    return np.asarray(np.take(x, places, axis=axis))


def _matmul(node: Node, args: list[Array], graph: Graph) -> Array:
    a, b = args
    batch = max(len(a), len(b))
    (*_, m, k), n = a.shape, b.shape[-1]
    left = np.broadcast_to(a, (batch, *a.shape[1:])).reshape(-1, m, k)
    right = np.broadcast_to(b, (batch, *b.shape[1:])).reshape(-1, k, n)
    products = [ops.linear(x, np.ascontiguousarray(y.T), None) for x, y in zip(left, right, strict=True)]
    return np.stack(products).reshape(batch, *a.shape[1:-1], n)


def _embed(node: Node, args: list[Array], graph: Graph) -> Array:
    ids = args[0]
    rows = sequence.embed(ids.reshape(-1), loaded(graph.constants[node.inputs[1]]))
    return rows.reshape(len(ids), *graph.shapes[node.output])


def _attention(node: Node, args: list[Array], alone: bool) -> Array:
    """`alone`: a row's source text is the row itself."""
    q, k, v, *more = args
    sinks = more[0][0] if more and more[0].ndim == 2 else None
    biases = more[0][0] if more and more[0].ndim == 3 else None
    seen = mask(node)
    window, softcap = node.attrs.get("window", 0), node.attrs.get("softcap", 0.0)
    how = sequence.Attention(node.attrs["scale"], window, softcap, node.attrs.get("cache", "fp32"), seen or "causal")
    if seen != "causal" and alone:
        one = [slice(n, n + 1) for n in range(len(q))]
        return np.concatenate([sequence.attention(q[n], k[n], v[n], sinks, biases, how) for n in one])
    return sequence.attention(q, k, v, sinks, biases, how)


def _delay(node: Node, args: list[Array], graph: Graph) -> Array:
    steps, rows = node.attrs["steps"], node.attrs.get("rows")
    if rows is None:
        return sequence.delay(args[0], steps)
    return np.stack([sequence.delay(args[0], steps - row * node.attrs["apart"]) for row in range(rows)], axis=1)


def _delta(node: Node, args: list[Array], graph: Graph) -> Array:
    q, k, v, decay, beta = args
    return sequence.delta(q, k, v, decay, beta, node.attrs["scale"])


def _moe(node: Node, args: list[Array], trace: Trace | None, together: bool) -> Array:
    """`together`: all samples share the experts' capacity."""
    x, logits = args
    router, experts = node.attrs["router"], node.attrs["experts"]
    tokens = x.reshape(-1, x.shape[-1])
    chosen, weights = ops.route(logits.reshape(len(tokens), router.experts), router)
    ops.drop_overflow(chosen, router, len(tokens) if together else len(tokens) // len(x))
    width = experts[0].shapes[experts[0].outputs[0]][0]
    slots = np.zeros((len(tokens), router.k, width), np.float32)
    for e, expert in enumerate(experts):
        token, slot = np.nonzero(chosen == e)
        if len(token):
            rows = tokens[token]
            if router.apply == "input":
                rows = rows * weights[token, slot, None]
            slots[token, slot] = _run(expert, [rows], None)[expert.outputs[0]]
    if trace is not None:
        trace.routes.append(chosen.reshape(len(x), -1, router.k))
        trace.logits.append(logits.reshape(len(x), -1, router.experts))
    if router.apply == "input":
        weights = np.ones_like(weights)
    return ops.combine(slots, weights, chosen).reshape(*x.shape[:-1], width)


# Operations whose result depends on the position in a text, and how many of their inputs are rows of the text.
BY_POSITION = {"rope": 1, "attention": 3, "delay": 1, "delta": 5}

OPS: dict[str, Callable[[Node, list[Array], Graph], Any]] = {
    "linear": _linear,
    "unary": _unary,
    "binary": _binary,
    "softmax": lambda node, args, graph: ops.softmax(args[0]),
    "layernorm": _norm(ops.layernorm),
    "rmsnorm": _norm(ops.rmsnorm),
    "reduce": lambda node, args, graph: ops.reduce(
        args[0], node.attrs["func"], node.attrs["axis"] % (args[0].ndim - 1) + 1
    ),
    "reshape": lambda node, args, graph: args[0].reshape(len(args[0]), *node.attrs["shape"]),
    "transpose": lambda node, args, graph: args[0].transpose(0, *(p + 1 for p in node.attrs["perm"])),
    "slice": _slice,
    "concat": _concat,
    "expand": _expand,
    "window": _window,
    "matmul": _matmul,
    "embed": _embed,
    "rope": lambda node, args, graph: sequence.rope(args[0], args[1][0]),
    "attention": lambda node, args, graph: _attention(node, args, alone=True),
    "delay": _delay,
    "delta": _delta,
}
