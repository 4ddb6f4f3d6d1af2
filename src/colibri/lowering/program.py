"""Flat program of the engine before it is packed: operations on views of buffers, tensors, layers, experts.

Weights stay where they are, perhaps in a file: a program says which tensors lie where, not what is in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from colibri.format.layouts import attention_macs, residual_work, store
from colibri.ir.graph import Router, Shape
from colibri.ir.weights import Weight


@dataclass(eq=False)
class Buffer:
    """A piece of context memory."""

    name: str
    floats: int  # for the whole batch (in an expert: for a tile of tokens)
    offset: int = -1  # bytes from the start of the context, set by the planner
    kept: bool = False  # from one run to the next: nothing else may lie there


@dataclass(frozen=True, eq=False)
class Tensor:
    """A weight tensor in the layout it is stored in."""

    name: str  # of the constant (of the first expert that uses the program, where the scope is `expert`)
    layout: str
    rows: int
    cols: int
    scope: str
    offset: int  # bytes from the start of its section: the shared weights, or the expert
    bytes: int


@dataclass(frozen=True)
class Place:
    """Where a value's storage is: a space, in `arena` a buffer of it, in `const` a tensor."""

    space: str
    sample_stride: int
    buffer: Buffer | None = None
    tensor: Tensor | None = None


@dataclass(frozen=True)
class View:
    """A strided look at a place: `offset`, `strides`, and `step` from one step of a loop to the next, in floats.

    `shape` is per sample.
    """

    place: Place
    offset: int
    shape: Shape
    strides: tuple[int, ...]
    step: int = 0

    def like(self, offset: int, shape: Shape, strides: tuple[int, ...]) -> View:
        """Another look at the same place."""
        return View(self.place, offset, shape, strides, self.step)


@dataclass(frozen=True)
class Operand:
    """One operand of an operation: where a row is in step `s` of a loop.

    That is offset + sample · place.sample_stride + row · row_stride + s · step_stride.
    """

    place: Place = Place("none", 0)
    offset: int = 0
    row_stride: int = 0
    step_stride: int = 0


@dataclass
class Op:
    """One operation record before packing; see `spec.OP`."""

    code: str
    out: Operand
    a: Operand
    b: Operand = Operand()
    work: Operand = Operand()
    func: str = "identity"
    rows: int = 1
    w0: Tensor | None = None
    w1: Tensor | None = None
    w2: Tensor | None = None
    layer: int = -1
    dims: tuple[int, ...] = ()
    strides_a: tuple[int, ...] = ()
    strides_b: tuple[int, ...] = ()
    strides_out: tuple[int, ...] = ()
    alpha: float = 0.0
    beta: float = 0.0
    before: str = "identity"
    after: str = "identity"
    comment: str = ""

    def buffers(self) -> list[Buffer]:
        """The buffers it touches."""
        return [o.place.buffer for o in (self.a, self.b, self.out, self.work) if o.place.buffer is not None]

    def __str__(self) -> str:
        if self.code == "loop":
            order = ", the last first" if self.dims[2] else ""
            return f"loop over the next {self.dims[1]} operations, {self.dims[0]} steps{order}"
        name = self.code if self.func == "identity" else f"{self.code}.{self.func}"
        used = [o for o in (self.a, self.b) if o.place.space != "none"]
        weights = "".join(f", {w.name}" for w in (self.w0, self.w1, self.w2) if w is not None)
        size = "×".join(map(str, self.dims))
        return (
            f"{_place_text(self.out)} = {name}({', '.join(map(_place_text, used))}{weights}) {self.rows} rows of {size}"
        )


class Part(NamedTuple):
    """A tensor in one place, what it holds, and the name of that: of the constant in the expert it is of."""

    tensor: Tensor
    value: Weight
    name: str


@dataclass(frozen=True)
class Section:
    """Weights that lie together in the file, the shared ones or one expert's: tensors with what they hold."""

    size: int = 0  # bytes, padding included
    parts: tuple[Part, ...] = ()

    def data(self) -> bytes:
        """Its bytes."""
        out = bytearray(self.size)
        for tensor, value, _ in self.parts:
            out[tensor.offset : tensor.offset + tensor.bytes] = store(value, tensor.layout)
        return bytes(out)


@dataclass(frozen=True)
class Expert:
    """One expert: its weights and which operations run it."""

    layer: int
    index: int
    first_op: int  # in `Program.expert_ops`
    ops: int
    macs: int
    section: Section


@dataclass(frozen=True)
class Layer:
    """One MoE layer."""

    router: Router
    tokens: int
    d_in: int
    d_out: int
    first_expert: int
    tile: int
    quantized: int  # inputs of a token that comes as a quantised row; 0: it comes as floats


