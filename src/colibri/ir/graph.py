"""Intermediate representation: a small graph of tensor operations on one sample.

Every value has a *per-sample* shape: the batch is implicit, always first, and no operation may mix samples. A value
is an input, a constant (a NumPy array without batch) or the output of one node. Operations on the last axis treat
the leading axes as independent rows ("tokens").

In a language model (`Graph.context` > 0) the samples are the tokens of one text: sample n of a run is the token at
position n, and `rope`, `attention`, `delay` and `delta` look at the positions up to their own. Everything else stays
as it is. A stream (`context` = ENDLESS) is the same without an end: its samples are time steps.

A recurrence is a stretch of nodes that runs once for every step of a sequence, or of a stream: `state` opens it with
the state before the first step, `step` gives a sequence's element, the nodes that follow compute on them, and `collect`
closes it with the state after the step, whose values of all steps are its output.

An encoder-decoder model has two texts. The nodes that attention of mask `cross` takes its keys and values from, and
all those before them (`Graph.encoder`), run on the tokens of the source text, all others on those of the text. The
input is the id of either.

This file knows the operations, their shapes and their attributes; what they compute is defined, to the last bit, in
`colibri.reference`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from colibri.common import strict_json
from colibri.common.names import check_port, shown
from colibri.errors import ExportError
from colibri.ir.weights import Deferred, StoredWeight, Weight, dense, kind_of

Shape = tuple[int, ...]
Array = np.ndarray[Any, np.dtype[np.float32]]

UNARY = (
    "identity", "relu", "leaky_relu", "clamp", "neg", "abs", "square", "sqrt", "rsqrt", "reciprocal", "exp", "log",
    "expm1", "log1p", "tanh", "erf", "sigmoid", "silu", "gelu", "gelu_tanh", "softplus", "elu", "hardswish",
    "hardsigmoid",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "fill")  # fill: the second, or the first where that is NaN
REDUCE = ("sum", "mean", "max")
SCORES = ("softmax", "sigmoid", "logit", "sqrt_softplus", "sparse_mixer")
NORMALIZE = ("none", "sum", "softmax", "one", "clamped")
GROUP_RULES = ("max", "top2")
APPLY = ("output", "input")
CACHES = ("fp32", "fp16", "int8")
MASKS = ("causal", "full", "cross")
ENDLESS = 1 << 30  # `Graph.context` of a stream
ALL_SAMPLES = ("moe", "embed", "rope", "attention", "delay", "delta")  # run on all samples at once: never step by step


@dataclass(frozen=True)
class Router:
    """How one token's logits become k chosen experts and their weights.

    p = score(logits) over all experts; the k with the largest p + `bias` are chosen, the lowest index winning ties. Of
    `groups` neighbouring groups of equal size only the `kept_groups` best take part, ranked by their largest p + bias
    or by the sum of their two largest. w = p at the chosen: `none` as it is, `sum` divided by (its sum over the chosen
    + `epsilon`), `clamped` by the larger of that sum and `epsilon`, `softmax` of the chosen logits (score `logit`
    only), `one` replaced by 1. Then w is multiplied by `scale` and by the expert's own entry of `expert_scale`.

    Score `sparse_mixer` (Phi-3.5-MoE): one expert after the other, the largest logit m of those left; w is its softmax
    among those left whose (m - l) / max(|l|, m) is at most 2 · `epsilon`.

    `capacity` (Switch): tokens of one sample an expert takes, in order; what is beyond has no expert in that place, and
    counts as expert -1. 0: no limit. `apply`: whether w multiplies the expert's output or its input (Llama 4).
    """

    experts: int
    k: int
    score: str = "softmax"
    normalize: str = "none"
    scale: float = 1.0
    bias: tuple[float, ...] = ()
    groups: int = 1
    kept_groups: int = 1
    group_rule: str = "max"
    epsilon: float = 0.0
    expert_scale: tuple[float, ...] = ()
    capacity: int = 0
    apply: str = "output"

    @property
    def keyed(self) -> bool:
        """Whether what is compared are p + bias, and not the logits, whose order is the same."""
        return bool(self.bias) or self.groups > 1

    def __post_init__(self) -> None:
        for name in ("bias", "expert_scale"):
            object.__setattr__(self, name, tuple(float(np.float32(v)) for v in getattr(self, name)))
        size = self.experts // max(1, self.groups)
        mixer, logit = self.score == "sparse_mixer", self.score == "logit"
        kept = self.kept_groups * size
        problems = [
            (self.experts > 65535, f"{self.experts} experts; a layer has at most 65535"),
            (not 1 <= self.k <= self.experts, f"k = {self.k} must be between 1 and the {self.experts} experts"),
            (self.score not in SCORES, f"score {self.score!r} is not one of {', '.join(SCORES)}"),
            (self.normalize not in NORMALIZE, f"normalize {self.normalize!r} is not one of {', '.join(NORMALIZE)}"),
            (self.normalize == "softmax" and not logit, "normalize 'softmax' needs score 'logit'"),
            (logit and self.normalize not in ("softmax", "one"), "score 'logit' needs 'softmax' or 'one'"),
            (not np.isfinite(np.float32(self.scale)), f"scale {self.scale} is not finite"),
            (len(self.bias) not in (0, self.experts), f"{len(self.bias)} biases for {self.experts} experts"),
            (bool(np.isnan(self.bias).any()), "a selection bias is NaN"),
            (
                len(self.expert_scale) not in (0, self.experts),
                f"{len(self.expert_scale)} scales of {self.experts} experts",
            ),
            (not np.isfinite(self.expert_scale).all(), "an expert's scale is not finite"),
            (self.groups < 1 or self.experts % self.groups != 0, f"{self.experts} experts in {self.groups} groups"),
            (not 1 <= self.kept_groups <= self.groups, f"{self.kept_groups} of {self.groups} groups"),
            (self.k > kept, f"k = {self.k}, but {self.kept_groups} groups have {kept} experts"),
            (self.group_rule not in GROUP_RULES, f"group rule {self.group_rule!r} is not {' or '.join(GROUP_RULES)}"),
            (self.groups > 1 and self.group_rule == "top2" and size < 2, "groups of one expert have no two largest"),
            (
                not (np.isfinite(self.epsilon) and self.epsilon >= 0),
                f"epsilon {self.epsilon} is not finite or negative",
            ),
            (not 0 <= self.capacity <= 1 << 30, f"capacity {self.capacity} is not a number of tokens"),
            (self.apply not in APPLY, f"apply {self.apply!r} is not {' or '.join(APPLY)}"),
            (mixer and (self.keyed or self.normalize != "none"), "'sparse_mixer' knows no bias, groups, normalisation"),
            (mixer and self.k > 8, f"'sparse_mixer' chooses at most 8 experts, not {self.k}"),
        ]
        for bad, message in problems:
            if bad:
                raise ExportError(f"router: {message}")


@dataclass(frozen=True)
class Node:
    """One operation: `output = op(*inputs)`; `inputs` name values of the same graph."""

    op: str
    output: str
    inputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Graph:
    """Inputs, constants and nodes in the order they run; `shapes` holds every value's per-sample shape."""

    name: str = "model"
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, Weight] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    context: int = 0  # most tokens of a text; 0: samples have nothing to do with each other
    start: int = 0  # of an encoder-decoder model, the token its texts begin with

    def add_input(self, name: str, shape: Shape) -> str:
        """Declare an input of per-sample `shape`; returns its name."""
        self._declare(name, tuple(int(n) for n in shape))
        self.inputs.append(name)
        return name

    def add_constant(self, name: str, value: Any) -> str:
        """Store `value`, arrays as float32, under `name` or a name like it that is free; returns the name used."""
        stored = value if isinstance(value, StoredWeight | Deferred) else np.asarray(value, np.float32, order="C")
        unique, n = name, 1
        while unique in self.shapes:
            held = self.constants.get(unique)
            if held is stored or (_is_array(held) and _is_array(stored) and _same(held, stored)):
                return unique
            unique, n = f"{name}.{n}", n + 1
        self._declare(unique, stored.shape)
        self.constants[unique] = stored
        return unique

    def array(self, name: str) -> Array:
        """A constant as the float32 array it stands for."""
        return dense(self.constants[name])

    def add(self, op: str, *inputs: str, output: str | None = None, **attrs: Any) -> str:
        """Append a node, infer its shape, return the name of its output.

        Raises ExportError where the operation is unknown or does not accept these shapes or attributes.
        """
        if op not in OPS:
            raise ExportError(f"operation {op!r} is not known; known are {', '.join(sorted(OPS))}")
        for name in inputs:
            if name not in self.shapes:
                raise ExportError(f"{op}: value {name!r} is not defined before it is used")
        name = output or self.fresh(op)
        node = Node(op, name, tuple(inputs), attrs)
        try:
            shape = OPS[op](node, [self.shapes[i] for i in inputs])
        except ExportError as error:
            raise ExportError(f"{name} = {op}({', '.join(inputs)}): {error}") from None
        self._declare(name, shape)
        self.nodes.append(node)
        return name

    def fresh(self, stem: str) -> str:
        """A value name that is not in use, starting with `stem`."""
        n = 0
        while f"{stem}_{n}" in self.shapes:
            n += 1
        return f"{stem}_{n}"

    def _declare(self, name: str, shape: Shape) -> None:
        if name in self.shapes:
            raise ExportError(f"value {name!r} is defined twice")
        if any(n <= 0 for n in shape):
            raise ExportError(f"value {name!r} has an empty shape {shape}")
        self.shapes[name] = shape

    def validate(self) -> None:
        """Re-derive every shape from the inputs and constants; raises ExportError at the first disagreement."""
        fresh = Graph(self.name, context=self.context)
        for i in self.inputs:
            fresh.add_input(i, self.shapes[i])
        for name, value in self.constants.items():
            fresh._declare(name, value.shape)
        for node in self.nodes:
            fresh.add(node.op, *node.inputs, output=node.output, **node.attrs)
            if fresh.shapes[node.output] != self.shapes[node.output]:
                raise ExportError(f"{node.output}: shape {self.shapes[node.output]} is not {node.op}'s")
        for name in self.outputs:
            if name not in fresh.shapes:
                raise ExportError(f"output {name!r} is not defined")
        self._validate_texts()
        self.recurrences()
        if not self.outputs:
            raise ExportError(f"graph {self.name!r} has no outputs")
        for what, names in (("an input", self.inputs), ("an output", self.outputs)):
            for name in names:
                check_port(name, f"{what} of graph {self.name!r}")

    def _validate_texts(self) -> None:
        encoder = self.encoder()
        for n, node in enumerate(self.nodes):
            inside = node.output in encoder
            seen = node.inputs[:1] + node.inputs[3:] if mask(node) == "cross" else node.inputs
            if not inside and encoder & set(seen):
                raise ExportError(f"{node.output}: {node.op} takes values of the source text beside those of the text")
            if inside and n and self.nodes[n - 1].output not in encoder:
                raise ExportError(f"{node.output}: what reads the source text comes before all other operations")
            if inside and node.op == "delta":
                raise ExportError(f"{node.output}: the delta rule on a source text is not supported")
            if inside != (mask(node) == "full") and mask(node) is not None:
                raise ExportError(f"{node.output}: an encoder's attention, and no other, sees all of its text")
            if self.context and not inside and node.op == "moe" and node.attrs["router"].capacity:
                raise ExportError(f"{node.output}: a capacity is for tokens that come together, as a source text's do")

    def moe_nodes(self) -> Iterator[Node]:
        """The MoE nodes in the order they run; their position is the layer number reported everywhere."""
        return (node for node in self.nodes if node.op == "moe")

    def encoder(self) -> set[str]:
        """The values computed from the source text; empty but for encoder-decoder models."""
        wanted = {name for node in self.nodes if mask(node) == "cross" for name in node.inputs[1:3]}
        for node in reversed(self.nodes):
            if node.output in wanted:
                wanted |= set(node.inputs)
        return {node.output for node in self.nodes if node.output in wanted}

    def recurrences(self) -> dict[str, range]:
        """Which nodes, from `state` to `collect`, are a recurrence, by the output of its `state`.

        Raises ExportError where it is not closed, holds a step of another number of elements, an operation that may not
        be repeated, or something that is read outside it.
        """
        found: dict[str, range] = {}
        begin, inside = None, set()
        for n, node in enumerate(self.nodes):
            state = "" if begin is None else self.nodes[begin].output
            if node.op == "state":
                _need(begin is None, f"{node.output}: a recurrence inside another; run the inner one first")
                begin, inside = n, {node.output}
                continue
            if begin is None:
                _need(node.op not in ("step", "collect"), f"{node.output}: {node.op} without a state before it")
                continue
            _need(node.op not in ALL_SAMPLES, f"{node.output}: {node.op} inside a recurrence is not supported")
            _need(node.op != "step" or node.inputs[0] not in inside, f"{node.output}: a step of a step")
            inside.add(node.output)
            if node.op == "collect":
                _need(node.inputs[1] == state, f"{node.output}: closes another recurrence than the one that is open")
                found[state] = range(begin, n + 1)
                begin = None
                inside.discard(node.output)
                steps = {self.shapes[m.inputs[0]][0] for m in self.nodes[found[state].start : n] if m.op == "step"}
                _need(
                    self.context > 0 or node.attrs["steps"] > 0,
                    f"{node.output}: only a stream has its steps in samples",
                )
                _need(steps <= {node.attrs["steps"]}, f"{node.output}: {steps} elements in {node.attrs['steps']} steps")
                later = {name for m in self.nodes[n + 1 :] for name in m.inputs} | set(self.outputs)
                _need(not inside & later, f"{node.output}: {inside & later} is read outside its recurrence")
        _need(begin is None, "a recurrence is not closed")
        return found

    def producers(self) -> dict[str, Node]:
        """Each node by the name of its output."""
        return {node.output: node for node in self.nodes}

    def consumers(self) -> dict[str, list[Node]]:
        """The nodes that read each value (graph outputs are not listed)."""
        readers: dict[str, list[Node]] = {name: [] for name in self.shapes}
        for node in self.nodes:
            for name in node.inputs:
                readers[name].append(node)
        return readers

    def __str__(self) -> str:
        lines = [f"graph {self.name}"]
        lines += [f"  input  {name}: {list(self.shapes[name])}" for name in self.inputs]
        for node in self.nodes:
            plain = {k: v for k, v in node.attrs.items() if k != "experts" and v is not None}
            attrs = "".join(f" {k}={v}" for k, v in plain.items())
            args = ", ".join(f"{i}{list(self.shapes[i])}" for i in node.inputs)
            lines.append(f"  {node.output}: {list(self.shapes[node.output])} = {node.op}({args}){attrs}")
            experts: list[Graph] = node.attrs.get("experts", [])
            alike = len({expert.signature() for expert in experts}) == 1
            for n, expert in enumerate(experts[:1] if alike else experts):
                lines.append(f"    expert {f'0…{len(experts) - 1}' if alike else n}")
                lines += [f"    {line}" for line in str(expert).splitlines()[1:]]
        lines.append(f"  output {', '.join(self.outputs)}")
        return "\n".join(lines)

    def signature(self) -> str:
        """Text equal for two graphs exactly when they run the same program on constants of the same shapes."""
        number = {name: n for n, name in enumerate([*self.inputs, *self.constants, *(n.output for n in self.nodes)])}
        nodes = [(n.op, [number[i] for i in n.inputs], number[n.output], repr(sorted(n.attrs.items())))
                 for n in self.nodes]  # fmt: skip
        shapes = [self.shapes[name] for name in number]
        kinds = [kind_of(value) for value in self.constants.values()]
        return repr((len(self.inputs), kinds, nodes, shapes, [number[o] for o in self.outputs]))


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _same(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and a.tobytes() == b.tobytes())


