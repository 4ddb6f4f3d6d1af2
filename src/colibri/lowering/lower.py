"""Conversion of a graph into the engine's flat program: operations on views of buffers, tensors, layers, experts.

Shape operations become views and vanish; a copy is made only where an operation cannot read a view as it stands.
Where each buffer lies in memory is decided later, in `colibri.lowering.plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from colibri.errors import ExportError
from colibri.format.layouts import (
    attention_macs,
    cache_pages,
    delay_slots,
    layout_of,
    page_bytes,
    quantized_floats,
    stored_size,
)
from colibri.format.spec import ALIGN_BUFFER, ALIGN_MODEL, EXPERT_TILE, LANES, LIMIT, PAGE, align
from colibri.ir.graph import MASKS, Graph, Node, Router, Shape, expert_numbers, is_absent, mask
from colibri.ir.weights import Weight, kind_of
from colibri.lowering.program import (
    Buffer,
    Expert,
    Layer,
    Op,
    Operand,
    Part,
    Place,
    Program,
    Section,
    Tensor,
    View,
    liveness,
)
from colibri.lowering.views import (
    as_rows,
    broadcast_strides,
    collapse,
    contiguous,
    first_row,
    indexed,
    must,
    reduction,
    reshaped,
)


def lower(graph: Graph, max_batch: int = 1) -> Program:
    """The program of `graph` for batches up to `max_batch`; raises ExportError for what the engine cannot run."""
    graph.validate()
    program = Program(
        graph.name,
        max_batch,
        [(name, graph.shapes[name]) for name in graph.inputs],
        [(name, graph.shapes[name]) for name in graph.outputs],
        context_tokens=graph.context,
    )
    largest = max(prod(shape) for shape in graph.shapes.values())
    if largest > LIMIT:
        raise ExportError(f"a value of {largest} elements exceeds the engine's {LIMIT}")
    main = _Lowering(program, graph, max_batch, "shared")
    main.run(_packed("input", program.input_floats, program.inputs),
             _packed("output", program.output_floats, program.outputs))  # fmt: skip
    program.ops, program.shared, program.encoder_ops = main.ops, main.section(graph), main.encoder_ops
    program.tensors = main.tensors.items + program.tensors
    program.macs += main.macs
    program.weight_bytes += program.shared.size - _looked_up(program.ops)
    program.tail_op = _tail(program)
    return program


def _looked_up(ops: Sequence[Op]) -> int:
    """Bytes of the tables that are only read one row per token."""
    tables: set[Tensor] = {op["table"] for op in ops if "table" in op.words}
    read = {tensor for op in ops for name, tensor in op.tensors().items() if name != "table"}
    return sum(align(t.bytes, ALIGN_MODEL) for t in tables - read)


def _tail(program: Program) -> int:
    """The first operation behind all that later tokens depend on; the end, where an output is written before it."""
    last = max((n + 1 for n, op in enumerate(program.ops) if "runs_all_samples" in op.known.traits), default=0)
    early = any(op.out.place.space == "output" for op in program.ops[:last])
    return last if program.context_tokens and not early else len(program.ops)


def _packed(space: str, floats: int, ports: Sequence[tuple[str, Shape]]) -> list[View]:
    views, offset = [], 0
    for _, shape in ports:
        views.append(View(Place(space, floats), offset, shape, contiguous(shape)))
        offset += prod(shape)
    return views


class _Tensors:
    """The tensors of one section: the shared weights, or one expert's."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.items: list[Tensor] = []
        self.size = 0

    def add(self, name: str, value: Weight, layout: str) -> Tensor:
        for t in self.items:
            if (t.name, t.layout) == (name, layout):
                return t
        rows, cols = (1, prod(value.shape)) if layout == "flat" else value.shape
        size = stored_size(value, layout)
        self.items.append(Tensor(name, layout, rows, cols, self.scope, self.size, size))
        self.size += align(size, ALIGN_MODEL)
        return self.items[-1]


