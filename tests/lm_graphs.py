"""Small random language models, made of graph operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from colibri.ir.graph import Graph, Router
from colibri.ir.weights import Weight


def rope_table(context: int, turned: int, theta: float = 100.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Cosines, then sines, (context, turned)."""
    angles = np.arange(context)[:, None] * theta ** (-np.arange(turned // 2) * 2 / turned)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def language_model(
    seed: int = 0,
    *,
    context: int = 200,
    vocab: int = 40,
    width: int = 16,
    heads: int = 4,
    kv: int = 2,
    key: int = 8,
    value: int = 8,
    window: int = 0,
    sinks: bool = False,
    softcap: float = 0.0,
    cache: str = "fp32",
    layers: int = 2,
    delay: int = 0,
    delta: bool = False,
    encode: Any = None,
) -> Graph:
    """A decoder with a router in each layer; `delta`: with linear attention before each attention, too.

    `encode` turns matrices into stored weights.
    """
    rng = np.random.default_rng(seed)
    store = encode or (lambda matrix: matrix)

    def normal(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return rng.normal(0, 1 / np.sqrt(shape[-1]), shape).astype(np.float32)

    def matrix(*shape: int) -> Weight:
        return store(normal(*shape))

    g = Graph("lm", context=context)
    table = g.add_constant("embedding", store(rng.normal(0, 1, (vocab, width)).astype(np.float32)))
    turn = g.add_constant("rope", rope_table(context, min(key, 4)))
    x = g.add("embed", g.add_input("token", (1,)), table, output="embedded")
    for n in range(layers):
        h = g.add("rmsnorm", x, g.add_constant(f"{n}.norm", 1 + normal(width) * 0.1), eps=1e-5)
        if delay:
            h = g.add("binary", h, g.add("delay", h, steps=delay), func="add")
        if delta:
            x = g.add("binary", x, linear_attention(g, rng, h, heads, kv, key, value), func="add")
            h = g.add("rmsnorm", x, g.add_constant(f"{n}.norm1", 1 + normal(width) * 0.1), eps=1e-5)
        parts = []
        for name, count, size in (("q", heads, key), ("k", kv, key), ("v", kv, value)):
            p = g.add("linear", h, g.add_constant(f"{n}.{name}", matrix(count * size, width)))
            p = g.add("reshape", p, shape=(count, size))
            parts.append(g.add("rope", p, turn) if name != "v" else p)
        if sinks:
            parts.append(g.add_constant(f"{n}.sinks", normal(heads)))
        a = g.add("attention", *parts, scale=key**-0.5, window=window, softcap=softcap, cache=cache)
        a = g.add("reshape", a, shape=(heads * value,))
        x = g.add("binary", x, g.add("linear", a, g.add_constant(f"{n}.o", matrix(width, heads * value))), func="add")
        h = g.add("rmsnorm", x, g.add_constant(f"{n}.norm2", 1 + normal(width) * 0.1), eps=1e-5)
        logits = g.add("linear", h, g.add_constant(f"{n}.router", normal(4, width) * 3))
        experts = []
        for e in range(4):
            body = Graph(f"{n}.{e}")
            t = body.add_input("x", (width,))
            gate = body.add("linear", t, body.add_constant("gate", matrix(12, width)), activation="silu")
            up = body.add("linear", t, body.add_constant("up", matrix(12, width)))
            both = body.add("binary", gate, up, func="mul")
            body.outputs = [body.add("linear", both, body.add_constant("down", matrix(width, 12)))]
            experts.append(body)
        y = g.add("moe", h, logits, router=Router(4, 2, "logit", "softmax"), experts=experts)
        x = g.add("binary", x, y, func="add")
    x = g.add("rmsnorm", x, g.add_constant("norm", 1 + normal(width) * 0.1), eps=1e-5)
    g.outputs = [g.add("linear", x, g.add_constant("head", matrix(vocab, width)), output="logits")]
    return g


def linear_attention(g: Graph, rng: np.random.Generator, x: str, heads: int, kv: int, key: int, value: int) -> str:
    """The gated delta rule on projections of x, with queries and keys of length one, as Qwen3-Next has it."""

    def project(out: int) -> str:
        width = g.shapes[x][0]
        matrix = (rng.normal(0, 1 / np.sqrt(width), (out, width))).astype(np.float32)
        return g.add("linear", x, g.add_constant("w", matrix))

    def unit(rows: str) -> str:
        squares = g.add("reduce", g.add("unary", rows, func="square"), func="sum", axis=1)
        length = g.add("binary", squares, g.add_constant("eps", 1e-6), func="add")
        return g.add("binary", rows, g.add("reshape", g.add("unary", length, func="rsqrt"), shape=(kv, 1)), func="mul")

    q, k = (unit(g.add("reshape", project(kv * key), shape=(kv, key))) for _ in range(2))
    v = g.add("reshape", project(heads * value), shape=(heads, value))
    decay = g.add("unary", g.add("unary", project(heads), func="softplus"), func="neg")
    beta = g.add("unary", project(heads), func="sigmoid")
    y = g.add("delta", q, k, v, decay, beta, scale=key**-0.5)
    out = rng.normal(0, 1 / np.sqrt(heads * value), (g.shapes[x][0], heads * value)).astype(np.float32)
    return g.add("linear", g.add("reshape", y, shape=(heads * value,)), g.add_constant("w", out))


def encoder_decoder(
    seed: int = 0,
    *,
    context: int = 200,
    vocab: int = 40,
    width: int = 16,
    heads: int = 3,
    dim: int = 8,
    cache: str = "fp32",
    layers: int = 1,
    capacity: int = 0,
    biases: bool = True,
    encode: Any = None,
) -> Graph:
    """An encoder and a decoder with a mixture in each layer; the encoder's experts have a capacity."""
    rng = np.random.default_rng(seed)
    store = encode or (lambda matrix: matrix)
    g = Graph("exchange", context=context, start=1)

    def normal(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return rng.normal(0, 1 / np.sqrt(shape[-1]), shape).astype(np.float32)

    def linear(x: str, out: int, into: Graph = g) -> str:
        return into.add("linear", x, into.add_constant("w", store(normal(out, into.shapes[x][-1]))))

    def rows(x: str) -> str:
        return g.add("reshape", linear(x, heads * dim), shape=(heads, dim))

    def attend(x: str, k: str, v: str, mask: str, *bias: str) -> str:
        y = g.add("attention", rows(x), k, v, *bias, scale=dim**-0.5, window=0, softcap=0.0, cache=cache, mask=mask)
        return g.add("binary", x, linear(g.add("reshape", y, shape=(heads * dim,)), width), func="add")

    def switch(x: str, most: int) -> str:
        x = g.add("rmsnorm", x, g.add_constant("norm", 1 + normal(width) * 0.1), eps=1e-5)
        experts = []
        for e in range(4):
            body = Graph(f"expert{e}")
            h = body.add("unary", linear(body.add_input("x", (width,)), 12, body), func="relu")
            body.outputs = [linear(h, width, body)]
            experts.append(body)
        logits = g.add("linear", x, g.add_constant("router", normal(4, width) * 3))
        return g.add(
            "binary", x, g.add("moe", x, logits, router=Router(4, 1, capacity=most), experts=experts), func="add"
        )

    def bias(name: str, distances: int) -> list[str]:
        return [g.add_constant(name, normal(heads, distances) * 9)] if biases else []

    token = g.add_input("token", (1,))
    table = g.add_constant("embedding", store(rng.normal(0, 1, (vocab, width)).astype(np.float32)))
    x = g.add("embed", token, table)
    both, past = bias("both", 2 * context - 1), bias("past", context)
    for _ in range(layers):
        x = switch(attend(x, rows(x), rows(x), "full", *both), capacity)
    seen = [(rows(x), rows(x)) for _ in range(layers)]
    y = g.add("embed", token, table)
    for n in range(layers):
        y = switch(attend(attend(y, rows(y), rows(y), "causal", *past), *seen[n], "cross"), 0)
    g.outputs = [g.add("linear", y, g.add_constant("head", store(normal(vocab, width))), output="logits")]
    return g