# --- shapes -----------------------------------------------------------------------------------------------------------


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ExportError(message)


def normalize_axis(axis: int, rank: int) -> int:
    """`axis` counted from the front; raises ExportError when it is out of range for `rank` per-sample axes."""
    _need(-rank <= axis < rank, f"axis {axis} is out of range for {rank} per-sample axes")
    return axis % rank


def _linear(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) in (2, 3), "needs x, weight and perhaps bias")
    x, weight = shapes[:2]
    _need(len(x) >= 1 and len(weight) == 2 and x[-1] == weight[1], f"x {x} does not fit weight {weight} (out, in)")
    _need(len(shapes) == 2 or shapes[2] == (weight[0],), f"bias {shapes[-1]} does not fit weight {weight}")
    _need(node.attrs.get("activation") in (None, *UNARY), f"unknown activation {node.attrs.get('activation')!r}")
    _need(node.attrs.get("activations", "int8") in ("int8", "float"), "activations are 'int8' or 'float'")
    return (*x[:-1], weight[0])


def _unary(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) == 1, "needs one input")
    _need(node.attrs.get("func") in UNARY, f"unknown function {node.attrs.get('func')!r}")
    return shapes[0]


def _binary(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) == 2, "needs two inputs")
    _need(node.attrs.get("func") in BINARY, f"unknown function {node.attrs.get('func')!r}")
    for name in ("activation", "then"):
        func = node.attrs.get(name)
        _need(func is None or func in UNARY, f"unknown activation {func!r}")
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        raise ExportError(f"shapes {shapes[0]} and {shapes[1]} do not broadcast") from None


