"""However a Mixture of Experts is written, it exports: same outputs, same routes, same bits in C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402

from colibri import exporter  # noqa: E402
from colibri.frontends.torch.export import from_torch  # noqa: E402
from colibri.reference.interpreter import Trace, run  # noqa: E402
from colibri.runtime.engine import load  # noqa: E402
from tests.frontends.recognise import moe_near_misses as near  # noqa: E402
from tests.frontends.recognise import moe_styles as styles  # noqa: E402
from tests.frontends.recognise import user_moes as moes  # noqa: E402
from tests.frontends.sampling import sampled  # noqa: E402

torch.set_num_threads(1)

DIM = moes.DIM


def host(block: Any, width: int = DIM) -> Any:
    return moes.Host(block, width)


class Unpacked(torch.nn.Module):
    """The tensor of a block that returns a dictionary."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.inner = block

    def forward(self, x: Any) -> Any:
        return self.inner(x)["out"]


# name: module, shapes of its inputs, and (experts, k, score, normalize) of each block in order
Case = tuple[Callable[[], Any], list[tuple[int, ...]], list[tuple[int, int, str, str]]]
SEQUENCE = [(6, 3)]
TOP2 = (4, 2, "softmax", "none")

CASES: dict[str, Case] = {
    # dispatch
    "where": (lambda: host(moes.WhereLoop()), SEQUENCE, [(4, 2, "logit", "softmax")]),
    "boolean mask": (lambda: host(moes.BooleanMask()), SEQUENCE, [(3, 1, "softmax", "none")]),
    "one-hot": (lambda: host(moes.OneHotSigmoid()), SEQUENCE, [(4, 2, "sigmoid", "sum")]),
    "dense soft": (lambda: host(moes.DenseSoft(), 5), SEQUENCE, [(3, 3, "softmax", "none")]),
    "scatter -inf": (lambda: host(moes.ScatterInf()), SEQUENCE, [(4, 2, "logit", "softmax")]),
    "item": (lambda: host(moes.ItemIndex(), 5), SEQUENCE, [(3, 1, "logit", "one")]),
    "sorted": (lambda: host(styles.SortedDispatch()), SEQUENCE, [TOP2]),
    "einsum dispatch": (lambda: host(styles.EinsumDispatch()), SEQUENCE, [TOP2]),
    "rank loop": (lambda: host(styles.RankLoop()), SEQUENCE, [TOP2]),
    "index_put": (lambda: host(styles.IndexPut()), SEQUENCE, [TOP2]),
    "dense mask": (lambda: host(styles.DenseMask()), SEQUENCE, [TOP2]),
    "kth value": (lambda: host(styles.KthValue()), SEQUENCE, [(4, 2, "logit", "softmax")]),
    "expert hit": (lambda: host(styles.ExpertHit()), SEQUENCE, [(4, 2, "logit", "softmax")]),
    "token loop": (lambda: host(styles.TokenLoop()), SEQUENCE, [TOP2]),
    "switch": (lambda: host(styles.TopOneMax()), SEQUENCE, [(4, 1, "softmax", "none")]),
    # routers
    "DeepSeek-V3": (lambda: host(styles.DeepSeekV3()), SEQUENCE, [(8, 3, "sigmoid", "sum")]),
    "DeepSeek-V2": (lambda: host(styles.DeepSeekV2()), SEQUENCE, [(6, 2, "softmax", "none")]),
    "sum + epsilon": (lambda: host(styles.SumEpsilon()), SEQUENCE, [(4, 2, "sigmoid", "sum")]),
    "sum clamped": (lambda: host(styles.SumClamped()), SEQUENCE, [(4, 2, "sigmoid", "clamped")]),
    "sqrt softplus": (lambda: host(styles.SqrtSoftplus()), SEQUENCE, [(4, 2, "sqrt_softplus", "sum")]),
    "unscaled": (lambda: host(styles.Unscaled()), SEQUENCE, [(4, 2, "logit", "one")]),
    "sigmoid top-1": (lambda: host(styles.SigmoidTopOne()), SEQUENCE, [(4, 1, "sigmoid", "none")]),
    "biased softmax": (lambda: host(styles.BiasedSoftmax()), SEQUENCE, [(4, 2, "softmax", "sum")]),
    "selection bias": (lambda: host(moes.SelectionBias()), SEQUENCE, [TOP2]),
    "scale": (lambda: host(moes.Scaled()), SEQUENCE, [TOP2]),
    "expert scales": (lambda: host(moes.ExpertScale()), SEQUENCE, [TOP2]),
    "output scales": (lambda: host(styles.OutputScales()), SEQUENCE, [TOP2]),
    "scales in code": (lambda: host(styles.FixedScales()), SEQUENCE, [TOP2]),
    "softmax twice": (lambda: host(styles.RoutedOnProbabilities()), SEQUENCE, [(4, 2, "logit", "softmax")]),
    "weights on the input": (lambda: host(moes.InputScaled()), SEQUENCE, [(4, 1, "sigmoid", "none")]),
    # gates
    "two-layer gate": (lambda: host(moes.TwoLayerGate()), SEQUENCE, [(3, 1, "logit", "one")]),
    "normed gate": (lambda: host(moes.NormedGate()), SEQUENCE, [TOP2]),
    "temperature": (lambda: host(moes.Temperature()), SEQUENCE, [TOP2]),
    "cosine gate": (lambda: host(moes.CosineGate()), SEQUENCE, [TOP2]),
    "functional gate": (lambda: host(styles.FunctionalGate()), SEQUENCE, [TOP2]),
    "cosine with temperature": (lambda: host(styles.CosineTemperature()), SEQUENCE, [TOP2]),
    "network gate": (lambda: host(styles.NetworkGate()), SEQUENCE, [TOP2]),
    "partial gate": (lambda: host(styles.PartialGate()), SEQUENCE, [TOP2]),
    "attention gate": (lambda: host(styles.AttentionGate()), SEQUENCE, [TOP2]),
    "residual gate": (lambda: host(styles.ResidualGate()), SEQUENCE, [TOP2]),
    "clamped gate": (lambda: host(styles.Clamped()), SEQUENCE, [TOP2]),
    "late gate": (lambda: host(styles.LateGate()), SEQUENCE, [(4, 4, "softmax", "none")]),
    "two inputs": (lambda: styles.Pair(styles.TwoInputs(), DIM), [(6, 3), (6, 2)], [TOP2]),
    "logits given": (lambda: styles.Pair(styles.LogitsGiven(), 4), [(6, 3), (6, 2)], [TOP2]),
    # around
    "shared and residual": (lambda: host(moes.SharedResidual()), SEQUENCE, [TOP2]),
    "gated shared": (lambda: host(moes.GatedShared()), SEQUENCE, [TOP2]),
    "post norm": (lambda: host(styles.PostNorm()), SEQUENCE, [TOP2]),
    "post projection": (lambda: host(styles.PostProjection()), SEQUENCE, [TOP2]),
    "starts from shared": (lambda: host(styles.StartsFromShared()), SEQUENCE, [TOP2]),
    "starts from input": (lambda: host(styles.StartsFromInput()), SEQUENCE, [TOP2]),
    "adds in place": (lambda: host(styles.AddsInPlace()), SEQUENCE, [TOP2]),
    "weighted shared": (lambda: host(styles.WeightedShared()), SEQUENCE, [TOP2]),
    "bottleneck": (lambda: host(styles.Bottleneck()), SEQUENCE, [TOP2]),
    "with loss": (lambda: host(moes.WithLoss()), SEQUENCE, [TOP2]),
    "dictionary": (lambda: host(Unpacked(styles.ReturnsDict())), SEQUENCE, [TOP2]),
    "router and bank": (lambda: host(styles.RouterAndBank()), SEQUENCE, [(4, 2, "logit", "softmax")]),
    # experts
    "mixed experts": (lambda: host(styles.MixedExperts()), SEQUENCE, [TOP2]),
    "identity expert": (lambda: host(styles.IdentityExpert()), SEQUENCE, [TOP2]),
    "normed experts": (lambda: host(styles.NormedExperts()), SEQUENCE, [TOP2]),
    "sixteen experts": (lambda: host(styles.ManyExperts()), SEQUENCE, [(16, 4, "logit", "softmax")]),
    "one output": (lambda: host(styles.NarrowOutput(), 1), SEQUENCE, [(4, 4, "softmax", "none")]),
    "shared matrix": (lambda: host(near.SharedMatrix()), SEQUENCE, [TOP2]),
    "einsum gather": (lambda: host(moes.Param3d()), SEQUENCE, [TOP2]),
    "stacked with biases": (lambda: host(styles.Stacked()), SEQUENCE, [TOP2]),
    "gathered bmm": (lambda: host(styles.GatheredBmm()), SEQUENCE, [(4, 1, "sigmoid", "none")]),
    "einsum gated": (lambda: host(styles.EinsumGated()), SEQUENCE, [(4, 2, "logit", "softmax")]),
    "fused halves": (lambda: host(styles.FusedHalves()), SEQUENCE, [(4, 2, "logit", "softmax")]),
    "interleaved": (lambda: host(styles.Interleaved()), SEQUENCE, [(4, 2, "logit", "softmax")]),
    "matrix list": (lambda: host(styles.MatrixList(), 5), SEQUENCE, [(3, 1, "softmax", "none")]),
    "soft matrices": (lambda: host(styles.SoftMatrices(), 5), SEQUENCE, [(3, 3, "softmax", "none")]),
    # samples
    "per sample": (lambda: host(styles.PerSample()), SEQUENCE, [(3, 1, "softmax", "none")]),
    "sample experts": (lambda: styles.Alone(styles.SampleExperts()), [(6, DIM)], [(3, 2, "logit", "softmax")]),
    "capacity of a sample": (lambda: host(styles.SwitchCapacity()), SEQUENCE, [(4, 1, "softmax", "none")]),
    # hosts
    "alone on rows": (lambda: styles.Alone(moes.BooleanMask()), [(DIM,)], [(3, 1, "softmax", "none")]),
    "two layers": (
        lambda: styles.Tower(moes.WhereLoop(), moes.BooleanMask()), SEQUENCE,
        [(4, 2, "logit", "softmax"), (3, 1, "softmax", "none")],
    ),
    "image": (lambda: styles.Image(styles.RankLoop()), [(18,)], [TOP2]),
    "one after the other": (
        lambda: host(torch.nn.Sequential(moes.Temperature(), styles.Stacked())), SEQUENCE, [TOP2, TOP2]
    ),
    # nested
    "nested": (lambda: host(moes.Nested()), SEQUENCE, [TOP2] * 5),
}  # fmt: skip

