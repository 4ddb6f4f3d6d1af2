"""Routing in C is the reference's to the last bit, for every descriptor and for logits as bad as they come.

Logits are an input of these graphs, and expert e answers 1 in place e alone: the output is the weights themselves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri import exporter
from colibri.ir.graph import Graph, Router
from colibri.reference import ops
from colibri.reference.interpreter import Trace, run
from colibri.runtime import engine
from colibri.runtime.engine import KERNELS
from tests.graphs import expert, linear, routers

Array = np.ndarray[Any, Any]
RANDOM = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])


def weights_graph(router: Router, tokens: int = 1) -> Graph:
    """(tokens, experts) logits to (tokens, experts) weights, zero where an expert was not chosen."""
    graph = Graph("weights")
    one, logits = graph.add_input("one", (tokens, 1)), graph.add_input("logits", (tokens, router.experts))
    bodies = []
    for row in np.eye(router.experts, dtype=np.float32):
        body = Graph("expert")
        body.outputs = [body.add("linear", body.add_input("x", (1,)), body.add_constant("w", row[:, None]))]
        bodies.append(body)
    graph.outputs = [graph.add("moe", one, logits, router=router, experts=bodies)]
    return graph


def ask(model: engine.Model, logits: Array) -> Array:
    """The weights (samples, tokens, experts) an engine gives for logits of that shape."""
    y = model(np.ones((*logits.shape[:2], 1), np.float32), logits)
    assert isinstance(y, np.ndarray)
    return y


def reference(graph: Graph, logits: Array) -> tuple[Array, Array]:
    """The weights and the choices (samples, tokens, k) of the reference."""
    trace = Trace()
    y = run(graph, [np.ones((*logits.shape[:2], 1), np.float32), logits], trace)[0]
    return y, trace.routes[0]


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, 3e38, -3e38, 88.7, -104.0], np.float32)


@st.composite
def bad_logits(draw: st.DrawFn, experts: int) -> Array:
    """Logits full of ties, NaN, infinities and extremes, (samples, tokens, experts)."""
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 5)), experts)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    logits = rng.standard_normal(shape) * draw(st.sampled_from([0.5, 3.0, 60.0]))
    step = draw(st.sampled_from([0.0, 0.5, 4.0, 1e9]))
    if step:
        logits = np.round(logits / step) * step  # with 1e9 all are equal
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    logits = np.where(rng.random(shape) < share, rng.choice(SPECIAL, shape), logits)
    if draw(st.booleans()):
        logits[rng.random(shape[:2]) < 0.3] = rng.choice(SPECIAL)  # a row that is one value throughout
    return np.asarray(logits, np.float32)


@st.composite
def extreme_routers(draw: st.DrawFn) -> Router:
    """Any router, its bias sometimes of infinities and ties only, its k sometimes all experts there are."""
    router = draw(routers(12))
    values = [draw(st.sampled_from([-np.inf, -np.inf, np.inf, 0.0, -2.0])) for _ in range(router.experts)]
    bias = draw(st.sampled_from([router.bias, (-np.inf,) * router.experts, tuple(values)]))
    most = router.kept_groups * (router.experts // router.groups)
    if router.score == "sparse_mixer":
        return router
    return dataclasses.replace(router, bias=bias, k=draw(st.sampled_from([router.k, router.k, 1, most])))


@given(extreme_routers(), st.data(), st.integers(1, 4))
@RANDOM
def test_choices_and_weights_are_the_reference_s_for_any_logits(
    router: Router, data: st.DataObject, max_batch: int
) -> None:
    logits = data.draw(bad_logits(router.experts))
    graph = weights_graph(router, logits.shape[1])
    export = exporter.build(graph, max_batch=max_batch)
    want, routes = reference(export.graph, logits)
    for kernels in KERNELS:
        model = engine.load(export.image, kernels=kernels)
        assert ask(model, logits).tobytes() == want.tobytes()
    assert np.array_equal(model.routes(np.ones((*logits.shape[:2], 1), np.float32), logits)[0], routes)


@given(extreme_routers(), st.data(), st.integers(1, 4))
@RANDOM
def test_a_sample_s_weights_do_not_depend_on_the_batch(router: Router, data: st.DataObject, max_batch: int) -> None:
    logits = data.draw(bad_logits(router.experts))
    image = exporter.build(weights_graph(router, logits.shape[1]), max_batch=max_batch).image
    model, two = engine.load(image), engine.load(image, threads=2)
    whole = ask(model, logits)
    alone = np.concatenate([ask(model, sample[None]) for sample in logits])
    assert whole.tobytes() == alone.tobytes() == ask(two, logits).tobytes()
    assert np.ascontiguousarray(ask(model, logits[::-1].copy())[::-1]).tobytes() == whole.tobytes()


THREADED = [
    Router(8, 3, "sigmoid", "sum", 2.5, tuple(np.linspace(-1, 1, 8)), 4, 2, "top2", 1e-20),
    Router(8, 2, "softmax", groups=2, kept_groups=1),
    Router(8, 2, "softmax", "clamped", bias=(-np.inf,) * 8, epsilon=0.7),
    Router(8, 2, "sparse_mixer", epsilon=0.1),
    Router(8, 1, capacity=3),
    Router(8, 2, "sigmoid", apply="input"),
    Router(8, 8, "logit", "softmax", expert_scale=tuple(np.linspace(0.5, 2, 8))),
]


@pytest.mark.parametrize("router", THREADED, ids=lambda r: f"{r.score} {r.normalize} {r.apply} {r.capacity}")
def test_bits_do_not_depend_on_threads_or_place_with_any_descriptor(router: Router) -> None:
    rng = np.random.default_rng(3)
    graph = Graph("wide")
    x = graph.add_input("x", (5, 160))  # large enough to be spread over threads
    bodies = [expert(e, 160, 300, 120, 1) for e in range(router.experts)]
    graph.outputs = [graph.add("moe", x, linear(graph, rng, x, router.experts, True), router=router, experts=bodies)]
    export = exporter.build(graph, max_batch=6)
    rows = rng.standard_normal((6, 5, 160)).astype(np.float32)
    rows[1, 2] = 0  # all of a token's logits are the biases
    rows[2, 0, 3], rows[2, 1, 5], rows[3, 4, 0] = np.nan, np.inf, -np.inf
    rows[4] = rows[0]
    want = run(export.graph, [rows])[0]
    assert want[4].tobytes() == want[0].tobytes()
    for threads in (1, 2):
        model = engine.load(export.image, threads=threads)
        whole = model(rows)
        assert isinstance(whole, np.ndarray) and whole.tobytes() == want.tobytes()
        assert np.concatenate([np.asarray(model(r[None])) for r in rows]).tobytes() == want.tobytes()


# --- cases one can check by hand --------------------------------------------------------------------------------------

INF, NAN = np.inf, np.nan
BY_HAND: list[tuple[str, Router, list[list[float]], list[list[int]]]] = [
    ("k is the number of experts", Router(3, 3), [[1, 3, 2]], [[1, 2, 0]]),
    ("one expert", Router(1, 1, "sigmoid"), [[NAN]], [[0]]),
    ("equal logits in order of their index", Router(4, 3, "sigmoid", "sum"), [[2, 1, 2, 2]], [[0, 2, 3]]),
    ("equal keys in order of their index", Router(4, 2, "sigmoid", bias=(0, 0.5, 0.5, 0)), [[0, 0, 0, 0]], [[1, 2]]),
    ("a bias decides", Router(3, 1, "sigmoid", bias=(0, 0, 1)), [[4, 2, 0]], [[2]]),
    ("biases of minus infinity are ties", Router(3, 2, "sigmoid", bias=(-INF,) * 3), [[1, 2, 3]], [[0, 1]]),
    ("of two groups the one with the largest", Router(4, 2, groups=2), [[0, 3, 2, 2]], [[1, 0]]),
    ("of two groups the one with the larger sum", Router(4, 2, groups=2, group_rule="top2"), [[0, 3, 2.9, 2.9]],
     [[2, 3]]),
    ("equal groups in order of their index", Router(6, 2, groups=3, kept_groups=1), [[0, 1, 1, 0, 0, 1]], [[1, 0]]),
    ("a group of NaN is the last", Router(4, 2, "sigmoid", groups=2), [[NAN, NAN, -9, -9]], [[2, 3]]),
    ("keys below zero are not beaten by groups left out",
     Router(6, 3, "sigmoid", bias=(-9,) * 6, groups=2, group_rule="top2"), [[3, 2, 1, 0, 0, 0]], [[0, 1, 2]]),
    ("what is beyond the capacity has no expert", Router(2, 1, capacity=2), [[1, 0]] * 3 + [[0, 1]],
     [[0], [0], [-1], [1]]),
    ("a token keeps its other choice", Router(3, 2, capacity=1), [[3, 2, 1], [3, 1, 2]], [[0, 1], [-1, 2]]),
    ("the mixer takes the largest of those left", Router(4, 2, "sparse_mixer", epsilon=0.1), [[1, 4, 4, 2]], [[1, 2]]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "router", "logits", "want"), BY_HAND, ids=[row[0] for row in BY_HAND])
def test_choices(name: str, router: Router, logits: list[list[float]], want: list[list[int]]) -> None:
    sample = np.array([logits], np.float32)
    export = exporter.build(weights_graph(router, len(logits)))
    assert reference(export.graph, sample)[1].tolist() == [want]
    assert engine.load(export.image).routes(np.ones((1, len(logits), 1), np.float32), sample)[0].tolist() == [want]


def test_capacity_is_counted_in_each_sample_by_itself() -> None:
    router = Router(3, 1, "sigmoid", capacity=2)
    model = engine.load(exporter.build(weights_graph(router, 4), max_batch=5).image)
    logits = np.zeros((5, 4, 3), np.float32)
    logits[..., 1] = np.arange(20).reshape(5, 4)  # all want expert 1 (the first token of all expert 0: a tie)
    weights = ask(model, logits)
    taken = (weights != 0).sum((1, 2)).tolist()
    assert taken == [3, 2, 2, 2, 2]
    assert not weights[1:, 2:].any()


@given(routers(8), st.integers(0, 1 << 16))
@RANDOM
def test_the_weights_in_c_are_what_the_descriptor_says(router: Router, seed: int) -> None:
    """Not through the interpreter: `ops.route` alone, put in place by hand."""
    logits = np.random.default_rng(seed).standard_normal((2, 3, router.experts)).astype(np.float32)
    chosen, weights = ops.route(logits.reshape(6, -1), router)
    ops.drop_overflow(chosen, router, 3)
    want = np.zeros((6, router.experts), np.float32)
    for token, slot in zip(*np.nonzero(chosen >= 0), strict=True):
        want[token, chosen[token, slot]] += weights[token, slot]
    have = ask(engine.load(exporter.build(weights_graph(router, 3), max_batch=2).image), logits)
    assert np.array_equal(have.reshape(6, -1), want)


def test_an_expert_never_chosen_may_give_nan() -> None:
    router = Router(3, 2, "softmax", bias=(0, -INF, 0))
    graph = weights_graph(router)
    sick = graph.nodes[-1].attrs["experts"][1]
    zero = sick.add("binary", sick.outputs[0], sick.outputs[0], func="sub")
    sick.outputs = [sick.add("binary", zero, zero, func="div")]
    export = exporter.build(graph, max_batch=3)
    logits = np.random.default_rng(0).standard_normal((9, 1, 3)).astype(np.float32)
    have = ask(engine.load(export.image), logits)
    assert np.isfinite(have).all() and not have[..., 1].any()
    assert (
        have.tobytes() == ask(engine.load(exporter.build(weights_graph(router), max_batch=3).image), logits).tobytes()
    )