def _softmax(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) == 1 and len(shapes[0]) >= 1, "needs one input with an axis")
    return shapes[0]


def _norm(node: Node, shapes: list[Shape]) -> Shape:
    _need(1 <= len(shapes) <= 3 and len(shapes[0]) >= 1, "needs x and perhaps gamma, beta")
    _need(all(s == shapes[0][-1:] for s in shapes[1:]), "gamma and beta must have the size of the last axis")
    _need(float(node.attrs["eps"]) >= 0, "eps must not be negative")
    return shapes[0]


def _reduce(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) == 1, "needs one input")
    _need(node.attrs.get("func") in REDUCE, f"unknown function {node.attrs.get('func')!r}")
    axis = normalize_axis(node.attrs["axis"], len(shapes[0]))
    return shapes[0][:axis] + shapes[0][axis + 1 :]


def _reshape(node: Node, shapes: list[Shape]) -> Shape:
    shape = tuple(int(n) for n in node.attrs["shape"])
    _need(len(shapes) == 1 and int(np.prod(shapes[0])) == int(np.prod(shape)), f"{shapes[0]} has not {shape}'s size")
    return shape


def _transpose(node: Node, shapes: list[Shape]) -> Shape:
    perm = tuple(node.attrs["perm"])
    _need(len(shapes) == 1 and sorted(perm) == list(range(len(shapes[0]))), f"perm {perm} is no order of {shapes[0]}")
    return tuple(shapes[0][p] for p in perm)


