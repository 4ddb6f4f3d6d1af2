"""Every graph, every shape: the engine gives the reference's bits, wherever a row stands and whatever it holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from colibri import exporter
from colibri.errors import ExportError
from colibri.ir.graph import Graph, Router
from colibri.reference.interpreter import Trace, run
from colibri.runtime import engine
from colibri.runtime.engine import KERNELS
from tests.graphs import FORMATS, constant, expert, graphs, linear

RANDOM = settings(
    deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def build(graph: Graph, max_batch: int) -> exporter.Export:
    try:
        return exporter.build(graph, max_batch=max_batch)
    except ExportError as error:
        assume("separately strided axes" not in str(error) and "axes; the model format" not in str(error))
        raise


def rows(graph: Graph, count: int, seed: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((count, *graph.shapes[i]), np.float32) * 3 for i in graph.inputs]


def outputs(model: engine.Model, inputs: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    got = model(*inputs)
    return list(got) if isinstance(got, tuple) else [got]


def moe_graph(router: Router, d: int = 6, tokens: int = 1) -> Graph:
    """Tokens straight into an MoE whose logits are the first `experts` features: routes are chosen by the input."""
    graph = Graph("moe")
    x = graph.add_input("x", (tokens, d))
    logits = graph.add("slice", x, axis=1, start=0, stop=router.experts, step=1)
    experts = [expert(e, d, 5, 4, 0) for e in range(router.experts)]
    graph.outputs = [graph.add("moe", x, logits, router=router, experts=experts)]
    return graph


@given(graphs(), st.integers(1, 12), st.integers(1, 20))
@RANDOM
def test_engine_equals_reference_bit_for_bit(graph: Graph, max_batch: int, batch: int) -> None:
    export = build(graph, max_batch)
    inputs = rows(graph, batch, 1)
    for kernels in KERNELS:
        model = engine.load(export.image, kernels=kernels)
        for want, have in zip(run(export.graph, inputs), outputs(model, inputs), strict=True):
            assert want.shape == have.shape
            assert want.tobytes() == have.tobytes()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("fmt", FORMATS)
@given(st.data())
@settings(deadline=None, max_examples=25)
def test_every_format_gives_the_reference_bits_for_any_shape(fmt: str, kernels: str, data: st.DataObject) -> None:
    rows, cols = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 700))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 16)))
    graph = Graph("linear")
    graph.outputs = [linear(graph, rng, graph.add_input("x", (cols,)), rows, data.draw(st.booleans()), fmt)]
    export = exporter.build(graph, max_batch=11)
    x = (rng.standard_normal((data.draw(st.integers(1, 11)), cols)) * 10 ** rng.uniform(-3, 3)).astype(np.float32)
    x[rng.random(x.shape) < 0.05] = 0
    assert engine.load(export.image, kernels=kernels)(x).tobytes() == run(export.graph, [x])[0].tobytes()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if "outliers" in fmt])
def test_outliers_of_many_cells_give_the_reference_bits(fmt: str, kernels: str) -> None:
    rng = np.random.default_rng(3)
    graph = Graph("linear")
    graph.outputs = [linear(graph, rng, graph.add_input("x", (2500,)), 203, True, fmt)]
    x = rng.standard_normal((11, 2500)).astype(np.float32)
    export = exporter.build(graph, max_batch=11)
    assert engine.load(export.image, kernels=kernels)(x).tobytes() == run(export.graph, [x])[0].tobytes()


@given(graphs(), st.data())
@RANDOM
def test_special_values_give_the_reference_bits_and_one_nan(graph: Graph, data: st.DataObject) -> None:
    export = build(graph, 4)
    inputs = rows(graph, 4, 2)
    specials = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-42, 3e38], np.float32)
    for x in inputs:
        for _ in range(3):
            x.reshape(-1)[data.draw(st.integers(0, x.size - 1))] = data.draw(st.sampled_from(list(specials)))
    for want, have in zip(run(export.graph, inputs), outputs(engine.load(export.image), inputs), strict=True):
        assert want.tobytes() == have.tobytes()
        assert set(have.view(np.uint32)[np.isnan(have)].tolist()) <= {0x7FC00000}


@given(graphs(), st.integers(1, 7))
@RANDOM
def test_a_row_gives_the_same_bits_in_every_batch_and_position(graph: Graph, max_batch: int) -> None:
    model = engine.load(build(graph, max_batch).image)
    inputs = rows(graph, 9, 3)
    alone = [
        np.concatenate(y) for y in zip(*(outputs(model, [x[n : n + 1] for x in inputs]) for n in range(9)), strict=True)
    ]
    turned = [np.roll(y, -4, axis=0) for y in outputs(model, [np.roll(x, 4, axis=0) for x in inputs])]
    for want, other, have in zip(alone, turned, outputs(model, inputs), strict=True):
        assert want.tobytes() == have.tobytes() == np.ascontiguousarray(other).tobytes()


def test_a_value_read_twice_in_different_order_is_not_overwritten() -> None:
    graph = Graph("crossed")
    y = graph.add("binary", graph.add_input("x", (5, 1, 5)), graph.add_constant("one", np.ones(1)), func="add")
    z = graph.add("binary", y, graph.add("transpose", y, perm=(2, 1, 0)), func="add")
    graph.outputs = [graph.add("softmax", z)]
    x = np.random.default_rng(0).standard_normal((3, 5, 1, 5), np.float32)
    (have,) = outputs(engine.load(build(graph, 3).image), [x])
    assert have.tobytes() == run(graph, [x])[0].tobytes()


@given(graphs(), st.integers(1, 9))
@RANDOM
def test_context_is_the_plan_and_the_plan_is_tight(graph: Graph, max_batch: int) -> None:
    export = build(graph, max_batch)
    assert engine.load(export.image).context_bytes == export.program.context_bytes
    assert export.program.context_bytes <= 1.02 * export.program.lower_bound


@given(graphs(), st.integers(1, 9))
@RANDOM
def test_the_engine_reports_the_reference_routes_and_logits(graph: Graph, max_batch: int) -> None:
    export = build(graph, max_batch)
    inputs = rows(graph, 11, 4)
    trace = Trace()
    run(export.graph, inputs, trace)
    model = engine.load(export.image)
    for want, have in zip(trace.routes, model.routes(*inputs), strict=True):
        assert np.array_equal(want, have)
    for route, want, (chosen, have) in zip(trace.routes, trace.logits, model.router_logits(*inputs), strict=True):
        assert np.array_equal(route, chosen) and np.array_equal(want, have, equal_nan=True)


def put_together(pieces: int) -> Graph:
    """Pieces of one value, computed in another order than they lie in, beside each other and one after the other."""
    rng = np.random.default_rng(0)
    graph = Graph("pieces")
    x = graph.add_input("x", (3, 5))
    parts = {n: linear(graph, rng, x, 1 + n % 3, True) for n in (*range(0, pieces, 2), *range(1, pieces, 2))}
    beside = graph.add("concat", *(parts[n] for n in range(pieces)), axis=1)
    after = graph.add("concat", *(graph.add("softmax", parts[n]) for n in range(0, pieces, 3)), axis=0)
    graph.outputs = [graph.add("softmax", beside), graph.add("transpose", beside, perm=(1, 0)), after]
    return graph


def between_pieces() -> Graph:
    """A product's matrices lie apart in what is put together, and are read before what lies between is written."""
    graph = Graph("between")
    x = graph.add_input("x", (3, 2, 2))
    product = graph.add("matmul", x, graph.add("transpose", x, perm=(0, 2, 1)))
    graph.outputs = [graph.add("concat", product, graph.add("binary", x, product, func="add"), axis=1)]
    return graph