@dataclass
class Program:
    """Everything the package file holds except the certificate."""

    name: str
    max_batch: int
    inputs: list[tuple[str, Shape]]
    outputs: list[tuple[str, Shape]]
    ops: list[Op] = field(default_factory=list)
    expert_ops: list[Op] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    experts: list[Expert] = field(default_factory=list)
    shared: Section = Section()  # the weights outside the experts
    macs: int = 0  # multiply-accumulates of one row along the costliest route
    weight_bytes: int = 0  # weight bytes read by one row along the route that reads most
    context_bytes: int = 0  # head included; set by the planner
    cleared_bytes: int = 0  # of them, what comes before the caches; set by the planner
    lower_bound: int = 0  # the least any planner could reach; set by the planner
    context_tokens: int = 0  # most tokens of a text; 0: samples have nothing to do with each other
    tail_op: int = 0  # operations from here on may run for the last samples of a batch alone
    encoder_ops: int = 0  # operations before all others that run on the source text; 0: there is none

    @property
    def input_floats(self) -> int:
        """Floats of one input row."""
        return sum(prod(shape) for _, shape in self.inputs)

    @property
    def output_floats(self) -> int:
        """Floats of one output row."""
        return sum(prod(shape) for _, shape in self.outputs)

    @property
    def work(self) -> int:
        """Elementary steps of one row along the costliest route: see Work in docs/format.md."""
        return sum(self._work(n, op) for n, op in unrolled(self.ops))

    def _work(self, steps: int, op: Op) -> int:
        if op.code != "moe":
            return steps * op_work(op, self.context_tokens)
        layer = self.layers[op.layer]
        programs = {(e.first_op, e.ops) for e in self.experts if e.layer == op.layer}
        most = max(sum(n * op_work(o, 0) for n, o in unrolled(self.expert_ops[at : at + count]))
                   for at, count in programs)  # fmt: skip
        router = layer.router
        return router.experts + op.rows * router.k * (router.experts + layer.d_out + most)

    def __str__(self) -> str:
        lines = [f"program {self.name}: batch up to {self.max_batch}, {self.macs} multiply-accumulates at most"]
        lines += [f"  {n:3d} {op}" for n, op in enumerate(self.ops)]
        for n, layer in enumerate(self.layers):
            lines.append(f"layer {n}: {layer.router}, {layer.tokens} tokens, {layer.d_in} -> {layer.d_out}")
        shown: set[int] = set()
        for e in self.experts:
            lines.append(f"expert {e.index} of layer {e.layer}: {e.section.size} bytes, {e.macs} multiply-accumulates")
            if e.ops and e.first_op not in shown:
                shown.add(e.first_op)
                lines += [f"  {n:3d} {self.expert_ops[n]}" for n in range(e.first_op, e.first_op + e.ops)]
        return "\n".join(lines)


def unrolled(ops: Sequence[Op]) -> Iterator[tuple[int, Op]]:
    """Every operation but the loops, each with the times it runs."""
    steps = left = 0
    for op in ops:
        if op.code == "loop":
            steps, left = op.dims[0], op.dims[1]
        else:
            yield steps if left > 0 else 1, op
            left -= 1


def op_work(op: Op, context: int) -> int:
    """Elementary steps of an operation on one sample, at the end of a text that fills the context."""
    match op.code:
        case "linear" | "linear_q":
            entries = 0 if op.w2 is None else residual_work(op.w2.rows, op.w2.cols, op.w2.bytes)
            return op.rows * ((op.dims[0] + 1) * op.dims[1] + entries)
        case "map1" | "map2" | "reduce":
            return op.rows * prod(op.dims)
        case "cache":
            return op.rows * (op.dims[0] + op.dims[1])
        case "attention":
            key, value = op.dims[:2]
            return op.rows * (key + value) + attention_macs(op.rows, key, value, op.strides_a[0], context)
        case "delay":
            return (op.rows + 1) * op.dims[0]
        case "delta":
            return op.rows * (4 * op.dims[0] + 1) * op.dims[1]
        case _:  # softmax, norms, quantize, embed, rope
            return op.rows * op.dims[0]


def _place_text(operand: Operand) -> str:
    place, buffer = operand.place, operand.place.buffer
    if place.tensor is not None:
        return place.tensor.name
    if buffer is None:
        return f"{place.space}+{operand.offset}"
    at = "" if buffer.offset < 0 else f"@{buffer.offset}"
    return f"{buffer.name}{at}+{operand.offset}"


def liveness(ops: Sequence[Op]) -> dict[Buffer, tuple[int, int]]:
    """Positions of the first and last operation that touch each buffer.

    What a loop's operations find there from before is still wanted in the loop's last step.
    """
    spans: dict[Buffer, tuple[int, int]] = {}
    begin = end = -1  # of the loop
    for n, op in enumerate(ops):
        if op.code == "loop":
            begin, end = n, n + op.dims[1]
        for buffer in op.buffers():
            first, _ = spans.get(buffer, (n, n))
            spans[buffer] = first, end if first < begin and n <= end else n
    return spans