def _slice(node: Node, shapes: list[Shape]) -> Shape:
    axis = normalize_axis(node.attrs["axis"], len(shapes[0]))
    start, stop, step = (node.attrs[k] for k in ("start", "stop", "step"))
    size = shapes[0][axis]
    _need(0 <= start < stop <= size and step >= 1, f"{start}:{stop}:{step} is no part of axis {axis} of size {size}")
    return (*shapes[0][:axis], len(range(start, stop, step)), *shapes[0][axis + 1 :])


def _concat(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) >= 1, "needs an input")
    axis = normalize_axis(node.attrs["axis"], len(shapes[0]))
    rest = {(*s[:axis], *s[axis + 1 :]) for s in shapes}
    _need(len(rest) == 1 and len({len(s) for s in shapes}) == 1, f"shapes {shapes} differ beside axis {axis}")
    return (*shapes[0][:axis], sum(s[axis] for s in shapes), *shapes[0][axis + 1 :])


def _expand(node: Node, shapes: list[Shape]) -> Shape:
    shape = tuple(int(n) for n in node.attrs["shape"])
    _need(len(shapes) == 1, "needs one input")
    try:
        _need(tuple(np.broadcast_shapes(shapes[0], shape)) == shape, f"{shapes[0]} does not expand to {shape}")
    except ValueError:
        raise ExportError(f"{shapes[0]} does not expand to {shape}") from None
    return shape