class _Lowering:
    """Lowers one graph: the whole model, or one expert (whose samples are the tokens of a tile)."""

    def __init__(self, program: Program, graph: Graph, samples: int, scope: str) -> None:
        self.program, self.graph, self.samples = program, graph, samples
        self.tensors = _Tensors(scope)
        self.ops: list[Op] = []
        self.views: dict[str, View] = {}
        self.targets: dict[str, View] = {}
        self.routers: dict[str, Weight] = {}  # what routers have besides logits, by tensor name
        self.quantized: dict[str, tuple[Operand, int]] = {}  # values as int8 rows: made once, read by every matrix
        self.stored: dict[str, Operand] = {}  # caches of a source text, by the attention that looks at them
        self.encoder_ops = 0
        self.macs = 0
        self.steps = 1  # of the recurrence that is open

    # --- storage ---

    def section(self, graph: Graph) -> Section:
        """The tensors with the values of `graph`, which is the one lowered or one like it."""
        names = dict(zip(self.graph.constants, graph.constants, strict=True))
        values = self.routers | {name: graph.constants[other] for name, other in names.items()}
        parts = (Part(t, values[t.name], names.get(t.name, t.name)) for t in self.tensors.items)
        return Section(self.tensors.size, tuple(parts))

    def keep(self, node: Node, size: int, kept: bool = True) -> Operand:
        """Memory of `size` bytes that outlives a run where it is `kept`."""
        return Operand(Place("arena", 0, Buffer(f"{node.output}.kept", align(size, ALIGN_BUFFER) // 4, kept=kept)))

    def fresh(self, name: str, shape: Shape) -> View:
        place = Place("arena", prod(shape), Buffer(name, self.samples * prod(shape)))
        return View(place, 0, shape, contiguous(shape))

    def constant(self, name: str) -> View:
        array = self.graph.constants[name]
        place = Place("const", 0, tensor=self.tensors.add(name, array, "flat"))
        return View(place, 0, array.shape, contiguous(array.shape))

    def view(self, name: str) -> View:
        if name in self.graph.constants and name not in self.views:
            self.views[name] = self.constant(name)
        return self.views[name]

    def weight(self, node: Node, position: int, layout: str = "flat") -> Tensor | None:
        if len(node.inputs) <= position:
            return None
        name = node.inputs[position]
        if name not in self.graph.constants:
            raise ExportError(f"{node.output}: {node.op} needs constant weights, but {name!r} is computed")
        return self.tensors.add(name, self.graph.constants[name], layout)

    # --- the walk ---

    def run(self, inputs: Sequence[View], outputs: Sequence[View]) -> None:
        self.views.update(zip(self.graph.inputs, inputs, strict=True))
        self.aim(outputs)
        encoder = self.graph.encoder() if self.graph.context else set()
        waiting = [node for node in self.graph.nodes if mask(node) == "cross"]
        for node in self.graph.nodes:
            getattr(self, f"_{node.op}")(node)
            for reader in [r for r in waiting if set(r.inputs[1:3]) <= self.views.keys()]:
                self.stored[reader.output] = self.store(reader)
                waiting.remove(reader)
            self.encoder_ops = len(self.ops) if node.output in encoder else self.encoder_ops
        for name, view in zip(self.graph.outputs, outputs, strict=True):
            if self.view(name) != view:
                self.copy(self.view(name), view, name)
        _reuse_dying_inputs(self.ops)

    def aim(self, outputs: Sequence[View]) -> None:
        """Choose, last node first, values that can be computed right where they are needed in the end."""
        computed = {n.output for n in self.graph.nodes if n.op not in ("reshape", "transpose", "slice", "expand")}
        for name, view in zip(self.graph.outputs, outputs, strict=True):
            self.targets.setdefault(name, view)
        for node in reversed(self.graph.nodes):
            target = self.targets.get(node.output)
            if node.op == "concat":
                target = target or self.fresh(node.output, self.graph.shapes[node.output])
                self.targets[node.output] = target
                for name, part in self.parts(node, target):
                    if name in computed and node.inputs.count(name) == 1:
                        self.targets.setdefault(name, part)
            elif node.op == "reshape" and target is not None:
                source = reshaped(target, self.graph.shapes[node.inputs[0]])
                if source is not None and node.inputs[0] in computed:
                    self.targets.setdefault(node.inputs[0], source)

    def parts(self, node: Node, target: View) -> list[tuple[str, View]]:
        axis = node.attrs["axis"] % len(target.shape)
        pieces, at = [], target.offset
        for name in node.inputs:
            pieces.append((name, target.like(at, self.graph.shapes[name], target.strides)))
            at += self.graph.shapes[name][axis] * target.strides[axis]
        return pieces

    def define(self, node: Node) -> View:
        """Where the node's output goes."""
        view = self.targets.get(node.output) or self.fresh(node.output, self.graph.shapes[node.output])
        self.views[node.output] = view
        return view

    def define_rows(self, node: Node) -> tuple[Operand, int, View | None]:
        """Like `define` for an operation on rows: the operand, the rows, and a view to copy to afterwards."""
        view = self.define(node)
        rows = as_rows(view)
        if rows is not None:
            return (*rows, None)
        own = self.fresh(node.output, view.shape)
        return (*must(as_rows(own)), view)

    def rows(self, name: str) -> tuple[Operand, int]:
        """The value as rows of contiguous elements, copied first where it is not."""
        return self.rows_of(self.view(name), name)

    def rows_of(self, view: View, name: str) -> tuple[Operand, int]:
        """A view likewise."""
        rows = as_rows(view)
        if rows is None or view.place.space == "const":
            own = self.fresh(f"{name}.copy", view.shape)
            self.copy(view, own, name)
            rows = must(as_rows(own))
        return rows

    def copy(self, source: View, target: View, name: str) -> None:
        self.map("unary", "identity", [source], target, name)

    def map(
        self,
        code: str,
        func: str,
        sources: Sequence[View],
        target: View,
        name: str,
        alpha: float = 0.0,
        beta: float = 0.0,
        before: str = "identity",
        after: str = "identity",
    ) -> None:
        """An elementwise operation, its axes merged to at most four."""
        strides = [broadcast_strides(s, target.shape) for s in (*sources, target)]
        dims, merged = collapse(target.shape, strides)
        if len(dims) > 4:  # the engine has four: one operation for each index of the shortest axis
            views = [v.like(v.offset, dims, s) for v, s in zip((*sources, target), merged, strict=True)]
            axis = dims.index(min(dims))
            for n in range(dims[axis]):
                *parts, part = (indexed(v, axis, n) for v in views)
                self.map(code, func, parts, part, name, alpha, beta, before, after)
            return
        tensors = [s.place.tensor for s in sources] + [None]
        operands = [first_row(s) for s in sources]
        two = len(sources) > 1
        self.ops.append(
            Op(code, first_row(target), operands[0], operands[1] if two else Operand(), func=func,
               constant_a=tensors[0], constant_b=tensors[1], sizes=dims,
               strides_a=merged[0], strides_b=merged[1] if two else (), strides_out=merged[-1],
               comment=name, alpha=alpha, beta=beta, before=before, after=after)
        )  # fmt: skip

    # --- one method an operation ---

    def _linear(self, node: Node) -> None:
        n, k = self.graph.shapes[node.inputs[1]]
        matrix = self.graph.constants.get(node.inputs[1])
        integer = reads_int8(node, self.graph)
        a, rows = self.int8_rows(node.inputs[0]) if integer else self.rows(node.inputs[0])
        out, _, after = self.define_rows(node)
        outliers = matrix is not None and kind_of(matrix)[1] >= 0
        self.ops.append(
            Op("linear_q" if integer else "linear", out, a, func=node.attrs.get("activation") or "identity", rows=rows,
               inputs=k, outputs=n, matrix=self.weight(node, 1, "" if matrix is None else layout_of(matrix)),
               bias=self.weight(node, 2), outliers=self.weight(node, 1, "outliers") if outliers else None,
               comment=node.output, alpha=node.attrs.get("alpha", 0.0), beta=node.attrs.get("beta", 0.0))
        )  # fmt: skip
        self.macs += self.steps * rows * n * k
        self.finish(node, after)

    def _matmul(self, node: Node) -> None:
        """A product for each pair of matrices, the second laid out as products take their weights."""
        *_, m, k = self.graph.shapes[node.inputs[0]]
        *lead, _, n = self.graph.shapes[node.output]
        a, b = (self.stack(name) for name in node.inputs)
        target = self.define(node)
        out = reshaped(target, (prod(lead), m, n)) or self.fresh(node.output, (prod(lead), m, n))
        for index in range(prod(lead)):
            rows, _ = self.rows_of(indexed(a, 0, index), node.output)
            result = as_rows(indexed(out, 0, index))
            own = self.fresh(node.output, (m, n))
            to, _ = result or must(as_rows(own))
            matrix = self.pack(indexed(b, 0, index), node.output)
            self.ops.append(Op("linear", to, rows, first_row(matrix), rows=m, inputs=k, outputs=n, comment=node.output))
            if result is None:
                self.copy(own, indexed(out, 0, index), node.output)
        if out.place is not target.place:
            self.copy(out.like(0, target.shape, contiguous(target.shape)), target, node.output)
        self.macs += self.steps * prod(lead) * m * k * n

    def stack(self, name: str) -> View:
        """The value's matrices along one leading axis."""
        view = self.view(name)
        shape = (prod(view.shape[:-2]), *view.shape[-2:])
        stacked = reshaped(view, shape)
        if stacked is None:
            own = self.fresh(f"{name}.copy", view.shape)
            self.copy(view, own, name)
            stacked = own.like(0, shape, contiguous(shape))
        return stacked

    def pack(self, matrix: View, name: str) -> View:
        """A copy of a matrix (inputs, outputs) in layout rows8_f32; what fills the last block is never used."""
        (k, n), (down, right) = matrix.shape, matrix.strides
        blocks, rest = divmod(n, LANES)
        packed = self.fresh(f"{name}.matrix", (blocks + (rest > 0), k, LANES))
        for first, count, lanes in ((0, blocks, LANES), (blocks, 1, rest)):
            if count and lanes:
                at, strides = matrix.offset + first * LANES * right, (LANES * right, down, right)
                part = matrix.like(at, (count, k, lanes), strides)
                self.copy(part, packed.like(first * k * LANES, part.shape, packed.strides), name)
        return packed

    def _state(self, node: Node) -> None:
        """Opens a loop: states lie one after the other, and each step reads one and writes the next."""
        end = next(n for n in self.graph.nodes if n.op == "collect" and n.inputs[1] == node.output)
        if end.attrs["steps"] == 0:
            self.recall(node)
            return
        steps, backward, shape = end.attrs["steps"], bool(end.attrs.get("reverse")), self.graph.shapes[node.output]
        states, size = self.fresh(end.output, (steps + 1, *shape)), prod(shape)
        self.copy(self.view(node.inputs[0]), indexed(states, 0, steps if backward else 0), node.output)
        self.views[node.output] = replace(indexed(states, 0, int(backward)), step=size)
        self.targets[end.inputs[0]] = replace(indexed(states, 0, int(not backward)), step=size)
        self.views[end.output] = states.like(size * (not backward), (steps, *shape), states.strides)
        self.steps = steps
        self.ops.append(
            Op("loop", Operand(), Operand(), steps=steps, body=0, backward=int(backward), comment=end.output)
        )

    def recall(self, node: Node) -> None:
        """A stream's state is what the last run kept, zeros at first."""
        start = self.graph.constants.get(node.inputs[0])
        if not isinstance(start, np.ndarray) or start.any():
            raise ExportError(f"{node.output}: a stream's state begins with zeros")
        if self.samples > 1:
            raise ExportError(f"{node.output}: a stream's recurrence takes its samples one by one: max_batch=1")
        size = prod(self.graph.shapes[node.output])
        kept = self.keep(node, 2 * 4 * size)
        view = self.define(node)
        out, _ = must(as_rows(view.like(view.offset, (size,), (1,))))
        self.ops.append(Op("delay", out, Operand(), work=kept, width=size, steps=1, slots=2, comment=node.output))
        self.stored[node.output] = kept

    def _step(self, node: Node) -> None:
        v = self.view(node.inputs[0])
        self.views[node.output] = replace(indexed(v, 0, 0), step=v.strides[0])

    def _collect(self, node: Node) -> None:
        if node.attrs["steps"] == 0:
            size = prod(self.graph.shapes[node.output])
            self.views[node.output] = result = self.view(node.inputs[0])
            flat = reshaped(result, (size,))
            rows = self.rows_of(flat or result, node.output)[0]
            kept = self.stored[node.inputs[1]]
            self.ops.append(Op("delay", Operand(), rows, work=kept, width=size, steps=1, slots=2, comment=node.output))
            return
        result, target = self.view(node.inputs[0]), self.targets[node.inputs[0]]
        if result != target:
            self.copy(result, target, node.output)
        begin = max(n for n, op in enumerate(self.ops) if op.code == "loop")
        loop = self.ops[begin]
        body = self.ops[begin + 1 :]
        loop["body"] = len(body)
        self.steps = 1
        most = max(op.rows * (prod(op.sizes()) if op.known.has_strides else max(op.sizes()) + 16) for op in body)
        if self.samples * loop["steps"] * most > LIMIT:
            raise ExportError(f"{node.output}: {loop['steps']} steps of up to {most} numbers for {self.samples} "
                              f"samples at once are more than the engine's {LIMIT}: lower max_batch")  # fmt: skip

    def int8_rows(self, name: str) -> tuple[Operand, int]:
        """The value quantised to int8, a record for each row."""
        if name not in self.quantized:
            a, rows = self.rows(name)
            cols = self.graph.shapes[name][-1]
            view = self.fresh(f"{name}.int8", (rows, quantized_floats(cols)))
            out, _ = must(as_rows(view))
            self.ops.append(Op("quantize", out, a, rows=rows, inputs=cols, comment=name))
            self.quantized[name] = out, rows
        return self.quantized[name]

    def finish(self, node: Node, after: View | None) -> None:
        if after is not None:
            last = self.ops[-1].out
            shape = self.graph.shapes[node.output]
            self.copy(View(last.place, last.offset, shape, contiguous(shape), last.step_stride), after, node.output)

    def _unary(self, node: Node) -> None:
        source = self.view(node.inputs[0])
        alpha, beta = node.attrs.get("alpha", 0.0), node.attrs.get("beta", 0.0)
        self.map("unary", node.attrs["func"], [source], self.define(node), node.output, alpha=alpha, beta=beta)

    def _binary(self, node: Node) -> None:
        sources = [self.view(i) for i in node.inputs]
        alpha, beta = node.attrs.get("alpha", 0.0), node.attrs.get("beta", 0.0)
        before, after = (node.attrs.get(name) or "identity" for name in ("activation", "then"))
        if node.output not in self.targets and self.halves(node):
            target = self.views[node.output] = sources[0]
        else:
            target = self.define(node)
        self.map("binary", node.attrs["func"], sources, target, node.output, alpha, beta, before, after)

    def halves(self, node: Node) -> bool:
        """Whether it alone reads its inputs, parts of one product: the result may then take the first's place."""
        producers, readers = self.graph.producers(), self.graph.consumers()
        a, b = (producers.get(name) for name in node.inputs)
        if a is None or b is None or a.op != "slice" or b.op != "slice" or a.inputs != b.inputs:
            return False
        whole = producers.get(a.inputs[0])
        apart = a.attrs["stop"] <= b.attrs["start"] or b.attrs["stop"] <= a.attrs["start"]
        seen = any(name in self.graph.outputs for name in (*a.inputs, *node.inputs))
        return (
            (whole is not None and whole.op == "linear" and len(readers[whole.output]) == 2)
            and (apart and a.attrs["axis"] == b.attrs["axis"] and not seen)
            and (len(readers[a.output]) == len(readers[b.output]) == 1)
            and self.graph.shapes[a.output] == self.graph.shapes[b.output]
        )

    def _rowwise(self, node: Node) -> None:
        a, rows = self.rows(node.inputs[0])
        out, _, after = self.define_rows(node)
        self.ops.append(
            Op(node.op, out, a, rows=rows, size=self.graph.shapes[node.inputs[0]][-1], gamma=self.weight(node, 1),
               beta=self.weight(node, 2), epsilon=node.attrs.get("eps", 0.0), comment=node.output)
        )  # fmt: skip
        self.finish(node, after)

    _softmax = _layernorm = _rmsnorm = _rowwise

    def _reduce(self, node: Node) -> None:
        shape = self.graph.shapes[node.inputs[0]]
        axis = node.attrs["axis"] % len(shape)
        strides = reduction(self.view(node.inputs[0]), axis)
        source = self.view(node.inputs[0])
        if strides is None:
            source = self.fresh(f"{node.inputs[0]}.copy", shape)
            self.copy(self.view(node.inputs[0]), source, node.output)
            strides = contiguous((0, shape[axis], prod(shape[axis + 1 :])))
        target = self.define(node)
        own = target if target.strides == contiguous(target.shape) else self.fresh(node.output, target.shape)
        inner = prod(shape[axis + 1 :])
        self.ops.append(
            Op("reduce", first_row(own), first_row(source), func=node.attrs["func"],
               outer=prod(shape[:axis]), size=shape[axis], inner=inner,
               from_outer=strides[0], from_next=strides[1], from_inner=strides[2],
               to_outer=inner, to_inner=1, comment=node.output)
        )  # fmt: skip
        self.finish(node, target if own is not target else None)

    def _reshape(self, node: Node) -> None:
        source, shape = self.view(node.inputs[0]), self.graph.shapes[node.output]
        view = reshaped(source, shape)
        if view is None:
            own = self.fresh(node.output, source.shape)
            self.copy(source, own, node.output)
            view = View(own.place, 0, shape, contiguous(shape))
        self.views[node.output] = view

    def _transpose(self, node: Node) -> None:
        v, perm = self.view(node.inputs[0]), node.attrs["perm"]
        strides = tuple(v.strides[p] for p in perm)
        self.views[node.output] = v.like(v.offset, tuple(v.shape[p] for p in perm), strides)

    def _slice(self, node: Node) -> None:
        v, axis = self.view(node.inputs[0]), node.attrs["axis"] % len(self.graph.shapes[node.inputs[0]])
        strides = tuple(s * node.attrs["step"] if n == axis else s for n, s in enumerate(v.strides))
        offset = v.offset + node.attrs["start"] * v.strides[axis]
        self.views[node.output] = v.like(offset, self.graph.shapes[node.output], strides)

    def _expand(self, node: Node) -> None:
        v, shape = self.view(node.inputs[0]), self.graph.shapes[node.output]
        self.views[node.output] = v.like(v.offset, shape, broadcast_strides(v, shape))

    def _window(self, node: Node) -> None:
        v, axis = self.view(node.inputs[0]), node.attrs["axis"] % len(self.graph.shapes[node.inputs[0]])
        own = (v.strides[axis] * node.attrs["step"], v.strides[axis] * node.attrs["dilation"])
        strides = (*v.strides[:axis], *own, *v.strides[axis + 1 :])
        self.views[node.output] = v.like(v.offset, self.graph.shapes[node.output], strides)

    def _concat(self, node: Node) -> None:
        target = self.define(node)
        for name, part in self.parts(node, target):
            if self.view(name) != part:
                self.copy(self.view(name), part, node.output)

    def _embed(self, node: Node) -> None:
        ids, count = self.rows(node.inputs[0])
        out, _, after = self.define_rows(node)
        table = self.graph.constants.get(node.inputs[1])
        weight = self.weight(node, 1, "" if table is None else layout_of(table))
        width = self.graph.shapes[node.output][-1]
        self.ops.append(Op("embed", out, ids, rows=count, width=width, table=weight, comment=node.output))
        self.finish(node, after)

    def _rope(self, node: Node) -> None:
        shape = self.graph.shapes[node.output]
        positions, turned = self.graph.shapes[node.inputs[1]]
        if positions < self.graph.context:
            raise ExportError(f"{node.output}: a table of {positions} positions for {self.graph.context} tokens")
        a, rows = self.rows(node.inputs[0])
        out, _, after = self.define_rows(node)
        self.ops.append(Op("rope", out, a, rows=rows, size=shape[-1], turned=turned,
                           table=self.weight(node, 1), comment=node.output))  # fmt: skip
        self.finish(node, after)

    def cache_of(self, node: Node) -> dict[str, Any]:
        """What the two operations on an attention's cache say of it."""
        kv, key = self.graph.shapes[node.inputs[1]]
        _, value = self.graph.shapes[node.inputs[2]]
        window = node.attrs.get("window", 0)
        positions = cache_pages(self.graph.context, window, self.samples) * PAGE
        return {"func": node.attrs.get("cache", "fp32"), "key": key, "value": value, "key_heads": kv,
                "positions": positions, "window": window}  # fmt: skip

    def store(self, node: Node) -> Operand:
        """The operation that puts keys and values into an attention's cache, and where that is."""
        cache = self.cache_of(node)
        size = (
            cache["key_heads"] * (cache["positions"] // PAGE) * page_bytes(cache["func"], cache["key"], cache["value"])
        )
        kept = self.keep(node, size, kept=mask(node) != "full")
        (k, _), (v, _) = self.rows(node.inputs[1]), self.rows(node.inputs[2])
        self.ops.append(Op("cache", Operand(), k, v, kept, rows=cache["key_heads"], comment=node.output, **cache))
        return kept

    def _attention(self, node: Node) -> None:
        """Two operations: one that puts the chunk's keys and values into the cache, and one that looks at it."""
        heads, _ = self.graph.shapes[node.inputs[0]]
        cache = self.cache_of(node)
        q, _ = self.rows(node.inputs[0])
        kept = self.stored.get(node.output) or self.store(node)
        out, _, after = self.define_rows(node)
        more = self.weight(node, 3)
        biased = len(node.inputs) > 3 and len(self.graph.shapes[node.inputs[3]]) == 2
        longest = self.graph.shapes[node.inputs[3]][1] if biased else 0
        if biased and longest < (2 * self.graph.context - 1 if mask(node) == "full" else self.graph.context):
            raise ExportError(f"{node.output}: biases for {longest} distances in texts of {self.graph.context} tokens")
        self.ops.append(
            Op("attention", out, q, work=kept, rows=heads, mask=MASKS.index(mask(node) or "causal"),
               sinks=None if biased else more, biases=more if biased else None, scale=node.attrs["scale"],
               softcap=node.attrs.get("softcap", 0.0), comment=node.output, **cache)
        )  # fmt: skip
        self.macs += attention_macs(heads, cache["key"], cache["value"], cache["window"], self.graph.context)
        self.finish(node, after)

    def _delay(self, node: Node) -> None:
        width, steps = self.graph.shapes[node.output][-1], node.attrs["steps"]
        slots = delay_slots(self.graph.context, steps, self.samples)
        a, _ = self.rows(node.inputs[0])
        out, rows, after = self.define_rows(node)
        self.ops.append(
            Op("delay", out, a, work=self.keep(node, 4 * width * slots), rows=rows, width=width, steps=steps,
               slots=slots, apart=node.attrs.get("apart", 0), comment=node.output)
        )  # fmt: skip
        self.finish(node, after)

    def _delta(self, node: Node) -> None:
        """Queries and keys come as one operand, a row a head, and each value with its decay and beta behind it."""
        kv, key = self.graph.shapes[node.inputs[0]]
        heads, width = self.graph.shapes[node.output]
        keys = self.fresh(f"{node.output}.keys", (2, kv, key))
        values = self.fresh(f"{node.output}.values", (heads, width + 2))
        for name, target in zip(node.inputs, (
            indexed(keys, 0, 0), indexed(keys, 0, 1), values.like(0, (heads, width), values.strides),
            indexed(values, 1, width), indexed(values, 1, width + 1),
        ), strict=True):  # fmt: skip
            self.copy(self.view(name), target, name)
        out, _, after = self.define_rows(node)
        self.ops.append(
            Op("delta", out, must(as_rows(keys))[0], must(as_rows(values))[0], self.keep(node, 4 * heads * key * width),
               rows=heads, key=key, value=width, key_heads=kv, scale=node.attrs["scale"], comment=node.output)
        )  # fmt: skip
        self.macs += 3 * heads * key * width
        self.finish(node, after)

    def _moe(self, node: Node) -> None:
        router: Router = node.attrs["router"]
        experts: list[Graph] = node.attrs["experts"]
        present = [expert for expert in experts if not is_absent(expert)]
        integer = router.apply == "output" and bool(present) and all(map(_reads_input_as_int8, present))
        x, tokens = self.int8_rows(node.inputs[0]) if integer else self.rows(node.inputs[0])
        logits, _ = self.rows(node.inputs[1])
        out, _, after = self.define_rows(node)
        d_in, d_out = self.graph.shapes[node.inputs[0]][-1], self.graph.shapes[node.output][-1]
        quantized = d_in if integer else 0
        d_in = quantized_floats(d_in) if integer else d_in
        choices = self.samples * tokens * router.k
        slots = choices * d_out if router.k > 1 else 0  # a single choice goes straight to the output
        words = slots + 3 * choices + router.experts + 1 + (4 if router.keyed else 1) * router.experts
        work = Buffer(f"{node.output}.work", align(words, ALIGN_BUFFER // 4))
        layer = Layer(
            router, tokens, d_in, d_out, len(self.program.experts), min(EXPERT_TILE, self.samples * tokens), quantized
        )
        number = len(self.program.layers)
        self.ops.append(
            Op("moe", out, x, logits, Operand(Place("arena", 0, work)), rows=tokens, d_in=d_in, d_out=d_out,
               layer=number, bias=self.vector(f"{node.output}.bias", router.bias),
               scale=self.vector(f"{node.output}.expert_scale", router.expert_scale), comment=node.output)
        )  # fmt: skip
        self.program.layers.append(layer)
        self.lower_experts(number, layer, node, integer)
        self.finish(node, after)

    def vector(self, name: str, values: Sequence[float]) -> Tensor | None:
        """The tensor of what a router has for each expert."""
        if not values:
            return None
        self.routers[name] = np.array(values, np.float32)
        return self.tensors.add(name, self.routers[name], "flat")

    def lower_experts(self, number: int, layer: Layer, node: Node, integer: bool) -> None:
        """Lower a layer's experts: one program for neighbours that differ only in their weights' values.

        With `integer` the tokens come quantised already. An absent expert has no operations and no weights.
        """
        program = self.program
        rows: list[Expert] = []
        before = ""
        for index, expert in zip(expert_numbers(node), node.attrs["experts"], strict=True):
            if is_absent(expert):
                rows.append(Expert(number, index, 0, 0, 0, Section()))
                continue
            signature = expert.signature()
            if signature != before:
                low = _Lowering(program, expert, layer.tile, "expert")
                token = View(Place("token_in", 0), 0, (layer.d_in,), (1,))
                if integer:
                    low.quantized[expert.inputs[0]] = must(as_rows(token))
                if layer.router.apply == "input":
                    weight = View(Place("token_weight", 0), 0, token.shape, (0,))
                    scaled = low.fresh(f"{expert.inputs[0]}.weighted", token.shape)
                    low.map("binary", "mul", [token, weight], scaled, expert.inputs[0])
                    token = scaled
                low.run([token], [View(Place("token_out", 0), 0, (layer.d_out,), (1,))])
                before, first = signature, len(program.expert_ops)
                program.expert_ops += low.ops
                program.tensors += low.tensors.items
            rows.append(Expert(number, index, first, len(low.ops), low.macs, low.section(expert)))
        program.experts += rows
        touched = min(layer.router.experts, layer.tokens * layer.router.k)
        program.weight_bytes += sum(sorted((e.section.size for e in rows), reverse=True)[:touched])
        program.macs += layer.tokens * sum(sorted((e.macs for e in rows), reverse=True)[: layer.router.k])


def reads_int8(node: Node, graph: Graph) -> bool:
    """Whether a `linear` takes its input as int8."""
    matrix = graph.constants.get(node.inputs[1])
    kind = "" if matrix is None else kind_of(matrix)[0]
    return kind == "Int4Weight" or (kind == "Int8Weight" and node.attrs.get("activations", "int8") == "int8")


def _reads_input_as_int8(expert: Graph) -> bool:
    """Whether an expert looks at its token only through matrices that take int8."""
    readers = [node for node in expert.nodes if expert.inputs[0] in node.inputs]
    alone = all(node.op == "linear" and reads_int8(node, expert) for node in readers)
    return bool(readers) and alone and expert.inputs[0] not in expert.outputs


# --- reuse ------------------------------------------------------------------------------------------------------------


def _reuse_dying_inputs(ops: list[Op]) -> None:
    """Compute an elementwise or row-wise result in place if nothing reads its input afterwards."""
    spans = liveness(ops)
    for n, op in enumerate(ops):
        out = op.out.place.buffer
        if "in_place" not in op.known.traits or out is None or spans[out][0] != n:
            continue
        strides_a, strides_b, strides_out = (op.words.get(f"strides_{name}", ()) for name in ("a", "b", "out"))
        # What passes through a function first must not overwrite the other operand on its way.
        a, b = (op.a, strides_a), (op.b, strides_b)
        for (source, strides), other in ((a, b), (b, a))[: 2 if op.before == "identity" else 1]:
            held = source.place.buffer
            if held is None or held is out or spans[held][1] != n or held.floats != out.floats:
                continue
            here = (source.offset, source.place.sample_stride, source.row_stride, source.step_stride, strides)
            there = (op.out.offset, op.out.place.sample_stride, op.out.row_stride, op.out.step_stride, strides_out)
            same = other == (source, strides) and op.before == "identity"
            if here != there or (other[0].place.buffer is held and not same):
                continue
            for later in ops[n:]:
                for name in ("a", "b", "out", "work"):
                    operand: Operand = getattr(later, name)
                    if operand.place.buffer is out:
                        place = Place("arena", operand.place.sample_stride, held)
                        setattr(later, name, replace(operand, place=place))
            spans[held] = (spans[held][0], spans[out][1])
            break
