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

from colibri import exporter
from colibri.frontends.checkpoints.families import FAMILIES
from colibri.ir.graph import Router, from_json, to_json
from colibri.reference import ops
from colibri.reference.interpreter import Trace, run
from colibri.runtime import engine
from tests.reference.families import CASES, HIDDEN, MISTAKES, TOKENS, Block, Case, made, sized

Array = np.ndarray[Any, Any]
ROWS = 12
WEIGHT, OUTPUT = 2e-6, 1e-6  # of a weight itself; of a block's largest output


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
    """How far a graph is from a module: tokens that go elsewhere, weights relative beyond what one rounding of the
    largest logit makes of them, outputs of the largest."""

    elsewhere: int
    weights: float
    outputs: float


def deviation(name: str, router: Router | None = None, mistake: str = "") -> Deviation:
    return compare(CASES[name], made(name), router, mistake)


def compare(case: Case, block: Block, router: Router | None = None, mistake: str = "") -> Deviation:
    x = rows()
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
    rounding = np.spacing(np.abs(trace.logits[0]).max())  # absolute of a logit, so relative of a weight
    return Deviation(
        int((mine[0] != theirs[0]).any(1).sum()),
        float(max(relative.max(initial=0) - rounding, 0)),
        float(np.abs(have - want.numpy()).max() / np.abs(want.numpy()).max()),
    )


@pytest.mark.parametrize("name", CASES)
def test_choices_weights_and_outputs_are_the_module_s(name: str, record_property: Any) -> None:
    seen = deviation(name)
    record_property("deviation", str(seen))
    assert seen.elsewhere == 0
    assert seen.weights <= WEIGHT
    assert seen.outputs <= OUTPUT


EDGES = [
    (name, experts, k)
    for name, case in CASES.items()
    for experts, k in (
        [(2, 2)]
        if case.family == "phimoe"  # takes two whatever it is told
        else [(2 if case.bias and FAMILIES[case.family].group_rule == "top2" else 1, 1), (5, 5)]  # their topk(2) fails
    )
    if not (case.family == "switch_transformers" and k > 1)
]


@pytest.mark.parametrize(("name", "experts", "k"), EDGES)
def test_one_expert_or_all_of_them(name: str, experts: int, k: int) -> None:
    case, block = sized(name, experts, k)
    router = case.descriptor(block)
    assert (router.experts, router.k) == (experts, k)
    seen = compare(case, block)
    assert seen.elsewhere == 0
    assert seen.weights <= WEIGHT
    assert seen.outputs <= OUTPUT


@pytest.mark.parametrize("name", CASES)
def test_a_token_of_nan_spoils_itself_alone(name: str) -> None:
    x = rows()
    x[3, 2, 5] = np.nan
    want = made(name).run(torch.from_numpy(x.copy()))[0].numpy()
    have = np.asarray(engine.load(exported(name).image)(x))
    spoilt = np.zeros(have.shape[:2], bool)
    spoilt[3, 2] = True
    lost = (want == 0).all(-1)  # beyond a capacity
    assert np.array_equal(np.isnan(want).all(-1), spoilt & ~lost)
    assert np.array_equal(np.isnan(have), np.isnan(want))
    assert np.nanmax(np.abs(have - want)) <= OUTPUT * np.nanmax(np.abs(want))


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


# --- what went wrong elsewhere: each is a deviation this comparison sees ----------------------------------------------

WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("normalisation lost", "qwen3_moe", {"score": "softmax", "normalize": "none"}),
    ("normalisation invented", "olmoe", {"score": "logit", "normalize": "softmax"}),
    ("normalisation lost", "qwen2_moe, sum", {"score": "softmax", "normalize": "none"}),
    ("softmax for sigmoid", "deepseek_v3", {"score": "softmax"}),
    ("softmax for sigmoid", "minimax_m2", {"score": "softmax"}),
    ("sigmoid for softmax", "mixtral", {"score": "sigmoid", "normalize": "sum"}),
    ("scale lost", "glm4_moe, groups", {"scale": 1.0}),
    ("scale lost", "deepseek_v2, greedy", {"scale": 1.0}),
    ("bias lost", "lfm2_moe", {"bias": ()}),
    ("bias lost", "ernie4_5_moe", {"bias": ()}),
    ("groups lost", "deepseek_v3", {"groups": 1, "kept_groups": 1}),
    ("groups lost", "deepseek_v2, groups", {"groups": 1, "kept_groups": 1}),
    ("groups ranked by their largest", "deepseek_v3", {"group_rule": "max"}),
    ("groups ranked by the sum of two", "deepseek_v2, groups", {"group_rule": "top2"}),
    ("wrong number of groups", "deepseek_v3", {"groups": 2, "kept_groups": 1}),
    ("least sum lost", "ernie4_5_moe, no shared, least sum", {"normalize": "sum", "epsilon": 0.0}),
    ("the mixer's margin lost", "phimoe, wide", {"epsilon": 0.01}),
    ("an expert's own scale lost", "gemma4", {"expert_scale": ()}),
    ("capacity lost", "switch_transformers", {"capacity": 0}),
    ("weight on the output", "llama4", {"apply": "output"}),
]


