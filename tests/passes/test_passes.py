"""Passes keep what a graph computes, and do what they are for."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given

from colibri import exporter
from colibri.ir.graph import Graph, Router
from colibri.passes import PASSES, optimize
from colibri.passes.fold import fold_affine, fold_constants
from colibri.passes.fuse import fuse_activations
from colibri.passes.merge import merge_gates
from colibri.passes.tidy import tidy
from colibri.reference.interpreter import run
from colibri.runtime import engine
from tests.graphs import FORMATS, constant, expert, graphs, linear
from tests.pipeline.test_export import RANDOM, rows

EXACT = {name: rewrite for name, rewrite in PASSES.items() if name != "affine"} | {"merge": merge_gates}


@given(graphs())
@RANDOM
def test_every_pass_but_affine_keeps_every_bit(graph: Graph) -> None:
    inputs = rows(graph, 3, 1)
    want = run(graph, inputs)
    for name, rewrite in EXACT.items():
        new = rewrite(graph)
        new.validate()
        assert [y.tobytes() for y in run(new, inputs)] == [y.tobytes() for y in want], name


def small() -> tuple[Graph, str, np.random.Generator]:
    graph, rng = Graph("small"), np.random.default_rng(0)
    x = graph.add_input("x", (3, 4))
    return graph, linear(graph, rng, x, 5, True), rng


@pytest.mark.parametrize("func", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (1,), ()])
def test_affine_folds_a_scale_or_shift_into_the_matrix(func: str, shape: tuple[int, ...]) -> None:
    graph, y, rng = small()
    c = graph.add_constant("c", 1.5 + rng.random(shape))
    graph.outputs = [graph.add("binary", y, c, func=func)]
    new = fold_affine(graph)
    assert [node.op for node in new.nodes] == ["linear"]
    inputs = rows(graph, 4, 2)
    np.testing.assert_allclose(run(new, inputs)[0], run(graph, inputs)[0], rtol=2e-6, atol=2e-6)


def test_affine_leaves_a_matrix_that_others_read() -> None:
    graph, y, rng = small()
    z = graph.add("binary", y, constant(graph, rng, "c", 5), func="mul")
    graph.outputs = [graph.add("binary", y, z, func="add")]
    assert [node.op for node in fold_affine(graph).nodes] == ["linear", "binary", "binary"]
    graph, y, rng = small()
    graph.outputs = [y, graph.add("binary", y, constant(graph, rng, "c", 5), func="mul")]
    assert [node.op for node in fold_affine(graph).nodes] == ["linear", "binary"]


def test_affine_does_not_fold_what_varies_over_rows_or_is_turned_around() -> None:
    graph, y, rng = small()
    graph.outputs = [graph.add("binary", y, constant(graph, rng, "c", 3, 1), func="mul")]
    assert len(fold_affine(graph).nodes) == 2
    graph, y, rng = small()
    graph.outputs = [graph.add("binary", constant(graph, rng, "c", 5), y, func="sub")]
    assert len(fold_affine(graph).nodes) == 2


def test_constants_fold_to_the_reference_value() -> None:
    graph, y, rng = small()
    c = graph.add("unary", constant(graph, rng, "c", 3, 5), func="exp")
    graph.outputs = [graph.add("binary", y, c, func="mul")]
    new = fold_constants(graph)
    assert [node.op for node in new.nodes] == ["linear", "binary"]
    inputs = rows(graph, 2, 3)
    assert run(new, inputs)[0].tobytes() == run(graph, inputs)[0].tobytes()


def test_activations_fuse_inside_experts_too() -> None:
    graph = Graph("moe")
    x = graph.add_input("x", (6,))
    experts = []
    for e in range(2):
        body = Graph(f"e{e}")
        t = body.add_input("t", (6,))
        body.outputs = [body.add("unary", linear(body, np.random.default_rng(e), t, 6, True), func="silu")]
        experts.append(body)
    logits = linear(graph, np.random.default_rng(9), x, 2, False)
    graph.outputs = [graph.add("moe", x, logits, router=Router(2, 1), experts=experts)]
    fused = fuse_activations(graph)
    assert [[n.op for n in e.nodes] for e in fused.nodes[-1].attrs["experts"]] == [["linear"], ["linear"]]
    inputs = rows(graph, 5, 4)
    assert run(fused, inputs)[0].tobytes() == run(graph, inputs)[0].tobytes()


def test_tidy_drops_what_changes_nothing_and_what_nobody_reads() -> None:
    graph, y, rng = small()
    linear(graph, rng, y, 7, True)
    z = graph.add("transpose", graph.add("reshape", y, shape=(3, 5)), perm=(0, 1))
    graph.outputs = [graph.add("unary", z, func="identity")]
    new = tidy(graph)
    assert [node.op for node in new.nodes] == ["linear"] and len(new.constants) == 2


def test_experts_that_differ_only_in_values_stay_alike() -> None:
    graph = Graph("moe")
    x = graph.add_input("x", (6,))
    logits = linear(graph, np.random.default_rng(9), x, 3, False)
    experts = [expert(e, 6, 4, 6, 2) for e in range(3)]
    graph.outputs = [graph.add("moe", x, logits, router=Router(3, 2), experts=experts)]
    bodies = optimize(graph).nodes[-1].attrs["experts"]
    assert len({body.signature() for body in bodies}) == 1


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_become_one_matrix_that_keeps_every_bit(fmt: str, swapped: bool, bias: bool) -> None:
    graph, rng = Graph("gated"), np.random.default_rng(5)
    x = graph.add_input("x", (70,))
    gate, up = (linear(graph, rng, x, 37, bias, fmt, **({"activation": "silu"} if n == 0 else {})) for n in range(2))
    graph.outputs = [linear(graph, rng, graph.add("binary", *((up, gate) if swapped else (gate, up)), func="mul"), 9,
                            False)]  # fmt: skip
    new = merge_gates(graph)
    assert [n.op for n in new.nodes] == ["linear", "slice", "slice", "binary", "linear"]
    x = rng.standard_normal((11, 70)).astype(np.float32)
    assert run(new, [x])[0].tobytes() == run(graph, [x])[0].tobytes()
    export = exporter.build(graph, max_batch=11)
    assert [op.code for op in export.program.ops].count("binary") == 1
    assert engine.load(export.image)(x).tobytes() == run(graph, [x])[0].tobytes()


def test_what_else_reads_a_gate_keeps_it_apart() -> None:
    graph, rng = Graph("gated"), np.random.default_rng(5)
    x = graph.add_input("x", (8,))
    gate, up = linear(graph, rng, x, 4, False), linear(graph, rng, x, 4, False)
    product = graph.add("binary", gate, up, func="mul")
    for extra in ("output", "reader", "two activations", "another input"):
        other = copy.deepcopy(graph)
        other.outputs = [product]
        if extra == "output":
            other.outputs.append(gate)
        elif extra == "reader":
            other.outputs.append(other.add("unary", up, func="abs"))
        else:
            source = x if extra == "two activations" else other.add("unary", x, func="abs")
            both = {"activation": "relu"} if extra == "two activations" else {}
            left, right = linear(other, rng, x, 4, False, **both), linear(other, rng, source, 4, False, **both)
            other.outputs = [other.add("binary", left, right, func="mul")]
        assert "slice" not in [n.op for n in merge_gates(other).nodes], extra
