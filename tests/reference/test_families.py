"""Every family of MoE blocks against its real module: choices, weights and outputs, and the engine's bits.

The module computes in float32 too, so that logits differ by rounding; the margins below are for that.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

from colibri import engine, exporter
from colibri.frontends.families import FAMILIES
from colibri.graph import Router
from colibri.reference import ops
from colibri.reference.interpreter import Trace, run
from tests.reference.families import CASES, HIDDEN, TOKENS, made

Array = np.ndarray[Any, Any]
ROWS = 12
WEIGHT, OUTPUT = 2e-6, 2e-6  # of a weight itself; of a block's largest output


def rows(seed: int = 1, scale: float = 1.0) -> Array:
    return np.random.default_rng(seed).standard_normal((ROWS, TOKENS, HIDDEN), np.float32) * np.float32(scale)


def dense(chosen: Array, weights: Array, experts: int) -> tuple[Array, Array]:
    """Which experts each token goes to, and with which weights, whatever the order of its choices."""
    marks, values = np.zeros((len(chosen), experts), bool), np.zeros((len(chosen), experts))
    for slot in range(chosen.shape[1]):
        token = np.flatnonzero(chosen[:, slot] >= 0)
        assert not marks[token, chosen[token, slot]].any()
        marks[token, chosen[token, slot]] = True
        values[token, chosen[token, slot]] = weights[token, slot]
    return marks, values


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far a graph is from a module: tokens that go elsewhere, weights relative, outputs of the largest."""

    elsewhere: int
    weights: float
    outputs: float


def deviation(name: str, router: Router | None = None, mistake: str = "", x: Array | None = None) -> Deviation:
    case, block = CASES[name], made(name)
    x = rows() if x is None else x
    graph = case.graph(block, router, mistake)
    want, (their_experts, their_weights) = block.run(torch.from_numpy(x.copy()))
    trace = Trace()
    have = run(graph, [x], trace)[0]
    router = next(graph.moe_nodes()).attrs["router"]
    chosen, weights = ops.route(trace.logits[0].reshape(-1, router.experts), router)
    ops.drop_overflow(chosen, router, TOKENS)
    assert np.array_equal(chosen, trace.routes[0].reshape(chosen.shape))
    mine = dense(chosen, weights, router.experts)
    theirs = dense(their_experts.numpy(), their_weights.numpy(), router.experts)
    both = mine[0] & theirs[0]
    relative = np.abs(mine[1] - theirs[1])[both] / np.abs(theirs[1])[both]
    return Deviation(
        int((mine[0] != theirs[0]).any(1).sum()),
        float(relative.max(initial=0)),
        float(np.abs(have - want.numpy()).max() / np.abs(want.numpy()).max()),
    )


@pytest.mark.parametrize("name", CASES)
def test_choices_weights_and_outputs_are_the_module_s(name: str, record_property: Any) -> None:
    seen = deviation(name)
    record_property("deviation", str(seen))
    assert seen.elsewhere == 0
    assert seen.weights <= WEIGHT
    assert seen.outputs <= OUTPUT


@functools.cache
def exported(name: str) -> exporter.Export:
    return exporter.build(CASES[name].graph(made(name)), max_batch=4, calibration=[rows()])


@pytest.mark.parametrize("name", CASES)
def test_the_engine_gives_the_reference_s_bits(name: str) -> None:
    export = exported(name)
    model = engine.load(export.image)
    model.selftest()
    for x in (rows(), rows(2, 30.0)):
        trace = Trace()
        assert run(export.graph, [x], trace)[0].tobytes() == model(x).tobytes()
        assert np.array_equal(trace.routes[0], model.routes(x)[0])


def test_every_family_has_a_case() -> None:
    assert {case.family for case in CASES.values()} == set(FAMILIES)
