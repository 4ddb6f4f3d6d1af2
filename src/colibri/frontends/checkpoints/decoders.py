"""Parts of decoder language models, and the graph made of them and a checkpoint's tensors.

A `Decoder` says what a model is: for each layer how positions are mixed (`Heads`, `Latent`, `Convolution`) and what
follows (`Dense`, `Mixture`). Names of tensors are relative to their layer. `build` reads the tensors a plan names, each
of exactly the shape the plan implies; weights of linears stay in the file until they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from colibri.errors import ExportError
from colibri.frontends.checkpoints.checkpoint import Checkpoint, Stored
from colibri.ir.graph import Array, Graph, Router
from colibri.ir.weights import Deferred

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "relu": "relu",
}  # fmt: skip
GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Heads:
    """Attention whose query heads share key and value heads in groups.

    `norm`: RMSNorm of each `head` or of the `whole` projection, by the tensors `norms`, before the positions turn the
    rows or after them; `l2` is the norm without a weight, after them. `interleaved`: the checkpoint's pairs are
    neighbours. `stretch` (positions,) multiplies queries by a number for each position.
    """

    heads: int
    kv: int
    dim: int
    scale: float
    window: int = 0
    bias: bool = False
    out_bias: bool = False
    norm: str = ""
    norms: tuple[str, str] = ("q_norm", "k_norm")
    norm_last: bool = False
    clip: float | None = None
    sinks: bool = False
    table: Array | None = None
    interleaved: bool = False
    stretch: Array | None = None
    out: str = "o_proj"


@dataclass(frozen=True)
class Latent:
    """Attention over compressed keys and values (DeepSeek-V2), kept compressed in the cache."""

    heads: int
    rank: int
    nope: int
    rope: int
    value: int
    scale: float
    query_rank: int | None
    bias: bool
    table: Array
    interleaved: bool


@dataclass(frozen=True)
class Convolution:
    """A gated convolution over the last `taps` positions, depthwise (LFM2)."""

    taps: int
    bias: bool


@dataclass(frozen=True)
class Dense:
    """down(act(gate x) · up x), by the tensors `names` of `block`."""

    width: int
    block: str = "mlp"
    names: tuple[str, str, str] = GATED
    bias: bool = False


@dataclass(frozen=True)
class Separate:
    """Experts with a tensor for each matrix; `{e}` is the expert's number."""

    block: str
    names: tuple[str, str, str] = GATED

    @property
    def first(self) -> str:
        """A tensor there is if experts are stored so."""
        return f"{self.block}.0.{self.names[0]}.weight"


@dataclass(frozen=True)
class Stacked:
    """Experts in one tensor with their gate and up rows one after the other, or alternating; perhaps (in, out)."""

    both: str
    down: str
    transposed: bool = False
    alternating: bool = False
    bias: bool = False

    @property
    def first(self) -> str:
        """A tensor there is if experts are stored so."""
        return self.both


@dataclass(frozen=True)
class Mixture:
    """Experts of `width`, chosen by `router` from the logits of the tensor `gate`, and what is added to their mixture.

    `router` takes the selection bias, the tensor `bias` of shape (count,) or with a one before it. Names in `gate` and
    `bias` and ways in `experts` are alternatives. `clamped` (GPT-OSS): (limit, slope). `shared_gate` names a row
    whose sigmoid multiplies the shared expert.
    """

    router: Callable[[Array | None], Router]
    count: int
    width: int
    gate: tuple[str, ...]
    experts: tuple[Separate | Stacked, ...]
    gate_bias: bool = False
    bias: tuple[str, ...] = ()
    bias_rank: int = 1
    shared: Dense | None = None
    shared_gate: str = ""
    clamped: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Around:
    """What is around a model's layers, and alike in all of them. A factor of 1 is left out."""

    vocabulary: int
    hidden: int
    eps: float
    activation: str = "silu"
    tied: bool = False
    norm: str = "rmsnorm"
    head_bias: bool = False
    residual_factor: float = 1.0
    ignored: Sequence[str] = field(default=())


Kind = TypeVar("Kind", bound=Around)


@dataclass(frozen=True, kw_only=True)
class Decoder(Around):
    """A decoder: what its layers are, and what is around them. Factors of 1 are left out."""

    layers: int
    mixer: Callable[[int], Heads | Latent | Convolution]
    feed: Callable[[int], Dense | Mixture]
    norms: tuple[str, str, str] = ("input_layernorm", "post_attention_layernorm", "norm")
    embedding_factor: float = 1.0
    logits_divisor: float = 1.0
    prefix: str = ""


