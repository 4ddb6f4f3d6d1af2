"""Conversion of ATen programs to graphs, in terms of one sample; `aten` has the operations one by one.

torch.export gives a flat program whose tensors carry the batch in one of their axes, at first in axis 0, as the symbol
s or, where a view merged the batch with c rows a sample, as c·s. In row-major order c follows s, so such a tensor has
the per-sample shape without that axis, or with c in its place. An operation that reads the axis any other way would mix
samples, and is refused. What does not depend on an input is computed here and becomes a constant.

Integers (ids, categories) are held as floats, which are exact up to 2^24.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colibri.errors import ExportError
from colibri.ir.graph import Graph, Router, Shape


@dataclass(frozen=True)
class Value:
    """A tensor of the program that depends on an input.

    The batch is axis `lead` of the axes torch sees; where it is `merged`, as c·batch, c is an axis of the sample, of
    which `outer` rows lie before the batch and the others behind it.
    """

    name: str
    shape: Shape  # per sample
    merged: bool
    lead: int = 0
    outer: int = 1

    @property
    def rank(self) -> int:
        """The number of axes torch sees, batch included."""
        return len(self.shape) + (not self.merged)


@dataclass(frozen=True)
class Const:
    """A tensor that depends on no input, and the name it gets in the graph if something uses it."""

    tensor: Tensor
    name: str


@dataclass(frozen=True)
class MoeBody:
    """What stands behind one `colibri::moe` leaf."""

    path: str
    router: Router
    experts: list[Graph]


# What tensors hold; integers as floats.
COMPUTED = (torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ROUTING = frozenset(
    {"topk", "gather", "scatter", "scatter_add", "sort", "argsort", "one_hot", "nonzero", "index", "index_put",
     "index_add", "index_select", "masked_select"}
)  # fmt: skip
WAY_OUT = (
    "if this is the routing of a Mixture of Experts, say what the block does with colibri.register_moe(...), or write "
    "the block densely: every expert on every token, and the weighted sum of their outputs"
)
COMPARED = (
    "choices that depend on the data are not computed; write x > 0 with relu, leaky_relu, clamp, minimum or maximum"
)
LARGEST = "return the values it is taken of, such as the logits, and take the largest outside"
PLAIN = {
    **dict.fromkeys(("argmax", "argmin"), LARGEST),
    **dict.fromkeys(("where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "any", "all", "isnan", "isinf",
                     "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not"), COMPARED),
}  # fmt: skip
OTHER_WAY = "write it with what docs/guide.md lists, or compute it outside the module"


class Converter:
    """Converts one exported program into `graph` with the converters in `ops`, by ATen name.

    `bodies` are what stands behind the MoE leaves; `notes` say, by module path, what is known about blocks there.
    """

    def __init__(
        self, graph: Graph, ops: Mapping[str, Callable[..., Any]], bodies: Sequence[MoeBody], notes: Mapping[str, str]
    ) -> None:
        self.graph = graph
        self.ops = ops
        self.bodies = bodies
        self.notes = notes
        self.env: dict[Any, Any] = {}
        self.batch: set[Any] = set()
        self.varying: set[Any] = set()  # nodes that depend on an input, or on the batch size
        self.needs: list[set[Any]] = []  # by output, the nodes it depends on
        self.node: Any = None
        self.op = ""

    def run(self, program: Any, state: Mapping[str, Tensor]) -> None:
        """Append the program's inputs, nodes and outputs, with the weights in `state`, to the graph.

        Raises ExportError naming module and operation.
        """
        self._placeholders(program, state)
        self.needs = [_leading_to([output]) for output in _user_outputs(program)]
        live = set().union(*self.needs)
        nodes = [node for node in program.graph.nodes if node.op == "call_function" and node in live]
        for node in nodes:
            if not isinstance(node.meta.get("val"), int) and any(n in self.varying for n in node.all_input_nodes):
                self.varying.add(node)
        # All at first, so that a layer is named by its own operation and not by how torch prepares its arguments.
        for node in nodes:
            with self._at(node):
                self._refuse_unknown(node)
        for node in nodes:
            with self._at(node):
                self.env[node] = self._convert(node)
        self.graph.outputs = [self._output(node) for node in _user_outputs(program)]

    @contextlib.contextmanager
    def _at(self, node: Any) -> Iterator[None]:
        """Make `node` the current one, and put its place in front of what is refused."""
        self.node, self.op = node, op_name(node).removeprefix("aten.")
        try:
            yield
        except ExportError as error:
            reason = f"{op_name(node)} {error}"
            others = [n for n, needs in enumerate(self.needs) if node in needs]
            if 0 < len(others) < len(self.needs):
                reason = self._of_output(others[0], reason)
            raise ExportError(explain(module_path(node), reason, self.notes)) from None

    def _of_output(self, number: int, reason: str) -> str:
        """A refusal that concerns some of the outputs only."""
        kind = (
            "a second result of a Mixture-of-Experts block, such as a balancing loss" if self.bodies else "one of them"
        )
        return (
            f"output {number} of the {len(self.needs)} is {kind}, which is not exported; leave it out of what the "
            f"module returns ({reason.partition(f'; {WAY_OUT}')[0]})"
        )

    def _placeholders(self, program: Any, state: Mapping[str, Tensor]) -> None:
        nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        for spec in program.graph_signature.input_specs:
            node = nodes.get(getattr(spec.arg, "name", ""))
            if node is None:
                continue
            if spec.kind.name != "USER_INPUT":
                held = state if spec.target in state else program.constants
                self.env[node] = Const(held[spec.target].detach(), spec.target)
                continue
            size = node.meta["val"].shape[0]
            symbol = _free_size(program, size)
            if symbol is None:
                message = (
                    f"input {node.name!r}: the program only works for some batch sizes (it has become {size}); Python "
                    "code that loops over x.shape[0] or branches on it must be written as tensor operations over all "
                    "rows, and a saved program needs a dynamic first axis (torch.export.Dim.AUTO)"
                )
                raise ExportError("; ".join([message, *self.notes.values()]))
            self.batch.add(symbol)
            shape, merged, lead = self.sample(node.meta["val"])
            self.env[node] = Value(self.graph.add_input(node.name, shape), shape, merged, lead)
            self.varying.add(node)

    def _refuse_unknown(self, node: Any) -> None:
        seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        # Whole layers (gru, attention) carry the tag for the dropout they may have.
        if seeded and (node not in self.varying or any(word in self.op for word in ("rand", "dropout", "bernoulli"))):
            raise ExportError("is random, also in eval mode; the exported model must give one answer")
        if node in self.varying and not _symbolic(node) and self._converter() is None and self.op != "getitem":
            raise ExportError(f"is not supported{self._way_out()}")
        if node not in self.varying and "empty" in self.op:
            raise ExportError("gives values nobody has set")

    def _way_out(self) -> str:
        if self.op in ROUTING:
            return f" here; {WAY_OUT}"
        return f"; {PLAIN.get(self.op, OTHER_WAY)}"

    def _converter(self) -> Callable[..., Any] | None:
        overload = f"{self.op}.{getattr(self.node.target, '_overloadname', '')}"
        return self.ops.get(overload) or self.ops.get(self.op)

    def _convert(self, node: Any) -> Any:
        if _symbolic(node):
            return node.meta["val"]
        if node not in self.varying:
            return self._fold(node)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.env[n])
        if node.target is operator.getitem:
            parts, n = args
            if n >= len(parts):
                raise ExportError(f"of {op_name(node.args[0])}: result {n} is not supported, only the values are")
            return parts[n]
        convert = self._converter()
        assert convert is not None
        try:
            inspect.signature(convert).bind(self, *args, **kwargs)
        except TypeError:
            raise ExportError(f"is not supported with these arguments: {node.args[1:]} {dict(node.kwargs)}") from None
        return convert(self, *args, **kwargs)

    def _fold(self, node: Any) -> Any:
        """What does not depend on an input, computed by torch."""

        def plain(n: Any) -> Any:
            return value.tensor if isinstance(value := self.env[n], Const) else value

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), plain)
        with torch.no_grad():
            result = node.target(*args, **kwargs)
        if isinstance(result, list | tuple):
            return [Const(part, f"{node.name}.{n}") for n, part in enumerate(result)]
        return Const(result, node.name) if isinstance(result, Tensor) else result

    def _output(self, node: Any) -> str:
        value = self.env.get(node)
        if not isinstance(value, Value):
            raise ExportError(f"output {node} does not depend on the input; leave it out of the module's result")
        if value.outer > 1:
            raise ExportError(f"output {node} joins batches one after the other; stack them along another axis")
        if value.lead:
            raise ExportError(f"output {node} has the batch in axis {value.lead}; return it with the batch in axis 0")
        return value.name

    # --- what the converters below are written with -------------------------------------------------------------------

    def sample(self, fake: Any) -> tuple[Shape, bool, int]:
        """Per-sample shape of a traced tensor, whether its batch axis merges rows of a sample, and which axis it is."""
        if fake.dtype not in COMPUTED:
            raise ExportError(f"gives {str(fake.dtype).removeprefix('torch.')}; only float32 is computed with")
        sizes = list(fake.shape)
        symbols = {a: n.node.expr for a, n in enumerate(sizes) if isinstance(n, torch.SymInt)}
        free = {a: n for a, n in symbols.items() if not n.is_Integer}
        rows = {a: n / s for a, n in free.items() for s in self.batch if (n / s).is_Integer}
        if not rows:
            raise ExportError(f"mixes samples: the result has shape {_text(sizes)}, without the batch")
        if len(free) > 1:
            raise ExportError(f"gives the shape {_text(sizes)}, which depends on the data or twice on the batch")
        ((lead, count),) = rows.items()
        merged = count != 1
        inner = [int(count) if a == lead else int(n) for a, n in enumerate(sizes) if merged or a != lead]
        return tuple(inner), merged, lead

    def result(self, fake: Any = None) -> Value:
        """What the current node (or the traced tensor `fake`) is to give: a value without a name yet."""
        return Value("", *self.sample(self.node.meta["val"] if fake is None else fake))

    def add(self, op: str, *inputs: Value | str, **attrs: Any) -> str:
        """Append a node; returns its name."""
        return self.graph.add(op, *(v.name if isinstance(v, Value) else v for v in inputs), **attrs)

    def value(self, name: str, fake: Any = None) -> Value:
        """The program's result (the current node's, or `fake`), held in the graph as `name`."""
        new = self.result(fake)
        if self.graph.shapes[name] != new.shape:
            raise ExportError(f"has per-sample shape {self.graph.shapes[name]} where {new.shape} was traced")
        known = (self.env.get(n) for n in self.node.all_input_nodes)
        outer = {v.outer for v in known if isinstance(v, Value) and v.merged} if new.merged else {1}
        if len(outer) > 1:
            raise ExportError("combines rows that were merged with the batch in different orders")
        return replace(new, name=name, outer=max(outer, default=1))

    def emit(self, op: str, *inputs: Value | str, **attrs: Any) -> Value:
        """Append the node that gives the program's result."""
        return self.value(self.add(op, *inputs, **attrs))

    def reshaped(self, x: Value | str, fake: Any = None) -> Value:
        """`x` in the result's per-sample shape."""
        name = x.name if isinstance(x, Value) else x
        shape = self.result(fake).shape
        return self.value(name if self.graph.shapes[name] == shape else self.add("reshape", name, shape=shape), fake)

    def axis(self, x: Value, dim: int) -> int:
        """Per-sample axis of torch's axis `dim`; refuses the batch's."""
        dim = dim % x.rank
        if dim == x.lead:
            raise ExportError(f"works along axis {dim}, the batch: samples must not depend on each other")
        return dim if x.merged or dim < x.lead else dim - 1

    def without_batch(self, tensor: Tensor, like: Value) -> Tensor:
        """A constant that torch would broadcast to `like`, without what it has in the place of the batch."""
        behind = like.rank - like.lead
        if tensor.dim() > like.rank or (tensor.dim() >= behind and tensor.shape[-behind] != 1):
            raise ExportError(f"combines a constant of shape {tuple(tensor.shape)} with the batch axis")
        return tensor.select(-behind, 0) if tensor.dim() >= behind and not like.merged else tensor

    def number(self, value: Any) -> str:
        """A constant of shape ()."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ExportError("uses a number computed from the data or from the batch size")
        return self.graph.add_constant(f"c{float(value):.9g}", float(value))

    def constant(self, value: Any, tensor: Tensor | None = None, suffix: str = "") -> str:
        """`value` (or `tensor` derived from it) in the graph; refuses what depends on an input."""
        if not isinstance(value, Const):
            raise ExportError("is only supported with a constant here, not with a tensor computed from the input")
        array = (value.tensor if tensor is None else tensor).to(torch.float32).numpy(force=True)
        return self.graph.add_constant(value.name + suffix, array)

    def operand(self, value: Any, like: Value) -> str:
        """An operand of a broadcasting operation, aligned with `like` in per-sample terms."""
        if isinstance(value, Value):
            mine, other = ((v.rank - v.lead, v.merged) for v in (value, like))
            if mine != other:
                raise ExportError(
                    f"combines tensors of {value.rank} and {like.rank} axes (batch included), which would align the "
                    "batch of one with a sample axis of the other; add the missing axes with unsqueeze"
                )
            return value.name
        if not isinstance(value, Const):
            return self.number(value)
        return self.constant(value, self.without_batch(value.tensor, like))

    def binary(self, func: str, a: Any, b: Any) -> str:
        """The name of a broadcast `func`; at least one operand is a Value."""
        like = a if isinstance(a, Value) else b
        return self.add("binary", self.operand(a, like), self.operand(b, like), func=func)

    def unary(self, func: str, x: Value | str, alpha: float = 0.0, beta: float = 0.0) -> str:
        """The name of an elementwise `func`."""
        used = {"alpha": float(alpha), "beta": float(beta)} if func == "clamp" else {"alpha": float(alpha)}
        return self.add("unary", x, func=func, **(used if func in ("clamp", "leaky_relu") else {}))

    def reduce(self, func: str, x: Value, dims: Any) -> str:
        """The name of `x` reduced over the torch axes `dims`, which are gone."""
        dims = range(x.rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        name = x.name
        for axis in sorted((self.axis(x, d) for d in dims), reverse=True):
            name = self.add("reduce", name, func=func, axis=axis)
        return name


# --- names and places -------------------------------------------------------------------------------------------------


def op_name(node: Any) -> str:
    """`aten.topk` for the overload `aten.topk.default`."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet) if packet is not None else str(getattr(node.target, "__name__", node.target))