def _moe(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) == 2, "needs x and logits")
    x, logits = shapes
    router: Router = node.attrs["router"]
    experts: list[Graph] = node.attrs["experts"]
    _need(len(experts) == router.experts, f"{len(experts)} experts, but the router chooses among {router.experts}")
    _need(logits == (*x[:-1], router.experts), f"logits {logits} must be {(*x[:-1], router.experts)}")
    for n, expert in enumerate(experts):
        _need(len(expert.inputs) == len(expert.outputs) == 1, f"expert {n} must have one input and one output")
        _need(expert.shapes[expert.inputs[0]] == x[-1:], f"expert {n} must take one token of shape {x[-1:]}")
        _need(not any(True for _ in expert.moe_nodes()), f"expert {n} contains an MoE itself, which is not supported")
    numbers = node.attrs.get("numbers")
    _need(numbers is None or len(set(numbers)) == len(experts), f"numbers {numbers} do not name {len(experts)} experts")
    widths = {expert.shapes[expert.outputs[0]] for expert in experts}
    _need(len(widths) == 1 and len(next(iter(widths))) == 1, f"experts give different shapes {sorted(widths)}")
    return (*x[:-1], *next(iter(widths)))


def _embed(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) == 2 and shapes[0][-1:] == (1,) and len(shapes[1]) == 2, "needs ids (…, 1), a table (ids, width)")
    return (*shapes[0][:-1], shapes[1][1])


