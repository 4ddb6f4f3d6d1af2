"""Language models from checkpoints: the same logits and routes as transformers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from colibri.frontends.language_models import load_checkpoint
from colibri.graph import Graph
from colibri.reference.interpreter import Trace, run
from tests.frontends.checkpoints import CASES, TOKENS, VARIANTS, VOCABULARY, Model, make

Array = np.ndarray[Any, Any]

IDS = np.random.default_rng(7).integers(0, VOCABULARY, TOKENS)


def ours(graph: Graph, ids: Array = IDS) -> tuple[Array, list[Array]]:
    """Logits (tokens, vocabulary), and the sorted experts (tokens, k) of every mixture."""
    trace = Trace()
    (logits,) = run(graph, [np.asarray(ids, np.float32)[:, None]], trace)
    return logits, [np.sort(route[:, 0], -1) for route in trace.routes]


def agree(model: Model, graph: Graph, ids: Array = IDS) -> float:
    """The largest difference of the logits, of the largest logit; routes must be the same."""
    want = model.logits(ids)
    have, routes = ours(graph, ids)
    assert len(routes) == len(model.routes)
    for a, b in zip(routes, model.routes, strict=True):
        assert np.array_equal(a, b)
    error = float(np.abs(have - want).max() / np.abs(want).max())
    assert error <= 1e-4
    return error


@pytest.mark.parametrize(("family", "variant"), CASES, ids=[f"{f}, {v}" if v else f for f, v in CASES])
def test_a_family_computes_what_transformers_does(
    family: str, variant: str, tmp_path: Path, record_property: Any
) -> None:
    model = make(family, tmp_path, VARIANTS[family][variant])
    graph = load_checkpoint(tmp_path)
    record_property("error", agree(model, graph))
    assert graph.shapes[graph.inputs[0]] == (1,) and graph.outputs == ["logits"] and graph.context == 64