@pytest.mark.parametrize(("mistake", "name", "change"), WRONG, ids=[f"{m}: {n}" for m, n, _ in WRONG])
def test_a_wrong_descriptor_is_seen(mistake: str, name: str, change: dict[str, Any]) -> None:
    right = CASES[name].descriptor(made(name))
    wrong = dataclasses.replace(right, **change)
    assert wrong != right
    assert deviation(name, wrong).outputs > 1e-2, mistake


FORGOTTEN = [
    (name, mistake)
    for name, case in CASES.items()
    for mistake in MISTAKES
    if (case.parts.get("shared_gate") if "gate" in mistake else case.parts.get("shared") or case.family == "gemma4")
    and "no shared" not in name
]


@pytest.mark.parametrize(("name", "mistake"), FORGOTTEN, ids=[f"{m}: {n}" for n, m in FORGOTTEN])
def test_a_wrong_shared_expert_is_seen(name: str, mistake: str) -> None:
    assert deviation(name, mistake=mistake).outputs > 1e-2


def test_tokens_beyond_the_capacity_come_out_as_zero() -> None:
    block = made("switch_transformers")
    y, (experts, _) = block.run(torch.from_numpy(rows()))
    lost = experts.reshape(ROWS, TOKENS).numpy() == -1
    assert 0 < lost.sum() < lost.size
    have = np.asarray(engine.load(exported("switch_transformers").image)(rows()))
    assert not have[lost].any() and not y.numpy()[lost].any()
    assert have[~lost].any(-1).all()


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe, groups", "nemotron_h"])
def test_keys_below_zero_are_not_beaten_by_groups_left_out(name: str) -> None:
    """Where every score plus bias is negative, a mask of 0.0 would choose exactly the experts it should hide."""
    case = CASES[name]
    block = case.make(3)
    with torch.no_grad():
        block.router.e_score_correction_bias.sub_(4)  # type: ignore[operator, union-attr]
    graph = case.graph(block)
    _, (experts, _) = block.run(torch.from_numpy(rows()))
    trace = Trace()
    run(graph, [rows()], trace)
    router = case.descriptor(block)
    assert max(router.bias) < -1
    assert np.array_equal(np.sort(trace.routes[0].reshape(-1, router.k)), np.sort(experts.numpy()))
    size = router.experts // router.groups
    assert max(len(set(row)) for row in (trace.routes[0].reshape(-1, router.k) // size)) == router.kept_groups


@pytest.mark.parametrize("name", CASES)
def test_a_router_of_zeros_takes_the_first_experts(name: str) -> None:
    """As real routers are initialised: every logit is a tie, which PyTorch breaks arbitrarily and Colibri does not."""
    right = CASES[name].descriptor(made(name))
    router = dataclasses.replace(right, bias=(0.5,) * len(right.bias), capacity=0)
    want = np.tile(np.arange(router.k), (3, 1))
    with np.errstate(invalid="ignore"):  # the sparse mixer's margin is 0 / 0 here, which is above no limit
        assert np.array_equal(ops.route(np.zeros((3, router.experts), np.float32), router)[0], want)


@pytest.mark.parametrize("name", CASES)
def test_a_descriptor_survives_the_text_form(name: str) -> None:
    graph = CASES[name].graph(made(name))
    tensors = dict(graph.constants)
    (moe,) = graph.moe_nodes()
    for n, body in enumerate(moe.attrs["experts"]):
        names = {old: f"e{n}.{old}" for old in body.constants}
        tensors |= {names[old]: value for old, value in body.constants.items()}
        body.constants = {names[old]: value for old, value in body.constants.items()}
        body.shapes = {names.get(old, old): shape for old, shape in body.shapes.items()}
        body.nodes = [dataclasses.replace(o, inputs=tuple(names.get(i, i) for i in o.inputs)) for o in body.nodes]
    again = from_json(to_json(graph), tensors)
    assert next(again.moe_nodes()).attrs["router"] == moe.attrs["router"]
    assert run(again, [rows()])[0].tobytes() == run(graph, [rows()])[0].tobytes()
