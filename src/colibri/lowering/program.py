"""Flat program of the engine before it is packed: operations on views of buffers, tensors, layers, experts.

Weights stay where they are, perhaps in a file: a program says which tensors lie where, not what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from colibri.format import spec
from colibri.format.layouts import attention_macs, outlier_work, store
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


_NOWHERE = Operand()


class Op:
    """One operation record before packing: the fields of `spec.OP_COMMON`, and words by the names of `spec.VIEWS`.

    A word is a number, a tuple of them along some axes, or a tensor; what is not given is 0, or no tensor.
    """

    def __init__(
        self,
        code: str,
        out: Operand,
        a: Operand,
        b: Operand = _NOWHERE,
        work: Operand = _NOWHERE,
        *,
        func: str = "identity",
        rows: int = 1,
        before: str = "identity",
        after: str = "identity",
        comment: str = "",
        **words: Any,
    ) -> None:
        self.code, self.func, self.rows, self.before, self.after = code, func, rows, before, after
        self.out, self.a, self.b, self.work = out, a, b, work
        self.comment = comment
        self.words: dict[str, Any] = {}
        for name, value in words.items():
            self[name] = value

    @property
    def known(self) -> spec.Operation:
        """What holds for all operations of its kind."""
        return spec.operation(self.code)

    def __getitem__(self, name: str) -> Any:
        nothing = None if self.known.words[name].type == "tensor" else 0
        return self.words.get(name, nothing)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.known.words:
            raise KeyError(f"{self.code} has no {name!r}, but {', '.join(self.known.words)}")
        self.words[name] = value

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it names, by the word that does."""
        return {name: self.words[name] for name, word in self.known.words.items()
                if word.type == "tensor" and self.words.get(name) is not None}  # fmt: skip

    def sizes(self) -> tuple[int, ...]:
        """Its sizes inside a row."""
        given = [self.words[name] for name, word in self.known.words.items() if word.is_size and name in self.words]
        return given[0] if "has_axes" in self.known.traits else tuple(given)

    def buffers(self) -> list[Buffer]:
        """The buffers it touches."""
        return [o.place.buffer for o in (self.a, self.b, self.out, self.work) if o.place.buffer is not None]

    def __str__(self) -> str:
        if self.code == "loop":
            order = ", the last first" if self["backward"] else ""
            return f"loop over the next {self['body']} operations, {self['steps']} steps{order}"
        name = self.code if self.func == "identity" else f"{self.code}.{self.func}"
        used = [o for o in (self.a, self.b) if o.place.space != "none"]
        weights = "".join(f", {tensor.name}" for tensor in self.tensors().values())
        size = "×".join(map(str, self.sizes()))
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
        layer: Layer = self.layers[op["layer"]]
        programs = {(e.first_op, e.ops) for e in self.experts if e.layer == op["layer"]}
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
            steps, left = op["steps"], op["body"]
        else:
            yield steps if left > 0 else 1, op
            left -= 1


def op_work(op: Op, context: int) -> int:
    """Elementary steps of an operation on one sample, at the end of a text that fills the context."""
    return WORK[op.known.proof](op, context)


def _linear_work(op: Op, context: int) -> int:
    outliers: Tensor | None = op["outliers"]
    entries = 0 if outliers is None else outlier_work(outliers.rows, outliers.cols, outliers.bytes)
    return int(op.rows * ((op["inputs"] + 1) * op["outputs"] + entries))


def _attention_work(op: Op, context: int) -> int:
    key, value = op["key"], op["value"]
    return int(op.rows * (key + value)) + attention_macs(op.rows, key, value, op["window"], context)


# What the engine's proofs say of the work, by their names. A loop takes none; a mixture's is its experts'.
WORK: dict[str, Callable[[Op, int], int]] = {
    "linear": _linear_work,
    "quantize": lambda op, _: op.rows * op["inputs"],
    "map": lambda op, _: op.rows * prod(op["sizes"]),
    "norm": lambda op, _: op.rows * op["size"],
    "reduce": lambda op, _: op.rows * op["outer"] * op["size"] * op["inner"],
    "embed": lambda op, _: op.rows * op["width"],
    "rope": lambda op, _: op.rows * op["size"],
    "cache": lambda op, _: op.rows * (op["key"] + op["value"]),
    "attention": _attention_work,
    "delay": lambda op, _: (op.rows + 1) * op["width"],
    "delta": lambda op, _: op.rows * (4 * op["key"] + 1) * op["value"],
}


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
            begin, end = n, n + op["body"]
        for buffer in op.buffers():
            first, _ = spans.get(buffer, (n, n))
            spans[buffer] = first, end if first < begin and n <= end else n
    return spans
