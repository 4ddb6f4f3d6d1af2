"""MoE blocks: what is recognised, what must not be, and what register_moe may claim."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from colibri.errors import ExportError  # noqa: E402
from colibri.frontends.torch.export import from_torch, register_moe  # noqa: E402
from colibri.reference.interpreter import run  # noqa: E402
from tests.frontends.recognise import user_moes as moes  # noqa: E402

torch.set_num_threads(1)


def host(block: Any, width: int = moes.DIM) -> Any:
    return moes.Host(block, width)


def rows(count: int = 3, seed: int = 0) -> Any:
    return torch.randn(count, 6, 3, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# block, output width, then k, score, normalize, what gives the logits, and what else the report says
STYLES: list[tuple[type, int, tuple[int, str, str, str], dict[str, Any]]] = [
    (moes.WhereLoop, 8, (2, "logit", "softmax", "gate"), {}),
    (moes.BooleanMask, 8, (1, "softmax", "none", "router"), {}),
    (moes.OneHotSigmoid, 8, (2, "sigmoid", "sum", "gate"), {}),
    (moes.DenseSoft, 5, (3, "softmax", "none", "gate"), {}),
    (moes.ScatterInf, 8, (2, "logit", "softmax", "w_gate"), {}),
    (moes.ItemIndex, 5, (1, "logit", "one", "gate"), {}),
    (moes.SharedResidual, 8, (2, "softmax", "none", "gate_weight"), {"input": "norm", "after": ["shared", "add x"]}),
    (moes.TwoLayerGate, 8, (1, "logit", "one", "gate.2"), {}),
    (moes.Scaled, 8, (2, "softmax", "none", "gate"), {"scale": 2.5}),
    (moes.NormedGate, 8, (2, "softmax", "none", "gate"), {}),
    (moes.WithLoss, 8, (2, "softmax", "none", "gate"), {}),
    (moes.Temperature, 8, (2, "softmax", "none", "div(gate)"), {}),
    (moes.ExpertScale, 8, (2, "softmax", "none", "gate"), {"router": ["a scale an expert"]}),
]  # fmt: skip


@pytest.mark.parametrize(("block", "width", "router", "rest"), STYLES, ids=[s[0].__name__ for s in STYLES])
def test_report_says_what_a_block_was_taken_for(block: Any, width: int, router: Any, rest: dict[str, Any]) -> None:
    model = host(block(), width).eval()
    graph, report, *_ = from_torch(model, rows(), calibration=[rows(4, 1), rows(2, 2)])
    (found,) = report.blocks
    assert (found.k, found.score, found.normalize, found.gate) == router
    assert found.path == "moe" and found.error <= 2e-5 and found.tokens >= 1000
    plain = {"input": "x", "after": [], "scale": 1.0, "router": [], "unit": "token", "body": None, "registered": False}
    assert {key: getattr(found, key) for key in plain} == plain | rest
    (node,) = graph.moe_nodes()
    assert node.attrs["router"].k == router[0] and node.attrs["router"].scale == found.scale


def test_block_alone_is_recognised_as_the_whole_module() -> None:
    graph, report, *_ = from_torch(moes.BooleanMask(), torch.randn(4, moes.DIM))
    assert report.blocks[0].path == "" and [node.op for node in graph.nodes] == ["linear", "moe"]


@pytest.mark.parametrize("size", [1e-3, 100, 1e4])
def test_block_is_recognised_beside_a_residual_of_any_size(size: float) -> None:
    _, report, *_ = from_torch(moes.SharedResidual(), size * torch.randn(8, moes.DIM))
    assert report.blocks[0].after == ["shared", "add x"]


def test_a_recognised_soft_mixture_is_no_fallback() -> None:
    graph, report, *_ = from_torch(host(moes.DenseSoft(), 5), rows())
    assert not report.warnings and report.blocks[0].k == report.blocks[0].experts == 3
    assert len(list(graph.moe_nodes())) == 1


def test_dense_fallback_says_what_it_costs() -> None:
    class Squared(moes.DenseSoft):
        def forward(self, x: Any) -> Any:
            weights = self.gate(x).softmax(-1).square()
            return (weights.unsqueeze(-1) * torch.stack([e(x) for e in self.experts], -2)).sum(-2)

    graph, report, *_ = from_torch(host(Squared(), 5), rows())
    assert not report.blocks and not list(graph.moe_nodes())
    (warning,) = report.warnings
    each = 8 * 12 + 12 * 5
    assert "moe (Squared)" in warning and "all 3 experts" in warning and "no router reproduces it" in warning
    assert f"{3 * each:,}" in warning and f"about {each:,}" in warning


def test_experts_never_chosen_are_reported() -> None:
    block = moes.BooleanMask()
    with torch.no_grad():
        block.router.bias[1] = -1e9
    _, report, *_ = from_torch(host(block), rows())
    assert report.blocks[0].never_chosen and report.blocks[0].untested == [1]
    assert "not even by random tokens: experts 1" in str(report)


def test_report_is_text_and_json() -> None:
    _, report, *_ = from_torch(host(moes.SharedResidual()), rows())
    text = str(report)
    assert "moe (SharedResidual): 4 experts, top-2 a token" in text and "then shared, add x" in text
    assert json.loads(json.dumps(report.to_dict()))["blocks"][0]["after"] == ["shared", "add x"]


# --- what is left -----------------------------------------------------------------------------------------------------


def test_second_result_of_a_block_is_refused_when_it_is_an_output() -> None:
    class First(moes.Variant):
        def forward(self, x: Any) -> Any:
            return super().forward(x), self.experts[0](x)

    with pytest.raises(ExportError, match="second result of a Mixture-of-Experts block"):
        from_torch(First(), torch.randn(4, moes.DIM))


def test_logits_are_a_result_like_any_other() -> None:
    class Logits(moes.Variant):
        def forward(self, x: Any) -> Any:
            return super().forward(x), self.gate(x)

    graph, *_ = from_torch(Logits(), torch.randn(4, moes.DIM))
    assert len(graph.outputs) == 2 and len(list(graph.moe_nodes())) == 1


def test_ties_everywhere_are_not_identified() -> None:
    block = moes.BooleanMask()
    torch.nn.init.zeros_(block.router.weight)
    torch.nn.init.zeros_(block.router.bias)
    with pytest.raises(ExportError, match="BooleanMask"):
        from_torch(host(block), rows())


# --- register_moe -----------------------------------------------------------------------------------------------------


def slices(block: Any) -> list[Any]:
    return [moes.UnusualSlice(block, n) for n in range(4)]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_registered_block_is_exported_after_verification(kind: Any) -> None:
    model = host(moes.Unusual()).to(kind)
    register_moe(model.moe, experts=slices, gate="gate", k=2)
    graph, report, *_ = from_torch(model, rows())
    (found,) = report.blocks
    assert found.registered and found.error <= 2e-5 and len(list(graph.moe_nodes())) == 1


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        ({"gate": "gate", "k": 1}, "not what register_moe says.*relative error is"),
        ({"gate": "gate", "k": 2, "normalize": "sum"}, "relative error is"),
        ({"gate": "gate", "k": 2, "residual": True}, "relative error is"),
        ({"gate": "nothing", "k": 2}, "register_moe does not fit this block: AttributeError"),
        ({"gate": "gate", "k": 5}, "k = 5 must be between 1 and the 4 experts"),
    ],
)
def test_wrong_claim_is_refused_with_the_measured_error(claim: dict[str, Any], why: str) -> None:
    model = host(moes.Unusual())
    register_moe(model.moe, experts=slices, **claim)
    with pytest.raises(ExportError, match=why) as failure:
        from_torch(model, rows())
    assert "moe (Unusual)" in str(failure.value)


def test_claim_about_a_class_and_a_stochastic_block() -> None:
    class Noisy(moes.EvalNoise):
        pass

    register_moe(Noisy, experts="experts", gate="gate", k=2)
    with pytest.raises(ExportError, match="its output is random in eval mode"):
        from_torch(host(Noisy()), rows())


def test_experts_that_random_rows_never_reach_are_found_with_the_models_own() -> None:
    block = moes.BooleanMask()  # calls an expert only where a row has chosen it
    with torch.no_grad():
        block.router.bias.copy_(torch.tensor([400.0, 0, 0]))
        block.router.weight[1:] = 60 * torch.eye(moes.DIM)[:2]
    real = torch.cat([torch.randn(20, moes.DIM), 10 * torch.eye(moes.DIM)[:2].repeat(4, 1)])
    assert set(block.router(torch.randn(48, moes.DIM)).argmax(-1).tolist()) == {0}
    _, report, *_ = from_torch(block, real[:4], calibration=real)
    (found,) = report.blocks
    assert (found.k, found.score, found.never_chosen) == (1, "softmax", [])


def test_a_block_may_have_the_steps_before_the_batch() -> None:
    class StepsFirst(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe, self.head = moes.WhereLoop(), torch.nn.Linear(moes.DIM, 2)

        def forward(self, x: Any) -> Any:
            return self.head(self.moe(x.transpose(0, 1).contiguous()).transpose(0, 1))

    model, x = StepsFirst().eval(), torch.randn(3, 5, moes.DIM)
    graph, report, *_ = from_torch(model, x, calibration=[torch.randn(6, 5, moes.DIM)])
    assert [b.path for b in report.blocks] == ["moe"]
    with torch.no_grad():
        np.testing.assert_allclose(run(graph, [x.numpy()])[0], model(x).numpy(), atol=1e-6)
