"""Experts that several gates share, that no row reaches, that are one object, or that share memory; small epsilons."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from colibri.errors import ExportError  # noqa: E402
from colibri.frontends.torch.export import from_torch, register_moe  # noqa: E402
from colibri.reference.interpreter import run  # noqa: E402
from tests.frontends.recognise import moe_near_misses as near  # noqa: E402
from tests.frontends.recognise import moe_styles as styles  # noqa: E402
from tests.frontends.recognise import user_moes as moes  # noqa: E402
from tests.frontends.recognise.user_moes import DIM  # noqa: E402
from tests.frontends.sampling import sampled  # noqa: E402

torch.set_num_threads(1)


def rows(count: int, size: float = 1.0, seed: int = 0, width: int = DIM) -> Any:
    return size * torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def exported(model: Any, *, width: int = DIM) -> Any:
    return from_torch(model, rows(8, width=width), calibration=rows(64, seed=1, width=width))


def equal(model: Any, graph: Any, x: Any) -> None:
    with torch.no_grad():
        want = model(x)
    for y, ours in zip(want if isinstance(want, tuple) else (want,), run(graph, [x.numpy()]), strict=True):
        np.testing.assert_allclose(ours, y.numpy(), rtol=0, atol=1e-5 * float(y.abs().max()))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- p / (Σ p + ε) ----------------------------------------------------------------------------------------------------


class Epsilon(nn.Module):
    """The router of davidmrau/mixture-of-experts: renormalised with an epsilon."""

    def __init__(self, experts: int, k: int, epsilon: float, spread: float) -> None:
        super().__init__()
        self.k, self.epsilon = k, epsilon
        self.gate, self.experts = nn.Linear(DIM, experts, bias=False), moes.experts(experts)
        nn.init.normal_(self.gate.weight, std=spread)

    def forward(self, x: Any) -> Any:
        weights, chosen = self.gate(x).softmax(-1).topk(self.k)
        return moes.loop(x, chosen, weights / (weights.sum(-1, keepdim=True) + self.epsilon), self.experts)


@pytest.mark.parametrize(
    ("experts", "k", "epsilon", "spread"),
    sampled([(16, 1, 1e-6, 0.05), (4, 2, 1e-3, 1.0), (32, 4, 1e-6, 0.05)], 3),
)
def test_an_epsilon_in_the_sum_is_found_for_any_number_of_experts(
    experts: int, k: int, epsilon: float, spread: float
) -> None:
    """E2"""
    model = Epsilon(experts, k, epsilon, spread).eval()
    graph, *_ = exported(model)
    (node,) = graph.moe_nodes()
    assert node.attrs["router"].epsilon == pytest.approx(epsilon)
    for size in (0.03, 1.0):
        equal(model, graph, rows(64, size, 5))


# --- experts no row reaches -------------------------------------------------------------------------------------------


class Guarded(moes.Variant):
    """The usual guard, and an expert whose logit lies below the others'."""

    def __init__(self, k: int, below: float) -> None:
        super().__init__()
        self.k = k
        with torch.no_grad():
            self.gate.bias[2] -= below

    def weigh(self, logits: Any) -> Any:
        return logits.softmax(-1).topk(self.k, -1)


@pytest.mark.parametrize(("k", "below"), sampled([(1, 8.0), (1, 3.0), (2, 30.0), (1, 30.0), (1, 1e4), (2, 8.0)], 2))
def test_an_expert_behind_a_guard_that_no_row_reaches_is_exported_and_named(k: int, below: float) -> None:
    """E10"""
    model = Guarded(k, below).eval()
    graph, report, *_ = exported(model)
    (found,) = report.blocks
    assert (found.k, found.score) == (k, "softmax") and 2 in (found.never_chosen if below >= 8 else [2])
    told = "expert 2 was not reached by any row; exported from its module" in str(report)
    assert told == (2 in found.untested)
    reaching = rows(4000, below * 2, 6)
    reaching = reaching[(model.gate(reaching).topk(k).indices == 2).any(1)][:64]
    assert len(reaching) >= 8
    equal(model, graph, reaching)


def test_experts_that_are_one_object_or_share_memory_are_exported() -> None:
    """E10"""
    tied, expanded, stack = moes.Variant(), moes.Variant(), moes.Param3d()
    tied.experts[2] = tied.experts[0]
    for expert in expanded.experts:
        expert.down.bias = nn.Parameter(torch.randn(1).expand(DIM))
    stack.w2 = nn.Parameter((torch.randn(1, moes.HIDDEN, DIM) * 0.3).expand(4, -1, -1))
    for model in (tied, expanded, stack):
        graph, *_ = exported(model.eval())
        assert len(list(graph.moe_nodes())) == 1
        equal(model, graph, rows(64, seed=3))
    assert tied.experts[2] is tied.experts[0] and stack.w2.stride(0) == 0