def _window(node: Node, shapes: list[Shape]) -> Shape:
    axis = normalize_axis(node.attrs["axis"], len(shapes[0]))
    size, step, dilation = (node.attrs[k] for k in ("size", "step", "dilation"))
    n, span = shapes[0][axis], (size - 1) * dilation + 1
    _need(min(size, step, dilation) >= 1 and span <= n, f"windows of {size} elements, {dilation} apart, on {n}")
    return (*shapes[0][:axis], (n - span) // step + 1, size, *shapes[0][axis + 1 :])


def _matmul(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) == 2 and len(shapes[0]) == len(shapes[1]) >= 2, "needs two stacks of matrices")
    a, b = shapes
    _need(a[:-2] == b[:-2] and a[-1] == b[-2], f"{a} and {b} are no stacks of matrices to multiply")
    return (*a[:-1], b[-1])


def _state(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) == 1 and len(shapes[0]) >= 1, "needs a state to start from")
    return shapes[0]


def _step(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) == 2 and len(shapes[0]) >= 2, "needs a sequence (steps, …) and the state of its recurrence")
    return shapes[0][1:]


def _collect(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) == 2 and shapes[0] == shapes[1], "needs the state after a step and before it, of one shape")
    _need(node.attrs["steps"] >= 0, "steps are a number, or 0 for those of a stream")
    return (node.attrs["steps"], *shapes[0]) if node.attrs["steps"] else shapes[0]


def _rope(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) == 2 and len(shapes[0]) >= 1 and len(shapes[1]) == 2, "needs x and a table (positions, width)")
    width = shapes[1][1]
    _need(width % 2 == 0 and width <= shapes[0][-1], f"a table of width {width} does not turn rows of {shapes[0][-1]}")
    return shapes[0]


def mask(node: Node) -> str | None:
    """Of which positions an attention takes keys and values: one of MASKS; None for any other operation."""
    return node.attrs.get("mask", "causal") if node.op == "attention" else None


def _attention(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) in (3, 4) and all(len(s) == 2 for s in shapes[:3]), "needs q, k, v (heads, dim), perhaps sinks")
    (heads, dim), (kv, k_dim), (v_heads, v_dim) = shapes[:3]
    _need(kv == v_heads and heads % kv == 0, f"{heads} heads do not share {kv} key and {v_heads} value heads")
    _need(dim == k_dim, f"queries of {dim} do not fit keys of {k_dim}")
    _need(len(shapes) == 3 or shapes[3][:1] == (heads,), f"sinks {shapes[-1]} are not one for each of {heads} heads")
    seen, biased = mask(node), len(shapes) == 4 and len(shapes[3]) == 2
    _need(seen in MASKS, f"mask is one of {', '.join(MASKS)}")
    _need(seen == "causal" or not node.attrs.get("window", 0), "only attention to the past has a window")
    _need(not biased or seen != "cross", "positions of two texts have no distance, and no bias")
    _need(not biased or seen != "full" or shapes[3][1] % 2 == 1, "biases are for as many positions before as behind")
    _need(node.attrs.get("cache", "fp32") in CACHES, f"cache is one of {', '.join(CACHES)}")
    _need(node.attrs.get("window", 0) >= 0, "window must not be negative")
    return heads, v_dim


def _delay(node: Node, shapes: list[Shape]) -> Shape:
    _need(len(shapes) == 1 and len(shapes[0]) == 1, "needs one vector")
    steps, rows, apart = node.attrs["steps"], node.attrs.get("rows"), node.attrs.get("apart", 0)
    _need(steps >= 1, "needs at least one step")
    _need(rows is None or (rows >= 1 and 0 <= (rows - 1) * apart <= steps), "recalls time steps of the future")
    return shapes[0] if rows is None else (rows, *shapes[0])