def windows_beside() -> Graph:
    """Windows whose rows lie between each other, read from one column and written to the next."""
    graph = Graph("windows")
    x = graph.add_input("x", (13, 2))
    left = graph.add("unary", x, func="tanh")
    windows = graph.add("window", left, axis=0, size=3, step=2, dilation=3)
    mean = graph.add("reduce", windows, func="mean", axis=1)
    again = graph.add("window", graph.add("concat", mean, mean, axis=0), axis=0, size=2, step=1, dilation=1)
    right = graph.add("reshape", graph.add("slice", again, axis=0, start=0, stop=7, step=1), shape=(14, 2))
    right = graph.add("slice", right, axis=0, start=0, stop=13, step=1)
    graph.outputs = [graph.add("concat", left, graph.add("unary", right, func="tanh"), axis=1), mean]
    return graph


PIECES = {"4": put_together(4), "9": put_together(9), "64": put_together(64), "300": put_together(300),
          "between": between_pieces(), "windows": windows_beside()}  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("max_batch", [1, 3])
def test_what_is_put_together_from_pieces_runs(name: str, max_batch: int) -> None:
    """C13: the proof of the order refuses no export, of however many pieces a value is put together."""
    export = exporter.build(PIECES[name], max_batch=max_batch)
    inputs = rows(export.graph, 4, 6)
    for want, have in zip(run(export.graph, inputs), outputs(engine.load(export.image), inputs), strict=True):
        assert want.tobytes() == have.tobytes()


ROUTES = [
    ("the largest wins", [0.1, 0.3, 0.2], 2, [1, 2]),
    ("equal logits go to the lower index", [0.5, 0.5, 0.5], 2, [0, 1]),
    ("a late tie does not displace", [0.1, 0.5, 0.5], 1, [1]),
    ("zero and minus zero are equal", [-0.0, 0.0, -1.0], 2, [0, 1]),
    ("NaN is the lowest", [np.nan, -5.0, -6.0], 2, [1, 2]),
    ("NaN ties with minus infinity", [np.nan, -np.inf, 0.0], 3, [2, 0, 1]),
    ("all NaN", [np.nan, np.nan, np.nan], 2, [0, 1]),
    ("infinity first", [0.0, np.inf, np.inf], 3, [1, 2, 0]),
]


