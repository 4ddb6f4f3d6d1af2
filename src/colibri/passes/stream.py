"""Conversion of a graph for whole sequences into one that takes one time step per call and keeps the past it needs.

Every value is followed along its axis of time, which goes away. A causal convolution's window becomes delays, a
recurrence goes on from one sample to the next; what has no axis of time stays as it is. A value's element i is known at
time step i + shift; where values of different shifts meet, the earlier one is delayed. What looks at the whole
sequence, into the future without end, or at its own position is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from colibri.common.compare import compare
from colibri.errors import ExportError
from colibri.ir.graph import ENDLESS, Array, Graph, Node, Shape
from colibri.passes.rewrite import drop_unused
from colibri.reference.interpreter import run

TOLERANCE = 1e-6  # largest |difference| / max |output| between the stream and the whole


@dataclass(frozen=True)
class Flow:
    """A value of the stream: its name there, its axis of time in the whole graph (None: gone), its time steps.

    Of the whole's elements along that axis the first `front` are zeros that padding put there. What follows from the
    state of a recurrence alone belongs to any time step: its `shift` is None.
    """

    name: str
    axis: int | None
    shift: int | None
    front: int = 0

    @property
    def latency(self) -> int:
        """Time steps between an element and the time step at which the stream gives it."""
        return self.shift or 0

    @property
    def settled(self) -> int | None:
        """The shift at which its padding has passed."""
        return None if self.shift is None else self.shift + self.front


def stream(graph: Graph, axis: int) -> tuple[Graph, list[Flow]]:
    """The stream of a graph whose inputs all have time as their per-sample `axis`, and what its outputs are.

    An output's element i is what the stream gives at time step i + latency; of an output without time, what it gives at
    time step `latency`, the sequence's last. Raises ExportError naming the operation that needs more than the past.
    """
    if graph.context:
        raise ExportError("a language model is a stream already")
    streamed = _Stream(graph, axis)
    for node in graph.nodes:
        try:
            streamed.take(node)
        except ExportError as error:
            raise ExportError(f"stream: {node.output}: {node.op} {error}") from None
    flows = [streamed.settled(name) for name in graph.outputs]
    new = streamed.new
    new.outputs = [flow.name for flow in flows]
    new = drop_unused(new)
    new.validate()
    return new, flows


def verify(graph: Graph, new: Graph, flows: Sequence[Flow], axis: int, rows: Sequence[Array]) -> None:
    """Compare the stream with whole sequences, rows (n, *shape) of each input, by |difference| / max |output|.

    Raises ExportError above `TOLERANCE`, and where there was nothing to compare.
    """
    whole = run(graph, [x[:4] for x in rows])
    compared = dict.fromkeys(graph.outputs, 0)
    for n in range(len(whole[0])):
        given = run(new, time_steps([x[n : n + 1] for x in rows], axis))
        for name, flow, y, ours in zip(graph.outputs, flows, whole, given, strict=True):
            want = y[n][None] if flow.axis is None else np.moveaxis(y[n], flow.axis, 0)
            have = ours[flow.latency :][: len(want)]
            want = want[: len(have)]
            found = compare(want, have)
            compared[name] += found.rows
            if not found.error <= TOLERANCE:
                raise ExportError(
                    f"stream: output {name} differs from the sequence's by {found.error:.1e}; please report this"
                )
    if not all(compared.values()):
        raise ExportError(
            "stream: an output has no number to compare with the sequence's: pass longer sequences, of finite numbers"
        )


def time_steps(rows: Sequence[Array], axis: int) -> list[Array]:
    """Whole sequences (n, *shape) of each input as the time steps of one stream, one sequence after the other."""
    turned = [np.moveaxis(x, axis + 1, 1) for x in rows]
    return [np.ascontiguousarray(x.reshape(-1, *x.shape[2:])) for x in turned]


class _Stream:
    """Builds the stream, one method an operation."""

    def __init__(self, graph: Graph, axis: int) -> None:
        self.graph = graph
        self.new = Graph(graph.name, context=ENDLESS)
        self.flows: dict[str, Flow] = {}
        self.made = 0
        lengths = {graph.shapes[name][axis] if len(graph.shapes[name]) > axis else 0 for name in graph.inputs}
        if len(lengths) != 1:
            shapes = [graph.shapes[name] for name in graph.inputs]
            raise ExportError(f"stream: not every input has time as axis {axis + 1}, of one length: {shapes}")
        for name in graph.inputs:
            shape = graph.shapes[name]
            self.flows[name] = Flow(self.new.add_input(name, _without(shape, axis)), axis, 0)
        for name, value in graph.constants.items():
            self.new.add_constant(name, value)

    def flow(self, name: str) -> Flow:
        """A value that varies in time."""
        if name not in self.flows:
            raise ExportError("needs a value that varies in time")
        return self.flows[name]

    def take(self, node: Node) -> None:
        if node.op != "state" and not any(i in self.flows for i in node.inputs):
            self.new.add(node.op, *node.inputs, output=node.output, **node.attrs)
            return
        method: Callable[[Node], Flow] = getattr(self, f"_{node.op}", self._other)
        self.flows[node.output] = method(node)

    def add(self, node: Node, *inputs: str, **attrs: Any) -> str:
        return self.new.add(node.op, *inputs, output=node.output, **{**node.attrs, **attrs})

    def between(self, op: str, *inputs: str, **attrs: Any) -> str:
        """A node the whole graph does not have."""
        self.made += 1
        return self.new.add(op, *inputs, output=f"stream.{self.made}", **attrs)

    def delayed(self, name: str, steps: int) -> str:
        """The value of some time steps before, zeros before the first."""
        if steps == 0:
            return name
        shape = self.new.shapes[name]
        flat = self.between("reshape", name, shape=(int(np.prod(shape)),))
        return self.between("reshape", self.between("delay", flat, steps=steps), shape=shape)

    def settled(self, name: str) -> Flow:
        """A value whose padding of the past is what a delay gives."""
        flow = self.flow(name)
        return replace(flow, name=self.delayed(flow.name, flow.front), shift=flow.settled, front=0)

    def together(self, names: Sequence[str]) -> tuple[list[str], Flow]:
        """Values of one time step: those of the flows, delayed where they are early, and constants without time."""
        flows = [self.flows[name] for name in names if name in self.flows]
        shift = max((flow.settled for flow in flows if flow.settled is not None), default=None)
        first = next(name for name in names if name in self.flows)
        axis = self.flows[first].axis
        behind = None if axis is None else len(self.graph.shapes[first]) - axis
        values = []
        for name in names:
            flow = self.flows.get(name)
            if flow is None:
                values.append(self.constant(name, behind))
                continue
            own = None if flow.axis is None else len(self.graph.shapes[name]) - flow.axis
            if own != behind:
                raise ExportError("combines values whose axes of time differ")
            early = 0 if shift is None or flow.shift is None else shift - flow.shift
            values.append(self.delayed(flow.name, early))
        return values, replace(self.flows[first], shift=shift, front=0)

    def constant(self, name: str, behind: int | None) -> str:
        """A constant without the axis of time, which is the one `behind` from the end."""
        value = self.graph.constants.get(name)
        if value is None:
            raise ExportError("needs constants to be stored")
        if behind is None or len(value.shape) < behind:
            return name
        array = self.graph.array(name)
        at = array.ndim - behind
        if (array != array.take([0], axis=at)).any():
            raise ExportError("depends on the position in the sequence, which a stream has no end of")
        return self.new.add_constant(f"{name}.now", array.take(0, axis=at))

    # --- operations ---

    def _other(self, node: Node) -> Flow:
        raise ExportError("looks beyond its time step, which is not supported")

    def _pointwise(self, node: Node) -> Flow:
        values, flow = self.together(node.inputs)
        name = self.add(node, *values)
        axis = flow.axis
        if axis is not None:
            axis += len(self.graph.shapes[node.output]) - len(self.graph.shapes[self.first(node)])
        return Flow(name, axis, flow.shift)

    _unary = _binary = _pointwise

    def first(self, node: Node) -> str:
        return next(name for name in node.inputs if name in self.flows)

    def _along_rows(self, node: Node) -> Flow:
        """What works along the last axis; other inputs are constants of it."""
        flow = self.settled(node.inputs[0])
        if flow.axis is not None and flow.axis == len(self.graph.shapes[node.inputs[0]]) - 1:
            raise ExportError("mixes time steps: it works along the axis of time")
        if any(i in self.flows for i in node.inputs[1:]):
            raise ExportError("needs constant weights")
        return replace(flow, name=self.add(node, flow.name, *node.inputs[1:]))

    _linear = _softmax = _layernorm = _rmsnorm = _embed = _along_rows

    def _moe(self, node: Node) -> Flow:
        if node.attrs["router"].capacity:
            raise ExportError("has a capacity, which counts the tokens of a whole sequence")
        values, flow = self.together(node.inputs)
        if flow.axis == len(self.graph.shapes[node.inputs[0]]) - 1:
            raise ExportError("mixes time steps: a token is a whole sequence")
        return replace(flow, name=self.add(node, *values))

    def _reduce(self, node: Node) -> Flow:
        flow, axis = self.settled(node.inputs[0]), node.attrs["axis"] % len(self.graph.shapes[node.inputs[0]])
        if axis == flow.axis:
            raise ExportError("looks at the whole sequence")
        now = axis - (flow.axis is not None and axis > flow.axis)
        time = None if flow.axis is None else flow.axis - (axis < flow.axis)
        return replace(flow, name=self.add(node, flow.name, axis=now), axis=time)

    def _reshape(self, node: Node) -> Flow:
        flow, old, shape = self.flow(node.inputs[0]), self.graph.shapes[node.inputs[0]], tuple(node.attrs["shape"])
        if flow.axis is None:
            return replace(flow, name=self.add(node, flow.name))
        before, long = int(np.prod(old[: flow.axis])), old[flow.axis]
        at = next((a for a in range(len(shape)) if int(np.prod(shape[:a])) == before and shape[a] == long), None)
        if at is None and long > 1:
            raise ExportError("joins the axis of time with others")
        return replace(
            flow, name=self.add(node, flow.name, shape=shape if at is None else _without(shape, at)), axis=at
        )

    def _transpose(self, node: Node) -> Flow:
        flow, perm = self.flow(node.inputs[0]), tuple(node.attrs["perm"])
        if flow.axis is None:
            return replace(flow, name=self.add(node, flow.name))
        left = [p - (p > flow.axis) for p in perm if p != flow.axis]
        return replace(flow, name=self.add(node, flow.name, perm=tuple(left)), axis=perm.index(flow.axis))

    def _expand(self, node: Node) -> Flow:
        flow, shape = self.flow(node.inputs[0]), tuple(node.attrs["shape"])
        if flow.axis is None:
            return replace(flow, name=self.add(node, flow.name))
        at = flow.axis + len(shape) - len(self.graph.shapes[node.inputs[0]])
        if shape[at] != self.graph.shapes[node.inputs[0]][flow.axis]:
            raise ExportError("repeats a time step along time")
        return replace(flow, name=self.add(node, flow.name, shape=_without(shape, at)), axis=at)

    def _slice(self, node: Node) -> Flow:
        flow, axis = self.flow(node.inputs[0]), node.attrs["axis"] % len(self.graph.shapes[node.inputs[0]])
        if axis != flow.axis:
            now = axis - (flow.axis is not None and axis > flow.axis)
            return replace(flow, name=self.add(node, flow.name, axis=now))
        start = node.attrs["start"]
        if node.attrs["step"] != 1:
            raise ExportError("takes one time step of several: a stream has one rate")
        return replace(flow, shift=flow.latency + start, front=max(0, flow.front - start))

    def _concat(self, node: Node) -> Flow:
        axis = node.attrs["axis"] % len(self.graph.shapes[node.output])
        moving = [i for i in node.inputs if i in self.flows]
        flow = self.flows[moving[0]]
        if axis == flow.axis:
            at = node.inputs.index(moving[0])
            if len(moving) > 1:
                raise ExportError("joins sequences one after the other")
            ahead = node.inputs[:at]
            if any(self.graph.array(name).any() for name in ahead):
                raise ExportError("puts something else than zeros before the first time step")
            front = sum(self.graph.shapes[name][axis] for name in ahead)
            return replace(flow, shift=flow.latency - front, front=flow.front + front)
        values, flow = self.together(node.inputs)
        now = axis - (flow.axis is not None and axis > flow.axis)
        return replace(flow, name=self.add(node, *values, axis=now))

    def _window(self, node: Node) -> Flow:
        flow, axis = self.flow(node.inputs[0]), node.attrs["axis"] % len(self.graph.shapes[node.inputs[0]])
        size, step, apart = (node.attrs[k] for k in ("size", "step", "dilation"))
        if axis != flow.axis:
            now = axis - (flow.axis is not None and axis > flow.axis)
            time = None if flow.axis is None else flow.axis + (axis < flow.axis)
            return replace(flow, name=self.add(node, flow.name, axis=now), axis=time)
        if step != 1:
            raise ExportError("has a stride in time: a stream has one rate")
        span = (size - 1) * apart
        if flow.front > span:
            flow = self.settled(node.inputs[0])
        shape = self.new.shapes[flow.name]
        if size == 1:
            name = self.new.add("reshape", flow.name, output=node.output, shape=(*shape[:axis], 1, *shape[axis:]))
            return Flow(name, axis, flow.latency)
        flat = self.between("reshape", flow.name, shape=(int(np.prod(shape)),))
        taps = self.between("delay", flat, steps=span, rows=size, apart=apart)
        first = self.between("reshape", taps, shape=(size, *shape))
        order = (*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1))
        return Flow(self.new.add("transpose", first, output=node.output, perm=order), axis, flow.latency + span)

    # --- recurrences over time ---

    def _step(self, node: Node) -> Flow:
        flow = self.settled(node.inputs[0])
        if flow.axis != 0:
            raise ExportError("has its steps along another axis than time")
        return Flow(flow.name, None, flow.shift)

    def _state(self, node: Node) -> Flow:
        if node.inputs[0] in self.flows:
            raise ExportError("begins with a value that varies in time")
        return Flow(self.add(node, *node.inputs), None, None)

    def _collect(self, node: Node) -> Flow:
        after = self.flow(node.inputs[0])
        if node.attrs.get("reverse"):
            raise ExportError("runs backwards: it needs the end of the sequence first")
        name = self.new.add("collect", after.name, node.inputs[1], output=node.output, steps=0)
        return Flow(name, 0, after.latency)


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


__all__ = ["Flow", "stream", "time_steps", "verify"]