RUNS_ALL = {"dense soft", "scatter -inf", "einsum dispatch", "dense mask", "kth value", "late gate", "one output",
            "expert hit"}  # experts see tokens that did not choose them, or rows of zeros  # fmt: skip


def inputs(shapes: list[tuple[int, ...]], count: int, seed: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, *shape, generator=generator) for shape in shapes)


class Choices(TorchFunctionMode):
    """The experts a block chooses, for blocks that do so by topk, max or argmax: index tensors, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("topk", "max", "argmax"):
            index = result if isinstance(result, torch.Tensor) else result[1]
            self.seen.append(index)
        return result


def rows_given(model: Any, path: str, x: tuple[Any, ...]) -> dict[int, Any]:
    """Which rows each expert of the block at `path` was called on."""
    block = model.get_submodule(path)
    given: dict[int, list[Any]] = {}
    hooks = []
    bank = next((m for m in block.modules() if isinstance(m, torch.nn.ModuleList | torch.nn.ModuleDict)
                 and m is not getattr(block, "shared", None)), None)  # fmt: skip
    children = list(bank.children()) if bank is not None else [block.expert_a, block.expert_b, block.expert_c]
    for n, expert in enumerate(children):
        hooks.append(expert.register_forward_pre_hook(lambda m, a, n=n: given.setdefault(n, []).append(a[0])))
    model(*x)
    for hook in hooks:
        hook.remove()
    return {n: rows for n, rows in given.items()}


@pytest.mark.parametrize("name", sampled(CASES, 3))
def test_style_exports_exactly(name: str) -> None:
    torch.manual_seed(0)
    build, shapes, expected = CASES[name]
    model = build().eval()
    graph, report, rows, _ = from_torch(model, inputs(shapes, 3, 0), calibration=[inputs(shapes, 8, 1)])
    found = [(b.experts, b.k, b.score, b.normalize) for b in report.blocks]
    assert found == expected
    for block in report.blocks:
        assert block.error <= 2e-5 and block.logits_error is not None and block.logits_error <= 2e-5
        assert block.tokens >= 256 and not block.untested
    assert len(list(graph.moe_nodes())) == len(expected)

    fresh = inputs(shapes, 16, 7)
    with torch.no_grad():
        theirs = torch.utils._pytree.tree_leaves(model(*fresh))
    trace = Trace()
    ours = run(graph, [x.numpy() for x in fresh], trace)
    for y, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(y, want.numpy(), rtol=0, atol=1e-5 * float(want.abs().max()))

    built = exporter.build(graph, calibration=rows, max_batch=4)
    result = load(built.image)(*(x.numpy() for x in fresh))
    for y, want in zip(result if isinstance(result, tuple) else (result,), run(built.graph, [x.numpy() for x in fresh]),
                       strict=True):  # fmt: skip
        assert y.tobytes() == want.tobytes()
    if name != "nested":
        same_routes(name, model, report, graph, trace, fresh)


def same_routes(name: str, model: Any, report: Any, graph: Any, trace: Trace, x: tuple[Any, ...]) -> None:
    """The experts PyTorch chose are those of the reference: by the experts' calls, or else by topk's indices."""
    for block, node, routes in zip(report.blocks, graph.moe_nodes(), trace.routes, strict=True):
        if block.body is not None:
            with Choices() as choices:
                model(*x)
            k = block.k
            picked = [c for c in choices.seen if c.numel() == routes.size]
            if k < block.experts:
                assert any((np.sort(c.reshape(-1, k)) == np.sort(routes.reshape(-1, k))).all() for c in picked)
            continue
        tokens = trace.values[node.inputs[0]].reshape(routes.shape[0] * routes.shape[1], -1)
        if node.attrs["router"].apply == "input" or name == "capacity of a sample":
            continue  # the experts' rows are scaled, or dropped: the outputs have shown that
        for e, given in rows_given(model, block.path, x).items():
            theirs = torch.cat([g.detach().reshape(-1, tokens.shape[1]) for g in given]).numpy()
            theirs = theirs[theirs.any(1)]
            chose = tokens[(routes.reshape(len(tokens), -1) == e).any(1)]
            if name not in RUNS_ALL:
                assert len(chose) == len(theirs)
            distance = np.abs(chose[:, None] - theirs[None]).max(-1) if len(chose) else np.zeros((0, 1))
            assert (distance.min(1) < 1e-4).all() if len(chose) else True


def test_every_form_of_experts_and_every_kind_of_router_is_in_the_table() -> None:
    assert len(CASES) >= 60
    kinds = {(score, normalize) for _, _, blocks in CASES.values() for _, _, score, normalize in blocks}
    assert {("softmax", "none"), ("logit", "softmax"), ("logit", "one"), ("sigmoid", "none"), ("sigmoid", "sum"),
            ("sigmoid", "clamped"), ("sqrt_softplus", "sum"), ("softmax", "sum")} <= kinds  # fmt: skip


def test_nested_mixtures_say_what_they_cost() -> None:
    torch.manual_seed(0)
    _, report, *_ = from_torch(host(moes.Nested()), inputs(SEQUENCE, 3, 0))
    (warning,) = report.warnings
    assert "moe (Nested)" in warning and "all its 4 experts run for every token" in warning
    assert [block.path for block in report.blocks] == ["moe", *(f"moe.experts.{n}" for n in range(4))]
