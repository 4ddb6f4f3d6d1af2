"""Plain PyTorch programs: each operation exports exactly or is refused by name, and the module stays as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from colibri.errors import ExportError  # noqa: E402
from colibri.frontends.torch.export import from_pt2, from_torch, register_moe  # noqa: E402
from colibri.reference.interpreter import run  # noqa: E402
from tests.frontends.recognise import user_moes as moes  # noqa: E402
from tests.frontends.sampling import sampled  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Program(nn.Module):
    """A function of (self, inputs…) as a module with `layers` and a few constants."""

    def __init__(self, body: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.body = body
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.w = nn.Parameter(torch.randn(6, 4))
        self.v = nn.Parameter(torch.randn(6))
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.register_buffer("mask", torch.linspace(0.5, 2, 30).view(1, 5, 6))

    def forward(self, *inputs: Any) -> Any:
        return self.body(self, *inputs)


def warmed(norm: Any) -> Any:
    """A batch norm with statistics and weights worth folding."""
    for tensor in (norm.running_mean, norm.running_var, norm.weight.data, norm.bias.data):
        tensor.copy_(torch.rand_like(tensor) + 0.5)
    return norm


def unary(m: Any, x: Any) -> list[Any]:
    p = x.abs() + 0.1
    functions = [
        F.relu, F.leaky_relu, lambda t: F.leaky_relu(t, 0.2), F.hardtanh, F.relu6, lambda t: t.clamp(-0.3, 0.7),
        lambda t: t.clamp(min=0.1), lambda t: t.clamp(max=0.2), torch.sigmoid, torch.tanh, F.silu, F.gelu,
        lambda t: F.gelu(t, approximate="tanh"), F.elu, lambda t: F.elu(t, 0.5), F.selu, lambda t: F.celu(t, 2.0),
        F.softplus, F.mish, F.hardswish, F.hardsigmoid, torch.exp, torch.expm1, torch.erf, torch.neg, torch.abs,
        torch.square, lambda t: t**2, lambda t: t**3,
    ]  # fmt: skip
    positive = [torch.log, torch.log1p, torch.sqrt, torch.rsqrt, torch.reciprocal, lambda t: t**0.5, lambda t: t**-1.0]
    return [f(x) for f in functions] + [f(p) for f in positive]


def binary(m: Any, x: Any) -> list[Any]:
    y = x.abs() + 0.5
    return [
        x + y, x - y, x * y, x / y, torch.maximum(x, y), torch.minimum(x, y), torch.add(x, y, alpha=0.3),
        torch.sub(x, m.v, alpha=2), x + 1, 1 - x, 2.5 * x, x / 3, 1 / y, torch.rsub(x, 2.0), x * m.v, x * m.mask,
        m.token + x, x * y.mean(-1, keepdim=True), x - x.amax(dim=(1, 2), keepdim=True), x + torch.ones_like(x),
        x + x.new_zeros(x.shape[0], 1, 6) + 1,
    ]  # fmt: skip


def shapes(m: Any, x: Any) -> list[Any]:
    a, b, c = x.chunk(3, -1)
    parts = x.split([2, 3], 1)
    return [
        x.flatten(1), x.view(x.shape[0], 3, 10), x.transpose(1, 2), x.permute(0, 2, 1).contiguous(), x[:, 1:4],
        x[:, -1], x[:, ::2, 1], x[..., None], x.unsqueeze(1).squeeze(1), a + b - c, parts[1], x.select(2, 3),
        x.narrow(1, 2, 2), torch.cat([x, x * 2], 1), torch.stack([x, x + 1], 1), torch.stack([a, b], -1),
        x[:, :1].expand(-1, 4, -1), torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1), x.unbind(1)[2],
        x.reshape(-1, 6)[:, 1:3].view(x.shape[0], 5, 2), x.mT, x.clone().detach().to(torch.float32),
        F.dropout(x, 0.5, False), x.view(-1, 3, 2).transpose(1, 2).reshape(x.shape[0], 30),
    ]  # fmt: skip


def reductions(m: Any, x: Any) -> list[Any]:
    return [
        x.mean(1), x.mean(-1, keepdim=True), x.sum((1, 2)), x.sum(-1), x.amax(1), x.max(2).values, x.mean((-2, -1)),
        x.var(1), x.std(-1, correction=0), F.normalize(x, dim=-1), x.norm(p=1, dim=1), x.softmax(-1), x.softmax(1),
        (x * 60).log_softmax(-1), x.log_softmax(1), x.view(-1, 6).softmax(-1), x.flatten(0, 1).mean(-1),
    ]  # fmt: skip


def products(m: Any, x: Any) -> list[Any]:
    return [
        x @ m.w, x.view(-1, 6) @ m.w, x @ m.v, m.mask[0, :, :5] @ x, F.linear(x, m.w.T), F.linear(x, m.w.T, m.v[:4]),
        torch.addmm(m.v[:4], x.view(-1, 6), m.w), torch.mm(x[:, 0], m.w), m.layer(x), m.layer(x.view(-1, 6)),
    ]  # fmt: skip


def norms(m: Any, x: Any) -> list[Any]:
    return [m.ln(x), m.plain(x), m.rms(x), m.bare(x), m.sequence(x), m.tokens(x.view(-1, 6)), m.features(x[:, 0])]


NORMS = {
    "ln": nn.LayerNorm(6), "plain": nn.LayerNorm(6, elementwise_affine=False, eps=1e-3), "rms": nn.RMSNorm(6),
    "bare": nn.RMSNorm(6, elementwise_affine=False, eps=0.1), "sequence": warmed(nn.BatchNorm1d(5)),
    "tokens": warmed(nn.BatchNorm1d(6)), "features": nn.BatchNorm1d(6, affine=False),
}  # fmt: skip

GROUPS = [
    (unary, {}), (binary, {}), (shapes, {}), (reductions, {}), (products, {"layer": nn.Linear(6, 3)}), (norms, NORMS)
]  # fmt: skip


def expected(model: Any, *inputs: Any) -> list[Any]:
    with torch.no_grad():
        leaves = torch.utils._pytree.tree_leaves(model.eval()(*inputs))
        return [y.numpy() for y in leaves if y is not None]


@pytest.mark.parametrize(("body", "layers"), GROUPS, ids=[g[0].__name__ for g in GROUPS])
def test_operations_compute_what_torch_computes(body: Any, layers: dict[str, Any]) -> None:
    model = Program(body, **layers)
    graph, report, *_ = from_torch(model, torch.randn(3, 5, 6))
    x = torch.randn(7, 5, 6)
    results, wanted = run(graph, [x.numpy()]), expected(model, x)
    assert len(results) == len(wanted) and report.error <= 1e-5
    for n, (ours, theirs) in enumerate(zip(results, wanted, strict=True)):
        worst = np.abs(ours.reshape(theirs.shape) - theirs).max() / np.abs(theirs).max()
        assert worst <= 1e-5, f"output {n} of {body.__name__}: {worst:.1e}"


def test_several_inputs_and_outputs_keep_their_order() -> None:
    def body(m: Any, a: Any, b: Any) -> Any:
        return {"sum": a + b.mean(1), "rest": [m.layer(b), (b[:, 0], None)]}

    model = Program(body, layer=nn.Linear(6, 2))
    graph, *_ = from_torch(
        model, (torch.randn(2, 6), np.zeros((2, 5, 6), np.float32)), (torch.randn(4, 6), torch.randn(4, 5, 6))
    )
    a, b = torch.randn(3, 6), torch.randn(3, 5, 6)
    for ours, theirs in zip(run(graph, [a.numpy(), b.numpy()]), expected(model, a, b), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert [graph.shapes[name] for name in graph.inputs] == [(6,), (5, 6)]


def test_constants_carry_their_parameter_names() -> None:
    graph, *_ = from_torch(nn.Sequential(nn.Linear(6, 3), nn.ReLU()), torch.randn(1, 6))
    assert set(graph.constants) == {"0.weight", "0.bias"}
    assert [(n.op, n.attrs.get("func")) for n in graph.nodes] == [("linear", None), ("unary", "relu")]


def test_dead_code_need_not_be_supported() -> None:
    from_torch(Program(lambda m, x: (x.topk(2).values, x + 1)[1]), torch.randn(2, 6))


@pytest.mark.parametrize("kind", [torch.float64, torch.float16])
def test_other_float_types_are_converted_with_a_warning(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 3)).to(kind)
    _, report, *_ = from_torch(model, torch.randn(2, 6))
    assert report.warnings == [f"the module holds {str(kind)[6:]}; converted to float32"]
    assert model[0].weight.dtype == kind


# --- refusals ---------------------------------------------------------------------------------------------------------


def item(m: Any, x: Any) -> Any:
    return x * 2 if float(x.sum()) > 0 else x


REFUSED: list[tuple[str, Callable[..., Any], dict[str, Any], str]] = [
    ("layer", lambda m, x: m.inner(x[:, None, :, :, None]), {"inner": nn.Conv3d(1, 1, 1)},
     "^inner: aten.conv3d is not supported"),
    ("sine", lambda m, x: torch.sin(x), {}, "^the module: aten.sin is not supported"),
    ("topk", lambda m, x: m.inner(x).topk(2).values, {"inner": nn.Linear(6, 4)},
     "^the module: aten.topk is not supported here.*register_moe.*densely"),
    ("mean over the batch", lambda m, x: x - x.mean(0), {}, "aten.mean works along axis 0, the batch"),
    ("softmax over the batch", lambda m, x: x.softmax(0), {}, "aten._softmax works along axis 0"),
    ("sum of everything", lambda m, x: x - x.sum(), {}, "aten.sum works along axis 0"),
    ("softmax over merged rows", lambda m, x: x.view(-1, 6).softmax(0), {}, "aten._softmax works along axis 0"),
    ("one sample", lambda m, x: x + x[:1], {}, "aten.slice mixes samples"),
    ("first sample", lambda m, x: x + x[0], {}, "aten.select works along axis 0"),
    ("batch last", lambda m, x: x.transpose(0, 1), {}, "has the batch in axis 1; return it with the batch in axis 0"),
    ("batch concatenated", lambda m, x: torch.cat([x, x]), {}, "joins batches one after the other"),
    ("matrix over the batch", lambda m, x: x.sum((1, 2)) * x.sum((1, 2)).softmax(-1), {}, "works along axis 0"),
    ("batch size", lambda m, x: x / x.shape[0], {}, "aten.div uses a number computed from the data"),
    ("loop over rows", lambda m, x: torch.stack([m.v * r for r in x]), {}, "only works for some batch sizes"),
    ("branch on rows", lambda m, x: x if x.shape[0] > 7 else 2 * x, {}, "only works for some batch sizes"),
    ("one size apart", lambda m, x: x if x.shape[0] == 40 else 2 * x, {}, "only works for some batch sizes"),
    ("batch statistics", lambda m, x: F.batch_norm(x, None, None, training=True), {}, "batch_norm.*uses the stat"),
    ("value in Python", item, {}, "^the module: .Program. cannot be traced by torch.export: GuardOnDataDependent"),
    ("random", lambda m, x: x + torch.randn_like(x), {}, "aten.randn_like is random, also in eval mode"),
    ("dropout left on", lambda m, x: F.dropout(x, 0.5, True), {}, "random|dropout"),
    ("float64 inside", lambda m, x: (x.double() * 2).float(), {}, "_to_copy gives float64; only float32"),
    ("integers out", lambda m, x: x.argmax(-1), {}, "aten.argmax is not supported"),
    ("index of max", lambda m, x: x.max(-1)[1] * 1.0, {}, "aten.max: result 1 is not supported"),
    ("power", lambda m, x: x**2.5, {}, "aten.pow is not supported with exponent 2.5"),
    ("softplus", lambda m, x: F.softplus(x, beta=2.0), {}, "aten.softplus is only supported with beta 1"),
    ("rounding", lambda m, x: torch.div(x, 2, rounding_mode="floor"), {}, "aten.div is not supported with these"),
    ("constant out", lambda m, x: (x, m.v), {}, "does not depend on the input"),
    ("fails itself", lambda m, x: x @ m.v[:3], {}, "^the module: .Program. cannot be run on these inputs"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "layers", "why"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_cannot_be_exported_is_refused_by_name(body: Any, layers: dict[str, Any], why: str) -> None:
    with pytest.raises(ExportError, match=why):
        from_torch(Program(body, **layers), torch.randn(3, 5, 6))


def test_state_kept_between_calls_is_refused() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            self.count += 1
            return x * self.count

    model = Counter()
    with pytest.raises(ExportError, match="count"):
        from_torch(model, torch.randn(2, 6))
    assert model.count == 0


def test_batch_against_sequence_is_refused() -> None:
    """(3, 3, 6) + (3, 6): torch would add sample j's row to sequence position j."""
    with pytest.raises(ExportError, match="batch"):
        from_torch(Program(lambda m, x: x + x.mean(1)), torch.randn(3, 3, 6))


