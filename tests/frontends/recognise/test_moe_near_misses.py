"""What looks like a common Mixture of Experts and is none: exported exactly, or refused, never taken for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from colibri.errors import ExportError  # noqa: E402
from colibri.frontends.torch.export import from_torch  # noqa: E402
from colibri.reference.interpreter import run  # noqa: E402
from tests.frontends.recognise import moe_near_misses as near  # noqa: E402
from tests.frontends.recognise import user_moes as moes  # noqa: E402
from tests.frontends.sampling import sampled  # noqa: E402

torch.set_num_threads(1)


def rows(count: int, seed: int) -> Any:
    return torch.randn(count, 6, 3, generator=torch.Generator().manual_seed(seed))


def host(block: Any) -> Any:
    torch.manual_seed(0)
    model = moes.Host(block())
    return model.eval()


# Exported exactly: the router that was found has what is easily overlooked.
EXACT: list[tuple[Any, dict[str, Any]]] = [
    (moes.Temperature, {"scale": 1.0}),
    (moes.CosineGate, {"scale": 1.0}),
    (moes.ExpertScale, {"expert_scale": (1.0, 1.0, 1.001, 1.0)}),
    (moes.SelectionBias, {"bias": (1e-6, 0.0, 0.0, -1e-6)}),
    (moes.InputScaled, {"apply": "input"}),
    (moes.GatedShared, {"scale": 1.0}),
    (near.StraightThrough, {"normalize": "one"}),
    (near.AlmostScale, {"scale": 1.0001}),
    (near.LargeEpsilon, {"epsilon": 0.1}),
    (near.ParameterBias, {"bias": (1e-4, 0.0, 0.0, -2e-4)}),
    (near.Worst, {"score": "softmax"}),
    (near.ByNeighbour, {"scale": 1.0}),
    (near.SharedMatrix, {"scale": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("block", "router"), sampled(EXACT, 2), ids=[block.__name__ for block, _ in EXACT])
def test_near_miss_is_expressed_exactly(block: Any, router: dict[str, Any]) -> None:
    model = host(block)
    graph, report, *_ = from_torch(model, rows(3, 0), calibration=rows(32, 1))
    (node,) = graph.moe_nodes()
    for name, value in router.items():
        found = getattr(node.attrs["router"], name)
        assert found == (value if isinstance(value, str) else pytest.approx(value, rel=1e-6))
    assert report.blocks[0].error <= 2e-5 and report.blocks[0].logits_error <= 2e-5
    x = rows(64, 7)
    with torch.no_grad():
        expected = model(x).numpy()
    np.testing.assert_allclose(run(graph, [x.numpy()])[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# Refused: the message has the path, what is not understood, and a way out.
REFUSED: list[tuple[Any, str]] = [
    (moes.Threshold, "no router reproduces it; the nearest is top-2 of 4"),
    (moes.TopP, "no router reproduces it; the nearest is top-"),
    (moes.Capacity, "the output of a sample depends on other samples"),
    (moes.EvalNoise, "its output is random in eval mode"),
    (moes.BatchSoftmax, "the output of a sample depends on other samples"),
    (near.Squared, "no router reproduces it; the nearest is top-2 of 4"),
    (near.AlmostOne, "no router reproduces it; the nearest is top-2 of 4, score logit, normalize one"),
    (near.Tanh, "no router reproduces it"),
    (near.FixedByRank, "no router reproduces it"),
    (near.SometimesNormalised, "no router reproduces it; the nearest is top-2 of 4"),
    (near.Floor, "no router reproduces it; the nearest is top-2 of 4, score softmax"),
    (near.DropsLow, "no router reproduces it; the nearest is top-2 of 4, score softmax"),
    (near.InputDependentScale, "no router reproduces it; the nearest is top-2 of 4, score softmax"),
    (near.NormOfExperts, "its output is no weighted sum of what the 4 experts give"),
    (near.ConstantBias, "no router reproduces it; the nearest is top-2 of 4"),
    (near.AttributeBias, "it looks like top-2 of 4, score softmax.*but also depends on a tensor"),
    (near.ByMagnitude, "no router reproduces it"),
    (near.Hashed, "nothing gives one logit for each of the 2 experts"),
    (near.ByPosition, "moe"),
    (near.SwitchBatch, "the output of a sample depends on other samples"),
    (near.GShardCapacity, "no router reproduces it.*its tokens depend on the other tokens of their sample"),
    (near.DropsToInput, "no weighted sum of what the 4 experts give; its tokens depend on the other tokens"),
    (near.ExpertChoice, "moe"),
    (near.RandomSecond, "its output is random in eval mode"),
    (near.DropoutAlways, "its output is random in eval mode"),
    (near.LoadBalancing, "its output is random in eval mode"),
    (near.TiedExpert, "its output is no weighted sum of what the 4 experts give"),
    (near.AlmostGelu, "moe"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "why"), sampled(REFUSED, 2), ids=[block.__name__ for block, _ in REFUSED])
def test_near_miss_is_refused_by_name(block: Any, why: str) -> None:
    with pytest.raises(ExportError, match=f"(?s){why}") as failure:
        from_torch(host(block), rows(3, 0), calibration=rows(32, 1))
    text = str(failure.value)
    assert "moe" in text and ("register_moe" in text or "write" in text or "take the noise out" in text)
    report = failure.value.report
    assert report is not None and not report.blocks


# Neither: what runs all its experts is a plain program, and exported as one.
PLAIN = [near.Product, near.SoftSlots, near.Vmapped]


@pytest.mark.parametrize("block", PLAIN, ids=[block.__name__ for block in PLAIN])
def test_what_is_no_mixture_is_a_plain_program_or_refused(block: Any) -> None:
    model = host(block)
    try:
        graph, report, *_ = from_torch(model, rows(3, 0), calibration=rows(32, 1))
    except ExportError as error:
        assert "moe" in str(error) or "batch sizes" in str(error)
        return
    assert not report.blocks and not list(graph.moe_nodes())
    x = rows(16, 7)
    with torch.no_grad():
        expected = model(x).numpy()
    np.testing.assert_allclose(run(graph, [x.numpy()])[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