def build(name: str, plan: Decoder, checkpoint: Checkpoint, context: int, cache: str) -> Graph:
    """The graph of one token: its id to the logits of the next. Raises ExportError for what does not fit the plan."""
    return _DecoderGraph(name, plan, checkpoint, context, cache).whole()


class Builder(Generic[Kind]):
    """A graph in the making, and the small parts that all models have."""

    def __init__(self, name: str, plan: Kind, checkpoint: Checkpoint, context: int, cache: str) -> None:
        self.plan, self.checkpoint, self.cache = plan, checkpoint, cache
        self.graph = Graph(name, context=context)
        self.at = ""  # what tensors of the layer being built begin with
        self.count = 0

    def add(self, op: str, *inputs: str, output: str | None = None, **attrs: Any) -> str:
        """A node, its value named by the layer; a name is not searched for, for there are tens of thousands."""
        self.count += 1
        return self.graph.add(op, *inputs, output=output or f"{self.at}{op}_{self.count}", **attrs)

    def take(self, name: str, *shape: int) -> Stored:
        return self.checkpoint.take(self.at + name, shape)

    def vector(self, name: str, width: int, order: Array | None = None) -> str:
        """A bias or the weight of a norm: small, and read at once."""
        found = self.take(name, width).read()
        return self.graph.add_constant(self.at + name, found if order is None else found[order])

    def matrix(self, name: str, rows: int, columns: int, bias: bool = False, order: Any = None) -> list[str]:
        """The constants of a linear, rows perhaps in another order than stored."""
        stored = self.take(f"{name}.weight", rows, columns)
        weight = stored.part(stored.shape, then=None if order is None else lambda found: found[order])
        return [self.graph.add_constant(stored.name, weight),
                *([self.vector(f"{name}.bias", rows, order)] if bias else [])]  # fmt: skip

    def linear(self, x: str, name: str, rows: int, bias: bool = False, order: Any = None) -> str:
        return self.add("linear", x, *self.matrix(name, rows, self.graph.shapes[x][-1], bias, order))

    def number(self, name: str, value: float) -> str:
        return self.graph.add_constant(name, np.array([value], np.float32))

    def scaled(self, x: str, by: float, name: str) -> str:
        return x if by == 1 else self.add("binary", x, self.number(name, by), func="mul")

    def residual(self, h: str, x: str) -> str:
        return self.add("binary", h, self.scaled(x, self.plan.residual_factor, "residual_multiplier"), func="add")

    def normed(self, x: str, name: str, eps: float | None = None) -> str:
        kind, width = self.plan.norm, self.graph.shapes[x][-1]
        parts = [self.vector(f"{name}.weight", width)]
        if kind == "layernorm":
            parts.append(self.vector(f"{name}.bias", width))
        return self.add(kind, x, *parts, eps=self.plan.eps if eps is None else eps)

    def part(self, x: str, start: int, stop: int, axis: int = 0) -> str:
        return self.add("slice", x, axis=axis, start=start, stop=stop, step=1)

    def shaped(self, x: str, *shape: int) -> str:
        return self.add("reshape", x, shape=shape)

    def output(self, embedding: str) -> list[str]:
        """The matrix of the logits, and its bias."""
        plan, name = self.plan, f"{self.at}lm_head.weight"
        if not plan.tied:
            return self.matrix("lm_head", plan.vocabulary, plan.hidden, plan.head_bias)
        self.same(name, embedding)
        return [embedding, *([self.vector("lm_head.bias", plan.vocabulary)] if plan.head_bias else [])]

    def table(self, name: str) -> str:
        """An embedding, by the whole name of its tensor."""
        stored = self.checkpoint.take(name, (self.plan.vocabulary, self.plan.hidden))
        return self.graph.add_constant(stored.name, stored.part(stored.shape))

    def same(self, name: str, embedding: str) -> None:
        """Where a tensor that is tied to the embedding is stored too, it must be the same."""
        if name in self.checkpoint:
            self.checkpoint.take(name, (self.plan.vocabulary, self.plan.hidden))
            if not self.checkpoint.equal(name, embedding):
                raise ExportError(
                    f"tensor {name!r} differs from the embedding it is tied to: set tie_word_embeddings to false in "
                    "config.json if it is what the model was trained with, else remove it"
                )