@pytest.mark.parametrize(("name", "logits", "k", "want"), ROUTES, ids=[r[0] for r in ROUTES])
def test_routes(name: str, logits: list[float], k: int, want: list[int]) -> None:
    export = exporter.build(moe_graph(Router(3, k)))
    x = np.array([[[*logits, 0.5, 0.5, 0.5]]], np.float32)
    trace = Trace()
    run(export.graph, [x], trace)
    assert trace.routes[0].tolist() == [[want]]
    assert engine.load(export.image).routes(x)[0].tolist() == [[want]]


def test_an_expert_that_was_not_chosen_never_touches_the_result() -> None:
    graph = moe_graph(Router(3, 2, "softmax", "sum"))
    quiet = exporter.build(graph)
    loud = moe_graph(Router(3, 2, "softmax", "sum"))
    for name, value in loud.nodes[-1].attrs["experts"][2].constants.items():
        loud.nodes[-1].attrs["experts"][2].constants[name] = np.full_like(value, 3e38)
    x = np.array([[[1.0, 0.5, -4.0, 1e30, -1e30, 1e30]]], np.float32)
    wild = engine.load(exporter.build(loud).image)
    assert wild.routes(x)[0].tolist() == [[[0, 1]]]
    assert wild(x).tobytes() == engine.load(quiet.image)(x).tobytes()


def test_several_inputs_and_outputs_map_arrays_to_arrays() -> None:
    graph = Graph("ports")
    rng = np.random.default_rng(0)
    a, b = graph.add_input("a", (3, 4)), graph.add_input("b", (4,))
    total = graph.add("binary", a, b, func="add")
    graph.outputs = [total, linear(graph, rng, b, 2, True), a]
    model = engine.load(exporter.build(graph, max_batch=2).image)
    xa, xb = rng.standard_normal((5, 3, 4), np.float32), rng.standard_normal((5, 4), np.float32)
    y = model(xa, xb)
    assert isinstance(y, tuple) and [v.shape for v in y] == [(5, 3, 4), (5, 2), (5, 3, 4)]
    assert np.array_equal(y[0], xa + xb[:, None]) and np.array_equal(y[2], xa)
    assert [p.name for p in model.inputs] == ["a", "b"]


def test_the_largest_k_and_a_single_expert_work() -> None:
    for router in (Router(1, 1), Router(5, 5, "softmax", "none"), Router(5, 5, "logit", "softmax")):
        export = exporter.build(moe_graph(router, tokens=3), max_batch=3)
        x = rows(export.graph, 7, 5)
        assert engine.load(export.image)(*x).tobytes() == run(export.graph, x)[0].tobytes()


def test_experts_of_one_shape_share_one_program() -> None:
    program = exporter.build(moe_graph(Router(4, 1))).program
    assert len({e.first_op for e in program.experts}) == 1 and len(program.experts) == 4
    assert len({e.section.data() for e in program.experts}) == 4


REFUSED = [
    (lambda g: g.add("linear", "x", g.add("slice", "x", axis=0, start=0, stop=2, step=1)), "constant weights"),
    (lambda g: g.add("unary", "x", func="sin"), "unknown function 'sin'"),
    (lambda g: g.add("conv2d", "x"), "not known"),
    (lambda g: g.add("binary", "x", "y", func="add"), "not defined"),
    (lambda g: g.add("binary", "x", constant(g, np.random.default_rng(0), "c", 5), func="add"), "do not broadcast"),
    (lambda g: g.add("moe", "x", "x", router=Router(3, 1), experts=[]), "0 experts"),
    (lambda g: Router(3, 4), "k = 4"),
    (lambda g: Router(3, 1, "logit", "sum"), "score 'logit'"),
    (lambda g: Router(3, 1, scale=float("inf")), "not finite"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_cannot_be_expressed_is_refused_by_name(make: Any, message: str) -> None:
    graph = Graph("refused")
    graph.add_input("x", (3, 3))
    with pytest.raises(ExportError, match=message):
        graph.outputs = [make(graph)]
        exporter.build(graph)


def test_a_constant_that_is_not_finite_is_refused() -> None:
    graph = Graph("nan")
    graph.outputs = [
        graph.add("binary", graph.add_input("x", (2,)), graph.add_constant("c", [1.0, np.nan]), func="add")
    ]
    with pytest.raises(ExportError, match="constant 'c'"):
        exporter.build(graph)


def test_an_export_is_the_same_bytes_every_time() -> None:
    assert exporter.build(moe_graph(Router(3, 2))).image == exporter.build(moe_graph(Router(3, 2))).image
