"""Random graphs for property tests: every operation, every router, random shapes."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from colibri.ir.graph import BINARY, REDUCE, UNARY, Graph, Router
from colibri.ir.weights import Fp16Weight, Int4Weight, Int8Weight, Outliers

ROUTERS = [("softmax", "none"), ("softmax", "sum"), ("softmax", "one"), ("sigmoid", "none"), ("sigmoid", "sum"),
           ("logit", "softmax"), ("logit", "one"), ("sqrt_softplus", "none"), ("softmax", "clamped"),
           ("sigmoid", "clamped"), ("sparse_mixer", "none")]  # fmt: skip


@st.composite
def routers(draw: st.DrawFn, most: int) -> Router:
    """Any router of up to `most` experts: every score, with and without all that a descriptor can say."""
    experts = draw(st.integers(1, most))
    score, normalize = draw(st.sampled_from(ROUTERS))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    more: dict[str, object] = {}
    size = experts
    if score != "sparse_mixer" and draw(st.booleans()):
        groups = draw(st.sampled_from([g for g in range(1, experts + 1) if experts % g == 0]))
        kept = draw(st.integers(1, groups))
        rule = draw(st.sampled_from(["max", "top2"] if experts // groups > 1 else ["max"]))
        more |= {"groups": groups, "kept_groups": kept, "group_rule": rule}
        size = kept * (experts // groups)
        if draw(st.booleans()):
            bias = rng.standard_normal(experts)
            bias[rng.random(experts) < 0.1] = -np.inf
            more["bias"] = tuple(bias)
    if normalize in ("sum", "clamped") or score == "sparse_mixer":
        more["epsilon"] = draw(st.sampled_from([0.0, 1e-20, 0.05, 1.0]))
    if draw(st.booleans()):
        more["expert_scale"] = tuple(rng.standard_normal(experts))
    more["capacity"] = draw(st.sampled_from([0, 0, 1, 2, 5]))
    more["apply"] = draw(st.sampled_from(["output", "output", "input"]))
    k = draw(st.integers(1, min(size, 8) if score == "sparse_mixer" else size))
    return Router(experts, k, score, normalize, draw(st.sampled_from([1.0, 2.5])), **more)  # type: ignore[arg-type]


def constant(graph: Graph, rng: np.random.Generator, name: str, *shape: int) -> str:
    return graph.add_constant(name, rng.standard_normal(shape) / np.sqrt(max(1, shape[-1])))


FORMATS = ("fp32", "fp16", "int8", "int8 weight-only", "int8 with outliers", "int4", "int4 with outliers")


def stored(rng: np.random.Generator, rows: int, cols: int, kind: str) -> object:
    """A random weight in a format: full range, zero rows, and outliers that crowd in some rows and miss others."""
    if kind in ("fp32", "fp16"):
        matrix = rng.standard_normal((rows, cols)) / np.sqrt(cols)
        return matrix if kind == "fp32" else Fp16Weight(matrix.astype(np.float16))
    outliers = None
    if "outliers" in kind:
        chosen = [np.sort(rng.permutation(cols)[: min(cols, int(rng.integers(0, 4)) ** 2)]) for _ in range(rows)]
        values = rng.standard_normal(sum(map(len, chosen))).astype(np.float16)
        counts = np.array([len(c) for c in chosen], np.uint32)
        outliers = Outliers(counts, np.concatenate(chosen).astype(np.uint32), values)
    if kind.startswith("int8"):
        q = rng.integers(-127, 128, (rows, cols)).astype(np.int8)
        q[rng.random(rows) < 0.1] = 0
        q[rng.random(rows) < 0.1] = 127
        return Int8Weight(q, (rng.random(rows) / 100).astype(np.float32), outliers)
    q = rng.integers(-8, 8, (rows, cols)).astype(np.int8)
    return Int4Weight(q, (rng.standard_normal((rows, -(-cols // 32))) / 10).astype(np.float16), outliers)


def every_byte(kind: str) -> object:
    """A weight of 256 columns that holds every number its format can: of float16 the finite ones."""
    turned = (np.arange(256)[None, :] + np.arange(256)[:, None]) % 256
    if kind == "fp16":
        patterns = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256).view(np.float16)
        return Fp16Weight(np.where(np.isfinite(patterns), patterns, np.float16(-0.0)))
    if kind.startswith("int8"):
        return Int8Weight((turned - 128).astype(np.int8), (2.0 ** -np.arange(256).astype(np.float32) / 3).clip(1e-40))
    scales = (np.arange(256 * 8) % 0x7C00).astype(np.uint16).reshape(256, 8) * 15 % 0x7C00
    return Int4Weight((turned % 16 - 8).astype(np.int8), scales.view(np.float16))


def linear(
    graph: Graph, rng: np.random.Generator, x: str, out: int, bias: bool, kind: str = "fp32", **attrs: object
) -> str:
    stem = graph.fresh("w")
    weight = graph.add_constant(stem, stored(rng, out, graph.shapes[x][-1], kind))
    extra = [constant(graph, rng, f"{stem}.bias", out)] if bias else []
    if kind == "int8 weight-only":
        attrs["activations"] = "float"
    return graph.add("linear", x, weight, *extra, **attrs)


def unary_attrs(func: str) -> dict[str, float]:
    return {"leaky_relu": {"alpha": 0.1}, "clamp": {"alpha": -0.5, "beta": 0.75}}.get(func, {})


def expert(seed: int, d_in: int, d_hidden: int, d_out: int, kind: int, fmt: str = "fp32") -> Graph:
    """One expert: 0 a plain MLP, 1 gated with a norm, 2 with a slice, a concat and a residual, 3 no weights at all, 4 a
    recurrence over its token's numbers."""
    rng = np.random.default_rng(seed)
    graph = Graph(f"expert{seed}")
    x = graph.add_input("x", (d_in,))
    if kind == 0:
        y = linear(graph, rng, linear(graph, rng, x, d_hidden, True, fmt, activation="gelu"), d_out, True, fmt)
    elif kind == 1:
        z = graph.add("rmsnorm", x, constant(graph, rng, "gamma", d_in), eps=1e-6)
        gate = graph.add("unary", linear(graph, rng, z, d_hidden, False, fmt), func="silu")
        up = linear(graph, rng, z, d_hidden, False, fmt)
        y = linear(graph, rng, graph.add("binary", gate, up, func="mul"), d_out, False, fmt)
    elif kind == 2:
        h = linear(graph, rng, x, d_hidden, True, fmt)
        left = graph.add("slice", h, axis=0, start=0, stop=max(1, d_hidden // 2), step=1)
        both = graph.add("concat", left, x, axis=0)
        y = linear(graph, rng, graph.add("softmax", both), d_out, True)
        y = graph.add("binary", y, constant(graph, rng, "shift", d_out), func="add")
    elif kind == 4:
        states = recurrence(graph, rng, graph.add("reshape", x, shape=(d_in, 1)), d_hidden, fmt, reverse=bool(seed % 2))
        y = linear(graph, rng, graph.add("reduce", states, func="max", axis=0), d_out, True, fmt)
    else:
        mean = graph.add("reduce", x, func="mean", axis=0)
        y = graph.add("expand", mean, shape=(d_out,))
    graph.outputs = [y]
    return graph


def recurrence(
    graph: Graph, rng: np.random.Generator, x: str, width: int, fmt: str = "fp32", reverse: bool = False,
    start: str = "",
) -> str:  # fmt: skip
    """s' = s + tanh(U x + V s) · clamp(s) over the steps of x (steps, n): all states (steps, width)."""
    state = graph.add("state", start or constant(graph, rng, graph.fresh("start"), width))
    now = linear(graph, rng, graph.add("step", x, state), width, True, fmt)
    moved = graph.add("binary", now, linear(graph, rng, state, width, False, fmt), func="add")
    gate = graph.add("unary", state, func="clamp", alpha=-0.5, beta=0.75)
    product = graph.add("binary", graph.add("unary", moved, func="tanh"), gate, func="mul")
    after = graph.add("binary", state, product, func="add")
    return graph.add("collect", after, state, steps=graph.shapes[x][0], reverse=reverse)


def add_moe(graph: Graph, draw: st.DrawFn, rng: np.random.Generator, x: str) -> str:
    router = draw(routers(9))
    experts = router.experts
    d_in = graph.shapes[x][-1]
    d_hidden, d_out = draw(st.integers(1, 20)), draw(st.sampled_from([d_in, d_in, 5]))
    kinds = draw(st.sampled_from([(0,), (1,), (2,), (3,), (4,), (0, 1)]))
    seed = draw(st.integers(0, 1 << 16))
    fmt = draw(st.sampled_from(FORMATS))
    body = [expert(seed + e, d_in, d_hidden, d_out, kinds[e % len(kinds)], fmt) for e in range(experts)]
    logits = linear(graph, rng, x, experts, draw(st.booleans()))
    return graph.add("moe", x, logits, router=router, experts=body)


def add_random(graph: Graph, draw: st.DrawFn, rng: np.random.Generator, values: list[str]) -> str:
    """One more node on values drawn from `values`."""
    x = draw(st.sampled_from(values))
    shape = graph.shapes[x]
    axis = draw(st.integers(0, len(shape) - 1))
    op = draw(st.sampled_from(["linear", "unary", "binary", "same", "softmax", "norm", "reduce", "reshape", "transpose",
                               "slice", "concat", "expand", "moe", "constant", "window", "matmul", "recurrence",
                               "embed"]))  # fmt: skip
    if op == "linear":
        return linear(graph, rng, x, draw(st.integers(1, 20)), draw(st.booleans()), draw(st.sampled_from(FORMATS)),
                      activation=draw(st.sampled_from([None, "relu", "tanh"])))  # fmt: skip
    if op == "unary":
        func = draw(st.sampled_from(UNARY))
        return graph.add("unary", x, func=func, **unary_attrs(func))
    if op == "binary":
        other = draw(st.sampled_from([v for v in values if _broadcasts(graph, x, v)]))
        return graph.add("binary", x, other, func=draw(st.sampled_from(BINARY)))
    if op == "same":
        return graph.add("binary", x, x, func=draw(st.sampled_from(BINARY)))
    if op == "constant":
        sizes = [draw(st.sampled_from([1, n])) for n in shape[axis:]]
        pair = [x, constant(graph, rng, graph.fresh("c"), *sizes)]
        return graph.add("binary", *draw(st.permutations(pair)), func=draw(st.sampled_from(BINARY)))
    if op == "softmax":
        return graph.add("softmax", x)
    if op == "norm":
        names = [constant(graph, rng, graph.fresh("g"), shape[-1]) for _ in range(draw(st.integers(0, 2)))]
        return graph.add(draw(st.sampled_from(["layernorm", "rmsnorm"])), x, *names, eps=1e-5)
    if op == "reduce" and len(shape) > 1:
        return graph.add("reduce", x, func=draw(st.sampled_from(REDUCE)), axis=axis)
    if op == "reshape":
        split = next((n for n in (2, 3, 5) if shape[axis] % n == 0 and shape[axis] > n), 1)
        merged = (*shape[:axis], shape[axis] // split, split, *shape[axis + 1 :])
        return graph.add("reshape", x, shape=draw(st.sampled_from([merged, (int(np.prod(shape)),)]))[:6])
    if op == "transpose":
        return graph.add("transpose", x, perm=tuple(draw(st.permutations(range(len(shape))))))
    if op == "slice":
        start = draw(st.integers(0, shape[axis] - 1))
        return graph.add("slice", x, axis=axis, start=start, stop=draw(st.integers(start + 1, shape[axis])),
                         step=draw(st.integers(1, 3)))  # fmt: skip
    if op == "concat":
        fitting = [x, *(v for v in values if _beside(graph, x, v, axis))]
        return graph.add("concat", x, *draw(st.lists(st.sampled_from(fitting), max_size=2)), axis=axis)
    if op == "expand" and len(shape) < 4:
        return graph.add("expand", x, shape=(draw(st.integers(1, 3)), *shape))
    if op == "moe":
        return add_moe(graph, draw, rng, x)
    if op == "window":
        dilation, n = draw(st.integers(1, 3)), shape[axis]
        size = draw(st.integers(1, (n - 1) // dilation + 1))
        return graph.add("window", x, axis=axis, size=size, step=draw(st.integers(1, 3)), dilation=dilation)
    if op == "matmul" and len(shape) > 1:
        other = draw(st.sampled_from([v for v in values if graph.shapes[v] == shape]))
        turned = graph.add("transpose", other, perm=(*range(len(shape) - 2), len(shape) - 1, len(shape) - 2))
        return graph.add("matmul", *draw(st.sampled_from([(x, turned), (turned, x)])))
    if op == "recurrence" and len(shape) == 2:
        fmt, reverse = draw(st.sampled_from(FORMATS)), draw(st.booleans())
        starts = [v for v in values if len(graph.shapes[v]) == 1]
        start = draw(st.sampled_from(["", *starts]))
        width = graph.shapes[start][0] if start else draw(st.integers(1, 12))
        return recurrence(graph, rng, x, width, fmt, reverse, start)
    if op == "embed":
        ids = graph.add("unary", graph.add("unary", x, func="abs"), func="clamp", alpha=0, beta=draw(st.integers(1, 6)))
        kind = draw(st.sampled_from([f for f in FORMATS if "outliers" not in f and "only" not in f]))
        table = graph.add_constant(graph.fresh("table"), stored(rng, 6, draw(st.integers(1, 9)), kind))
        return graph.add("embed", graph.add("reshape", ids, shape=(*shape, 1)), table)
    return x


def _broadcasts(graph: Graph, a: str, b: str) -> bool:
    try:
        return len(np.broadcast_shapes(graph.shapes[a], graph.shapes[b])) <= 5
    except ValueError:
        return False


def _beside(graph: Graph, a: str, b: str, axis: int) -> bool:
    s, t = graph.shapes[a], graph.shapes[b]
    return len(s) == len(t) and s[:axis] == t[:axis] and s[axis + 1 :] == t[axis + 1 :] and t[axis] < 200


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A random graph of up to ten nodes with one or two inputs and one to three outputs."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    graph = Graph("random")
    values = [graph.add_input(f"x{n}", tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))))
              for n in range(draw(st.integers(1, 2)))]  # fmt: skip
    for _ in range(draw(st.integers(1, 10))):
        value = add_random(graph, draw, rng, values)
        if value not in values and np.prod(graph.shapes[value]) <= 4000 and len(graph.shapes[value]) <= 5:
            values.append(value)
    graph.outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    graph.outputs[0] = values[-1]
    return graph