# --- several gates ----------------------------------------------------------------------------------------------------


class Tasks(nn.Module):
    """MMoE: the same experts, a gate and a tower for each task."""

    def __init__(self, tasks: int = 2) -> None:
        super().__init__()
        self.experts = moes.experts(4)
        self.gates = nn.ModuleList(nn.Linear(DIM, 4) for _ in range(tasks))
        self.towers = nn.ModuleList(nn.Linear(DIM, 1) for _ in range(tasks))

    def mixed(self, gate: Any, x: Any, given: Any) -> Any:
        return (given * gate(x).softmax(-1).unsqueeze(-1)).sum(1)

    def forward(self, x: Any) -> Any:
        given = torch.stack([expert(x) for expert in self.experts], 1)
        return tuple(t(self.mixed(g, x, given)) for g, t in zip(self.gates, self.towers, strict=True))


class SparseTasks(Tasks):
    """Two of the experts for each task."""

    def forward(self, x: Any) -> Any:
        results = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights, chosen = gate(x).softmax(-1).topk(2, -1)
            results.append(tower(moes.loop(x, chosen, weights, self.experts)))
        return tuple(results)


class OwnAndShared(Tasks):
    """PLE: shared experts and some of each task's own under one gate a task."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList(moes.experts(2) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(DIM, 6) for _ in range(2))

    def forward(self, x: Any) -> Any:
        shared, results = [expert(x) for expert in self.experts], []
        for own, gate, tower in zip(self.own, self.gates, self.towers, strict=True):
            results.append(tower(self.mixed(gate, x, torch.stack([*shared, *(e(x) for e in own)], 1))))
        return tuple(results)


@pytest.mark.parametrize(
    ("build", "mixtures"), sampled([(Tasks, 2), (OwnAndShared, 0), (lambda: SparseTasks(3), 3)], 2)
)
def test_experts_that_several_gates_share_are_exported_once(build: Any, mixtures: int) -> None:
    """E4"""
    model = build().eval()
    graph, report, *_ = exported(model)
    assert len(list(graph.moe_nodes())) == mixtures == len(report.blocks)
    assert sum(v.size for v in graph.constants.values()) == sum(p.numel() for p in model.parameters())
    assert not mixtures or f"{mixtures} mixtures share 4 experts" in str(report)
    equal(model, graph, rows(64, seed=3))


# --- register_moe -----------------------------------------------------------------------------------------------------


def test_register_moe_says_everything_a_router_can() -> None:
    """E2"""
    for build, claim in (
        (near.LargeEpsilon, {"k": 2, "normalize": "sum", "epsilon": 0.1}),
        (styles.BiasedSoftmax, {"k": 2, "normalize": "sum", "bias": "balance"}),
        (moes.ExpertScale, {"k": 2, "expert_scale": lambda block: block.scales}),
        (near.ConstantBias, {"k": 2, "bias": [1e-4, 0.0, -1e-4, 0.0]}),
        (moes.InputScaled, {"k": 1, "score": "sigmoid", "apply": "input"}),
        (styles.DeepSeekV2, {"k": 2, "groups": 3, "kept_groups": 2, "scale": 16.0}),
    ):
        model = build().eval()
        register_moe(model, experts="experts", gate="gate", **claim)
        graph, report, *_ = exported(model)
        assert report.blocks[0].registered
        equal(model, graph, rows(64, seed=3))
    wrong = near.LargeEpsilon().eval()
    register_moe(wrong, experts="experts", gate="gate", k=2, normalize="sum")
    with pytest.raises(ExportError, match=r"not what register_moe says.*relative error"):
        exported(wrong)


@pytest.mark.parametrize("score", [torch.sigmoid, lambda logits: logits.softmax(-1)])
def test_experts_chosen_by_scores_that_saturate_and_weighed_by_one_are_recognised(score: Any) -> None:
    """E1: logits made very large are equal as probabilities, which says nothing against a choice by logits."""

    class One(moes.Variant):
        def weigh(self, logits: Any) -> Any:
            p, chosen = score(logits).topk(2, -1)
            return torch.ones_like(p), chosen

    _, report, *_ = exported(One().eval())
    assert [(b.score, b.normalize) for b in report.blocks] == [("logit", "one")]