def _symbolic(node: Any) -> bool:
    """Whether the node is a size or another number, not a tensor; operations read sizes from their result instead."""
    known = int | float | torch.SymInt | torch.SymFloat | torch.SymBool
    return isinstance(node.meta.get("val"), known)


def module_path(node: Any) -> str:
    """Dotted path of the module whose forward issued the node; "" for the outermost."""
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return next((path for path in reversed(stack) if not path.startswith("_")), "")


def explain(path: str, message: str, notes: Mapping[str, str]) -> str:
    """`path: message`, and what was found out about the blocks that contain the path."""
    about = [note for at, note in notes.items() if at in ("", path) or path.startswith(f"{at}.")]
    return "; ".join([f"{path or 'the module'}: {message}", *about])


def _text(sizes: Sequence[Any]) -> str:
    return f"({', '.join(map(str, sizes))})"


def _free_size(program: Any, size: Any) -> Any:
    """The symbol of a batch axis, or None where the program was only traced for some values of it."""
    symbol = size.node.expr if isinstance(size, torch.SymInt) else None
    if symbol is None or not symbol.is_Symbol:
        return None
    limits = program.range_constraints.get(symbol)
    if limits is not None and (limits.lower > 2 or limits.upper < 2**31):
        return None
    # What tracing took for granted, such as that x.shape[0] is not 5, must hold for every size.
    guards = [guard.expr for guard in size.node.shape_env.guards]
    sizes = {*range(2, 65), *(int(n) + d for g in guards for n in g.atoms() if n.is_Integer for d in (-1, 0, 1))}
    holds = all(g.subs(dict.fromkeys(g.free_symbols, n)) != False for g in guards for n in sizes if n >= 2)  # noqa: E712
    return symbol if holds else None


def _user_outputs(program: Any) -> list[Any]:
    (row,) = next(node for node in program.graph.nodes if node.op == "output").args
    outputs = []
    for node, spec in zip(row, program.graph_signature.output_specs, strict=True):
        if spec.kind.name == "USER_INPUT_MUTATION":
            continue  # the caller's copy; what the module returns is computed from the values written
        if spec.kind.name != "USER_OUTPUT":
            raise ExportError(f"the module changes {spec.target or node} while it runs; it must not keep state")
        if isinstance(node, torch.fx.Node):
            outputs.append(node)
    return outputs


def _leading_to(outputs: Sequence[Any]) -> set[Any]:
    """The nodes these outputs depend on; nothing else needs to be supported."""
    todo, live = list(outputs), set()
    while todo:
        node = todo.pop()
        if node not in live:
            live.add(node)
            todo += node.all_input_nodes
    return live


__all__ = ["WAY_OUT", "Const", "Converter", "MoeBody", "Value", "explain", "module_path", "op_name"]
