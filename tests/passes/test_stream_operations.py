"""What makes a stream short: one delay for a window, and the function behind an operation on two values in it."""

from __future__ import annotations

import numpy as np
import pytest

from colibri import exporter
from colibri.errors import ExportError
from colibri.format import spec
from colibri.ir.graph import Graph
from colibri.passes.fuse import fuse_activations
from colibri.reference.interpreter import run
from colibri.runtime import engine
from tests.graphs import linear

TIME, WIDTH = 14, 3
WITHOUT_PARAMETERS = [name for name in spec.UNARY if name not in ("identity", "leaky_relu", "clamp")]


def windows(size: int, apart: int, channels_first: bool) -> Graph:
    """The largest of each window, and a product of it, of a sequence (TIME, WIDTH)."""
    graph, rng = Graph("windows"), np.random.default_rng(0)
    x = graph.add_input("x", (TIME, WIDTH))
    count = TIME - (size - 1) * apart
    if channels_first:
        x = graph.add("transpose", x, perm=(1, 0))
    seen = graph.add("window", x, axis=int(channels_first), size=size, step=1, dilation=apart)
    if channels_first:  # (WIDTH, count, size)
        seen = graph.add("transpose", seen, perm=(1, 0, 2))
    largest = graph.add("reduce", seen, func="max", axis=1)
    flat = graph.add("reshape", seen, shape=(count, size * WIDTH))
    graph.outputs = [largest, linear(graph, rng, flat, 5, True)]
    return graph


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize(("size", "apart", "batch"), [(1, 1, 1), (2, 1, 1), (5, 1, 4), (3, 4, 1), (4, 3, 5)])
def test_a_window_of_a_stream_is_one_delay(size: int, apart: int, batch: int, channels_first: bool) -> None:
    """B9: building it compares the stream with the whole sequence, and the engine with the reference to the bit."""
    built = exporter.build(windows(size, apart, channels_first), stream_axis=1, max_batch=batch)
    delays = [(op.rows, op["steps"], op["apart"]) for op in built.program.ops if op.code == "delay"]
    assert delays == ([(size, (size - 1) * apart, apart)] if size > 1 else [])
    rows = np.random.default_rng(1).normal(size=(40, WIDTH)).astype(np.float32)
    found = engine.load(built.image)(rows)
    assert [y.tobytes() for y in found] == [y.tobytes() for y in run(built.graph, [rows])]


@pytest.mark.parametrize(("steps", "rows", "apart"), [(3, 3, 2), (1, 3, 1), (2, 0, 1), (2, 2, -1)])
def test_a_delay_recalls_no_moment_of_the_future(steps: int, rows: int, apart: int) -> None:
    graph = Graph("future", context=64)
    x = graph.add_input("x", (4,))
    with pytest.raises(ExportError, match="time steps"):
        graph.add("delay", x, steps=steps, rows=rows, apart=apart)


@pytest.mark.parametrize("func", WITHOUT_PARAMETERS)
def test_the_function_behind_an_operation_on_two_values_keeps_the_bits(func: str) -> None:
    """B9: beside one in front of it with parameters, on rows and on columns."""
    graph, rng = Graph("then"), np.random.default_rng(2)
    x, y = graph.add_input("x", (6, 5)), graph.add_input("y", (6, 5))
    turned = graph.add("transpose", y, perm=(1, 0))
    plain = graph.add("unary", graph.add("binary", x, y, func="mul"), func=func)
    before = graph.add("transpose", x, perm=(1, 0))
    both = graph.add("binary", before, turned, func="add", activation="leaky_relu", alpha=0.1)
    graph.outputs = [plain, graph.add("unary", both, func=func)]
    fused = fuse_activations(graph)
    assert [node.op for node in fused.nodes if node.op in ("unary", "binary")] == ["binary", "binary"]
    rows = [rng.normal(size=(9, 6, 5)).astype(np.float32) for _ in range(2)]
    assert [a.tobytes() for a in run(graph, rows)] == [b.tobytes() for b in run(fused, rows)]
    exporter.build(graph, max_batch=3, calibration=rows)  # compares the engine with the reference


@pytest.mark.parametrize("func", ["leaky_relu", "clamp"])
def test_a_function_with_parameters_stays_behind(func: str) -> None:
    graph = Graph("behind")
    x, y = graph.add_input("x", (4,)), graph.add_input("y", (4,))
    graph.outputs = [graph.add("unary", graph.add("binary", x, y, func="add"), func=func, alpha=-0.5, beta=0.5)]
    assert [node.op for node in fuse_activations(graph).nodes] == ["binary", "unary"]