def _delta(node: Node, shapes: list[Shape]) -> Shape:
    _need([len(s) for s in shapes] == [2, 2, 2, 1, 1], "needs q, k, v (heads, dim), decay and beta (heads,)")
    q, k, v, decay, beta = shapes
    _need(q == k and v[0] % k[0] == 0, f"queries {q} and keys {k} do not serve {v[0]} heads of values")
    _need(decay == beta == v[:1], f"decay {decay} and beta {beta} are not one for each of {v[0]} heads of values")
    return v


OPS: dict[str, Callable[[Node, list[Shape]], Shape]] = {
    "linear": _linear,  # x (…, in), weight (out, in)[, bias (out,)] -> (…, out); activation=None, activations="int8"
    "unary": _unary,  # x -> x's shape; func, alpha=0, beta=0
    "binary": _binary,  # a, b -> NumPy broadcasting of the per-sample shapes; func; activation of a; then=None, a
    # function without parameters of the result
    "softmax": _softmax,  # over the last axis
    "layernorm": _norm,  # over the last axis; eps
    "rmsnorm": _norm,  # over the last axis; eps
    "reduce": _reduce,  # one axis away; func, axis
    "reshape": _reshape,  # row-major; shape
    "transpose": _transpose,  # perm of the per-sample axes
    "slice": _slice,  # axis, start, stop, step
    "concat": _concat,  # axis
    "expand": _expand,  # NumPy broadcast_to; shape
    # x (…, n, …) -> (…, count, size, …): element (i, j) is x's i · step + j · dilation; axis, size, step, dilation
    "window": _window,
    "matmul": _matmul,  # a (…, m, k), b (…, k, n) -> (…, m, n), both computed
    "state": _state,  # start (…, n) -> the state before each step
    "step": _step,  # x (steps, …), state -> the step's element of x
    "collect": _collect,  # state after the step, state before it -> all states (steps, …, n); steps, reverse=False;
    # steps=0: over the samples of a stream, with one state (…, n) each
    "embed": _embed,  # ids (…, 1), table (ids, width) -> each id's row (…, width), NaN where there is none
    "rope": _rope,  # x (…, dim), table (positions, turned): cosines, then sines -> x, its first elements turned
    # q (heads, dim), k (kv, dim), v (kv, width)[, sinks (heads,) or biases (heads, distances)] -> (heads, width);
    # scale, window=0 (positions seen, 0: all), softcap=0, cache="fp32", mask="causal"
    "attention": _attention,
    # x (width,) -> x of `steps` positions before, zeros before the first; with rows and apart (rows, width), each of
    # which is `apart` positions later than the one above
    "delay": _delay,
    # q, k (key heads, dim), v (heads, width), decay (heads,), beta (heads,) -> (heads, width); scale. The gated delta
    # rule: a state (dim, width) of each head fades by exp(decay), learns v under k, beta of it, and answers q
    "delta": _delta,
    "moe": _moe,  # x (…, in), logits (…, experts) -> (…, out); router: Router, experts: list[Graph]; numbers=None
}


# --- experts ----------------------------------------------------------------------------------------------------------


def absent_expert(like: Graph) -> Graph:
    """The body of a pruned expert: no operations, no weights; the result is zeros."""
    absent = Graph(like.name)
    token = absent.add_input(like.inputs[0], like.shapes[like.inputs[0]])
    zeros = np.zeros(like.shapes[like.outputs[0]], np.float32)
    absent.outputs = [absent.add_constant(f"{token}.absent", zeros)]
    return absent


def is_absent(expert: Graph) -> bool:
    """Whether an expert gives +0 everywhere without computing anything."""
    name = expert.outputs[0]
    return not expert.nodes and name in expert.constants and not expert.array(name).view(np.uint32).any()


def expert_numbers(node: Node) -> list[int]:
    """The number of each expert of a `moe` node in the original model: `numbers` where experts were taken out."""
    numbers = node.attrs.get("numbers")
    return list(range(len(node.attrs["experts"]))) if numbers is None else [int(n) for n in numbers]


def logit_masks(graph: Graph) -> set[str]:
    """What is added to a router's logits, as biases are: -inf there says that an expert is never to be chosen."""
    producers = graph.producers()
    masks: set[str] = set()
    ends = [node.inputs[1] for node in graph.moe_nodes()]
    while ends:
        node = producers.get(ends.pop())
        if node is not None and node.op == "linear":
            masks.update(node.inputs[2:])
        elif node is not None and node.op == "binary" and node.attrs["func"] == "add":
            masks.update(i for i in node.inputs if i in graph.constants)
            ends += node.inputs
        elif node is not None and node.op == "reshape":
            ends += node.inputs
    return masks