class _DecoderGraph(Builder[Decoder]):
    def whole(self) -> Graph:
        plan, graph, root = self.plan, self.graph, f"{self.plan.prefix}model."
        token = graph.add_input("token", (1,))
        embedding = self.table(f"{root}embed_tokens.weight")
        h = self.scaled(self.add("embed", token, embedding), plan.embedding_factor, "embedding_multiplier")
        for n in range(plan.layers):
            self.at = f"{root}layers.{n}."
            mixer, feed = plan.mixer(n), plan.feed(n)
            mix = {Heads: self.heads, Latent: self.latent, Convolution: self.convolution}[type(mixer)]
            h = self.residual(h, mix(mixer, self.normed(h, plan.norms[0])))  # type: ignore[operator]
            x = self.normed(h, plan.norms[1])
            h = self.residual(h, self.mixture(feed, x) if isinstance(feed, Mixture) else self.dense(feed, x))
        self.at = root
        h = self.normed(h, plan.norms[2])
        self.at = plan.prefix
        last = plan.logits_divisor == 1
        logits = self.add("linear", h, *self.output(embedding), output="logits" if last else None)
        if not last:
            divisor = self.number("logits_scaling", plan.logits_divisor)
            logits = self.add("binary", logits, divisor, func="div", output="logits")
        graph.outputs = [logits]
        self.checkpoint.finish(plan.ignored)
        graph.validate()
        return graph

    def turned(self, x: str, table: Array, name: str = "rotary") -> str:
        return self.add("rope", x, self.graph.add_constant(name, table))

    # --- positions ----------------------------------------------------------------------------------------------------

    def heads(self, a: Heads, x: str) -> str:
        block = "self_attn."
        rows: dict[str, str] = {}
        for n, (part, count) in enumerate((("q", a.heads), ("k", a.kv), ("v", a.kv))):
            turns = a.table is not None and part != "v"
            inner = pairs_apart(a.dim, a.table.shape[1]) if turns and a.interleaved and a.table is not None else None
            order = None if inner is None else (np.arange(count)[:, None] * a.dim + inner).reshape(-1)
            y = self.linear(x, f"{block}{part}_proj", count * a.dim, a.bias, order)
            if a.norm == "whole" and part != "v":
                y = self.normed(y, block + a.norms[n])
            if a.clip is not None:
                y = self.add("unary", y, func="clamp", alpha=-a.clip, beta=a.clip)
            y = self.shaped(y, count, a.dim)
            if part != "v":
                y = self.normed(y, block + a.norms[n]) if a.norm == "head" and not a.norm_last else y
                y = y if a.table is None else self.turned(y, a.table)
                y = self.normed(y, block + a.norms[n]) if a.norm == "head" and a.norm_last else y
                y = self.add("rmsnorm", y, eps=self.plan.eps) if a.norm == "l2" else y
            if part == "q" and a.stretch is not None:
                # Turning by an angle of zero, with "cosines" other than one, is a factor for each position.
                wide = np.repeat(a.stretch[:, None], a.dim // 2, axis=1).astype(np.float32)
                y = self.turned(y, np.concatenate([wide, np.zeros_like(wide)], axis=1), "stretch")
            rows[part] = y
        more = [self.vector(f"{block}sinks", a.heads)] if a.sinks else []
        # The context may grow later, as far as the table goes; beyond all of it a window hides nothing.
        window = a.window if a.table is None or a.window < len(a.table) else 0
        y = self.add("attention", rows["q"], rows["k"], rows["v"], *more, scale=a.scale, window=window, softcap=0.0,
                      cache=self.cache)  # fmt: skip
        return self.linear(self.shaped(y, a.heads * a.dim), block + a.out, self.plan.hidden, a.out_bias)

    def latent(self, a: Latent, x: str) -> str:
        """Scores q·(W_k c) are (W_kᵀ q)·c, so that keys are what is cached anyway: c, and the part that is turned."""
        graph, block = self.graph, "self_attn."
        inner = pairs_apart(a.rope, a.rope) if a.interleaved else np.arange(a.rope)
        starts = np.arange(a.heads)[:, None] * (a.nope + a.rope)
        plain = (starts + np.arange(a.nope)).reshape(-1)
        order = np.concatenate([plain, (starts + a.nope + inner).reshape(-1)])
        queries, name = x, f"{block}q_proj"
        if a.query_rank is not None:
            queries = self.linear(x, f"{block}q_a_proj", a.query_rank, a.bias)
            queries, name = self.normed(queries, f"{block}q_a_layernorm", 1e-6), f"{block}q_b_proj"
        q = self.linear(queries, name, len(order), order=order)
        both = self.linear(x, f"{block}kv_a_proj_with_mqa", a.rank + a.rope, a.bias,
                           np.concatenate([np.arange(a.rank), a.rank + inner]))  # fmt: skip
        c = self.shaped(self.normed(self.part(both, 0, a.rank), f"{block}kv_a_layernorm", 1e-6), 1, a.rank)
        k_turned = self.turned(self.shaped(self.part(both, a.rank, a.rank + a.rope), 1, a.rope), a.table)
        q_turned = self.turned(self.shaped(self.part(q, len(plain), len(order)), a.heads, a.rope), a.table)
        step = a.nope + a.value
        expand = self.take(f"{block}kv_b_proj.weight", a.heads * step, a.rank)
        seen = []
        for h in range(a.heads):
            back = expand.part((a.rank, a.nope), h * step, h * step + a.nope, lambda found: found.T)
            weight = graph.add_constant(f"{expand.name}.k{h}", back)
            seen.append(self.add("linear", self.part(q, h * a.nope, (h + 1) * a.nope), weight))
        q = self.add("concat", self.shaped(self.joined(seen), a.heads, a.rank), q_turned, axis=1)
        y = self.add("attention", q, self.add("concat", c, k_turned, axis=1), c, scale=a.scale, window=0, softcap=0.0,
                      cache=self.cache)  # fmt: skip
        out = []
        for h in range(a.heads):
            values = expand.part((a.value, a.rank), h * step + a.nope, (h + 1) * step)
            weight = graph.add_constant(f"{expand.name}.v{h}", values)
            out.append(self.add("linear", self.shaped(self.part(y, h, h + 1), a.rank), weight))
        return self.linear(self.joined(out), f"{block}o_proj", self.plan.hidden, a.bias)

    def joined(self, parts: list[str]) -> str:
        return self.add("concat", *parts, axis=0)

    def convolution(self, a: Convolution, x: str) -> str:
        graph, width = self.graph, self.plan.hidden
        both = self.linear(x, "conv.in_proj", 3 * width, a.bias)
        before, after, value = (self.part(both, n * width, (n + 1) * width) for n in range(3))
        seen = self.add("binary", before, value, func="mul")
        taps = self.take("conv.conv.weight", width, 1, a.taps).read()[:, 0]
        total = ""
        for n in range(a.taps):  # the last tap is for the position itself
            seen = self.add("delay", seen, steps=1) if n else seen
            tap = graph.add_constant(f"{self.at}conv.conv.weight.{n}", taps[:, a.taps - 1 - n])
            term = self.add("binary", seen, tap, func="mul")
            total = self.add("binary", total, term, func="add") if n else term
        if a.bias:
            total = self.add("binary", total, self.vector("conv.conv.bias", width), func="add")
        return self.linear(self.add("binary", after, total, func="mul"), "conv.out_proj", width, a.bias)

    # --- feed-forward -------------------------------------------------------------------------------------------------

    def dense(self, d: Dense, x: str) -> str:
        gate, up, down = (f"{d.block}.{name}" for name in d.names)
        acted = self.add("unary", self.linear(x, gate, d.width, d.bias), func=self.plan.activation)
        both = self.add("binary", acted, self.linear(x, up, d.width, d.bias), func="mul")
        return self.linear(both, down, self.plan.hidden, d.bias)

    def mixture(self, m: Mixture, x: str) -> str:
        gate = self.found(*m.gate)
        logits = self.linear(x, gate.removesuffix(".weight"), m.count, m.gate_bias)
        bias = None
        if m.bias:
            bias = self.take(self.found(*m.bias), *(1,) * (m.bias_rank - 1), m.count).read().reshape(-1)
        router = m.router(bias)
        bodies = [self.expert(m, e, *matrices) for e, matrices in enumerate(self.experts(m, self.plan.hidden))]
        y = self.add("moe", x, logits, router=router, experts=bodies)
        if m.shared is None:
            return y
        shared = self.dense(m.shared, x)
        if m.shared_gate:
            open_ = self.add("unary", self.linear(x, m.shared_gate, 1), func="sigmoid")
            shared = self.add("binary", shared, open_, func="mul")
        return self.add("binary", y, shared, func="add")

    def found(self, *names: str) -> str:
        return self.checkpoint.either(*(self.at + name for name in names)).removeprefix(self.at)

    def experts(self, m: Mixture, hidden: int) -> list[tuple[Matrix, Matrix, Matrix]]:
        """Gate, up and down of every expert."""
        first = self.found(*(way.first for way in m.experts))
        way = next(way for way in m.experts if way.first == first)
        shapes = ((m.width, hidden), (m.width, hidden), (hidden, m.width))
        if isinstance(way, Separate):
            return [
                tuple(  # type: ignore[misc]
                    Matrix(stored.name, stored.part(shape))
                    for name, shape in zip(way.names, shapes, strict=True)
                    for stored in (self.take(f"{way.block}.{e}.{name}.weight", *shape),)
                )
                for e in range(m.count)
            ]
        return self.stacked(m, way, hidden)

    def stacked(self, m: Mixture, way: Stacked, hidden: int) -> list[tuple[Matrix, Matrix, Matrix]]:
        count, width = m.count, m.width
        name = self.at + way.both
        # MXFP4 lies (out, in) where the same tensor in floats lies (in, out).
        packed = name in self.checkpoint and self.checkpoint.tensors[name].kind == "MXFP4"
        turn = way.transposed and not packed

        def shape(rows: int, columns: int) -> tuple[int, int, int]:
            return (count, columns, rows) if turn else (count, rows, columns)

        both = self.take(way.both, *shape(2 * width, hidden))
        down = self.take(way.down, *shape(hidden, width))
        biases: list[Array | None] = [None, None]
        if way.bias:
            biases = [self.take(f"{way.both}_bias", count, 2 * width).read(),
                      self.take(f"{way.down}_bias", count, hidden).read()]  # fmt: skip
        rows = (slice(0, None, 2), slice(1, None, 2)) if way.alternating else (slice(0, width), slice(width, None))

        def matrix(stored: Stored, e: int, part: slice, bias: Array | None, *shape: int) -> Matrix:
            def of(found: Array) -> Array:
                rows: Array = (found[0].T if turn else found[0])[part]
                return rows

            return Matrix(
                f"{stored.name}.{e}", stored.part(shape, e, e + 1, of), None if bias is None else bias[e][part]
            )

        return [
            (
                matrix(both, e, rows[0], biases[0], width, hidden),
                matrix(both, e, rows[1], biases[0], width, hidden),
                matrix(down, e, slice(None), biases[1], hidden, width),
            )
            for e in range(count)
        ]

    def expert(self, m: Mixture, e: int, gate: Matrix, up: Matrix, down: Matrix) -> Graph:
        graph = Graph(f"{self.at}expert{e}")
        x = graph.add_input("x", (self.plan.hidden,))

        def linear(x: str, part: str, matrix: Matrix) -> str:
            bias = [] if matrix.bias is None else [graph.add_constant(f"{part}.bias", matrix.bias)]
            return graph.add("linear", x, graph.add_constant(f"{part}.{matrix.name}", matrix.weight), *bias)

        a, b = linear(x, "gate", gate), linear(x, "up", up)
        if m.clamped is None:
            a = graph.add("unary", a, func=self.plan.activation)
        else:
            limit, slope, one = (
                graph.add_constant(name, np.array([value], np.float32))
                for name, value in (("limit", m.clamped[0]), ("slope", m.clamped[1]), ("one", 1.0))
            )
            a = graph.add("binary", a, limit, func="minimum")
            b = graph.add("unary", b, func="clamp", alpha=-m.clamped[0], beta=m.clamped[0])
            open_ = graph.add("unary", graph.add("binary", a, slope, func="mul"), func="sigmoid")
            a = graph.add("binary", a, open_, func="mul")
            b = graph.add("binary", b, one, func="add")
        graph.outputs = [linear(graph.add("binary", a, b, func="mul"), "down", down)]
        return graph


@dataclass(frozen=True)
class Matrix:
    """The weight of a linear of an expert."""

    name: str
    weight: Deferred
    bias: Array | None = None


def pairs_apart(dim: int, turned: int) -> Any:
    """The order in which neighbouring pairs of the first `turned` of `dim` rows become (i, i + half)."""
    return np.concatenate([np.arange(0, turned, 2), np.arange(1, turned, 2), np.arange(turned, dim)])
