"""Every graph, every shape: the engine gives the reference's bits, wherever a row stands and however memory is laid."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from colibri import engine, exporter
from colibri.errors import ExportError
from colibri.graph import Graph
from colibri.reference.interpreter import run
from tests.graphs import graphs

SLOW_SETUP = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def build(graph: Graph, max_batch: int) -> exporter.Export:
    try:
        return exporter.build(graph, max_batch=max_batch)
    except ExportError as error:
        assume("separately strided axes" not in str(error) and "axes; the model format" not in str(error))
        raise


def rows(graph: Graph, count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((count, *graph.shapes[i]), np.float32) * 3 for i in graph.inputs]


def outputs(model: engine.Model, inputs: list[np.ndarray]) -> list[np.ndarray]:
    got = model(*inputs)
    return list(got) if isinstance(got, tuple) else [got]


@given(graphs(), st.integers(1, 12), st.integers(1, 20))
@SLOW_SETUP
def test_engine_equals_reference_bit_for_bit(graph: Graph, max_batch: int, batch: int) -> None:
    export = build(graph, max_batch)
    inputs = rows(graph, batch, 1)
    model = engine.load(export.image)
    for want, have in zip(run(export.graph, inputs), outputs(model, inputs), strict=True):
        assert want.shape == have.shape
        assert want.tobytes() == have.tobytes()