# --- text form: the small architecture file beside a safetensors file ------------------------------------------------

FORMAT, FORMAT_VERSION = "colibri-graph", 1
_MOST_BODIES = 1 << 16  # expanded from one template


def to_json(graph: Graph) -> str:
    """The graph without its constants' values, as the text `from_json` reads."""

    def nodes(g: Graph) -> list[dict[str, Any]]:
        rows = []
        for node in g.nodes:
            row: dict[str, Any] = {"op": node.op, "output": node.output, "inputs": list(node.inputs)}
            for key, value in node.attrs.items():
                if key == "router":
                    row[key] = {k: v for k, v in value.__dict__.items()}
                elif key == "experts":
                    row[key] = [{"input": e.inputs[0], "nodes": nodes(e), "output": e.outputs[0]} for e in value]
                else:
                    row[key] = value
            rows.append(row)
        return rows

    inputs = {name: list(graph.shapes[name]) for name in graph.inputs}
    text = {"format": FORMAT, "version": FORMAT_VERSION, "name": graph.name, "inputs": inputs, "nodes": nodes(graph),
            "outputs": graph.outputs}  # fmt: skip
    return json.dumps(text, indent=1)


def from_json(text: str, tensors: Mapping[str, Any]) -> Graph:
    """Build a graph from its text form and the named tensors it refers to.

    `experts` is a list of bodies, or one body with `count`, in which `{e}` in a tensor's name stands for the expert's
    number. Raises ExportError naming the first thing that is missing, unknown or does not fit.
    """
    try:
        doc = strict_json.loads(text.encode("utf-8", "surrogatepass"))
    except strict_json.JsonError as error:
        raise ExportError(f"architecture file {error}") from None
    if not isinstance(doc, dict) or doc.get("format") != FORMAT or doc.get("version") != FORMAT_VERSION:
        raise ExportError(f'architecture file must say "format": "{FORMAT}", "version": {FORMAT_VERSION}')
    try:
        graph = _graph_from(doc["name"], doc["inputs"], doc["nodes"], doc["outputs"], tensors)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError) as error:
        raise ExportError(f"architecture file: field {error} is missing or of the wrong kind") from None
    graph.validate()
    return graph


def _graph_from(
    name: str, inputs: Mapping[str, Any], rows: list[Any], outputs: list[str], tensors: Mapping[str, Any]
) -> Graph:
    graph = Graph(name)
    for key, shape in inputs.items():
        graph.add_input(key, tuple(shape))
    for row in rows:
        attrs = {k: v for k, v in row.items() if k not in ("op", "output", "inputs")}
        for key in row["inputs"]:
            if key not in graph.shapes:
                if key not in tensors:
                    raise ExportError(f"{row['output']}: {key!r} is neither a value above it nor a tensor in the file")
                graph.add_constant(key, tensors[key])
        if row["op"] == "moe":
            width = graph.shapes[row["inputs"][0]][-1]
            attrs["router"] = Router(**attrs["router"])
            attrs["experts"] = [
                _graph_from(f"{row['output']}.expert{n}", {b["input"]: [width]}, b["nodes"], [b["output"]], tensors)
                for n, b in enumerate(_bodies(attrs["experts"]))
            ]
        graph.add(row["op"], *row["inputs"], output=row["output"], **attrs)
    graph.outputs = list(outputs)
    return graph


def _bodies(experts: Any) -> list[Any]:
    if isinstance(experts, list):
        return experts
    if type(experts["count"]) is not int or not 1 <= experts["count"] <= _MOST_BODIES:
        raise ExportError(f"architecture file: count = {shown(experts['count'])} is not between 1 and "
                          f"{_MOST_BODIES:,}")  # fmt: skip
    template = json.dumps({k: v for k, v in experts.items() if k != "count"})
    return [json.loads(template.replace("{e}", str(n))) for n in range(experts["count"])]


__all__ = ["BINARY", "OPS", "REDUCE", "UNARY", "Graph", "Node", "Router", "absent_expert", "expert_numbers",
           "from_json", "is_absent", "logit_masks", "normalize_axis", "to_json"]  # fmt: skip