@pytest.mark.parametrize(
    ("inputs", "calibration", "why"),
    [
        (torch.zeros(2, 6, dtype=torch.bool), None, "input 0 is bool; give floats or integers"),
        (torch.full((2, 6), (1 << 24) + 1), None, "input 0 holds integers beyond 2.24"),
        ("text", None, "input 0 is a str"),
        (torch.tensor(1.0), None, "the first axis must be the batch"),
        ((), None, "no input given"),
        ((torch.zeros(2, 6), torch.zeros(3, 6)), None, "different batch sizes"),
        (torch.zeros(2, 6), 3, "calibration is a int"),
        (torch.zeros(2, 6), [torch.zeros(2, 5)], "cannot be run on these inputs"),
    ],
)
def test_unusable_inputs_are_refused(inputs: Any, calibration: Any, why: str) -> None:
    with pytest.raises(ExportError, match=why):
        from_torch(Program(lambda m, x, *rest: x * m.v), inputs, calibration)


# --- the module stays as it was ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [moes.BooleanMask, moes.Threshold], ids=["exported", "refused"])
def test_module_is_untouched(block: Any) -> None:
    model = moes.Host(block()).train()
    model.norm.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.random.get_rng_state()
    if block is moes.BooleanMask:
        from_torch(model, torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(0)))
    else:
        with pytest.raises(ExportError):
            from_torch(model, torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(generator, torch.random.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(
        "forward" not in m.__dict__ and not m._forward_hooks and not m._forward_pre_hooks for m in model.modules()
    )
    assert model.training and model.moe.training and not model.norm.training
    assert all(p.requires_grad for p in model.parameters())


# --- saved programs ---------------------------------------------------------------------------------------------------


def saved(path: Path, model: Any, x: Any, dynamic: bool = True) -> Path:
    free = ({0: torch.export.Dim.AUTO},) if dynamic else None
    torch.export.save(torch.export.export(model.eval(), (x,), dynamic_shapes=free), path)
    return path


@pytest.mark.parametrize(("block", "k"), [(moes.WhereLoop, 2), (moes.ScatterInf, 2)])
def test_moe_in_a_saved_program_is_recognised(tmp_path: Path, block: Any, k: int) -> None:
    model = moes.Host(block())
    graph, report, *_ = from_pt2(saved(tmp_path / "model.pt2", model, torch.randn(3, 6, 3)))
    (found,) = report.blocks
    assert (found.path, found.kind, found.k) == ("moe", block.__name__, k)
    x = torch.randn(5, 6, 3)
    np.testing.assert_allclose(run(graph, [x.numpy()])[0], expected(model, x)[0], atol=1e-5)


def test_saved_program_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"torch\.export cannot load it"):
        from_pt2(tmp_path / "missing.pt2")


@pytest.mark.parametrize(
    ("block", "batch"),
    sampled(itertools.product([moes.WhereLoop, moes.OneHotSigmoid, moes.DenseSoft], [1, 2, 4]), 2),
)
def test_a_batch_size_fixed_in_a_saved_program_is_made_free(tmp_path: Path, block: Any, batch: int) -> None:
    torch.manual_seed(batch)
    model = moes.Host(block(), 5) if block is moes.DenseSoft else moes.Host(block())
    graph, report, *_ = from_pt2(saved(tmp_path / "fixed.pt2", model, torch.randn(batch, 6, 3), dynamic=False))
    assert [found.path for found in report.blocks] == ["moe"]
    x = torch.randn(5, 6, 3)
    np.testing.assert_allclose(run(graph, [x.numpy()])[0], expected(model, x)[0], atol=1e-5)


def test_a_saved_program_that_mixes_rows_is_refused(tmp_path: Path) -> None:
    model = Program(lambda m, x: x - x.mean(0, keepdim=True))
    with pytest.raises(ExportError, match="batch"):
        from_pt2(saved(tmp_path / "mean.pt2", model, torch.randn(3, 6), dynamic=False))


def test_registered_block_can_hold_experts_of_different_kinds() -> None:
    class Slope(moes.Mlp):
        def __init__(self, slope: float) -> None:
            super().__init__()
            self.slope = slope

        def forward(self, x: Any) -> Any:
            return self.down(F.leaky_relu(self.up(x), self.slope))

    block = moes.BooleanMask()
    block.experts = nn.ModuleList(Slope(s) for s in (0.1, 0.2, 0.3))
    register_moe(block, experts="experts", gate=lambda b: b.router, k=1)
    graph, report, *_ = from_torch(block, torch.randn(4, 8))
    (node,) = graph.moe_nodes()
    assert report.blocks[0].registered
    assert [e.nodes[1].attrs["alpha"] for e in node.attrs["experts"]] == [0.1, 0.2, 0.3]
