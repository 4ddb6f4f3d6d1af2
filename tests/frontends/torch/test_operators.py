"""Single operations and layers against PyTorch, alone and where the batch is merged or moved; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from colibri import exporter  # noqa: E402
from colibri.errors import ExportError  # noqa: E402
from colibri.frontends.torch.export import from_torch  # noqa: E402
from colibri.reference.interpreter import run  # noqa: E402
from colibri.runtime import engine  # noqa: E402

torch.set_num_threads(1)

FEW = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])


class Call(nn.Module):
    """A function of tensors as a module, with the modules it uses."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *x: Any) -> Any:
        return self.function(self, *x) if self._modules or self._parameters or self._buffers else self.function(*x)


def check(module: nn.Module, *shapes: tuple[int, ...], ids: int = 0) -> Any:
    """Export, compare with PyTorch, and the engine with the reference; returns the optimised graph."""
    generator = torch.Generator().manual_seed(3)

    def rows(n: int) -> tuple[Any, ...]:
        if ids:
            return tuple(torch.randint(0, ids, (n, *shape), generator=generator) for shape in shapes)
        return tuple(torch.randn(n, *shape, generator=generator) for shape in shapes)

    module.eval()
    imported = from_torch(module, rows(3))
    export = exporter.build(imported.graph, max_batch=4, calibration=imported.rows)
    fresh = rows(5)
    with torch.no_grad():
        expected = module(*fresh)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    inputs = [x.to(torch.float32).numpy() for x in fresh]
    reference = run(export.graph, inputs)
    got = engine.load(export.image)(*inputs)
    for want, ours, have in zip(expected, reference, got if isinstance(got, tuple) else (got,), strict=True):
        np.testing.assert_allclose(ours, want.numpy(), rtol=0, atol=1e-5 * max(1e-30, float(want.abs().max())))
        assert have.tobytes() == ours.tobytes()
    if not ids:
        beside_what_is_not_finite(module, export, *shapes)
    return export.graph


SPIKES = (float("nan"), float("inf"), -float("inf"))


def beside_what_is_not_finite(module: nn.Module, export: Any, *shapes: tuple[int, ...]) -> None:
    """E8: what PyTorch keeps finite beside a NaN or an infinity stays as it is.

    Of attention PyTorch's plain kernel is the measure, and NaN alone: the others give 0 for a query that is NaN, and
    all of them for one whose scores are -inf throughout.
    """
    attends = any(isinstance(m, nn.MultiheadAttention) for m in module.modules())
    names = getattr(getattr(module, "function", None), "__code__", None)
    attends |= getattr(module, "function", None) is F.scaled_dot_product_attention
    attends |= names is not None and "scaled_dot_product_attention" in names.co_names
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(12, *shape, generator=generator) for shape in shapes]
    for n in range(12):
        flat = rows[n % len(rows)][n].view(-1)
        flat[torch.randint(flat.numel(), (1,), generator=generator)] = SPIKES[0 if attends else n % 3]
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = module(*(x.clone() for x in rows))
    with np.errstate(all="ignore"):
        reference = run(export.graph, [x.numpy() for x in rows])
    got = engine.load(export.image)(*(x.numpy() for x in rows))
    wanted = expected if isinstance(expected, tuple) else (expected,)
    for want, ours, have in zip(wanted, reference, got if isinstance(got, tuple) else (got,), strict=True):
        finite = torch.isfinite(want).numpy()
        size = float(np.abs(want.numpy()[finite]).max(initial=0))
        np.testing.assert_allclose(ours[finite], want.numpy()[finite], rtol=0, atol=1e-5 * max(1e-30, size))
        assert have.tobytes() == ours.tobytes()


Case = tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]
M = Call
CASES: dict[str, Case] = {
    "conv1d": (lambda: nn.Conv1d(3, 5, 3), ((3, 11),)),
    "conv1d same": (lambda: nn.Conv1d(3, 5, 4, padding="same", dilation=2), ((3, 11),)),
    "conv1d strided": (lambda: nn.Conv1d(4, 6, 5, 3, 4, 2, bias=False), ((4, 23),)),
    "conv1d grouped": (lambda: nn.Conv1d(6, 9, 3, groups=3), ((6, 9),)),
    "conv1d depthwise": (lambda: nn.Conv1d(6, 12, 3, padding=1, groups=6), ((6, 9),)),
    "conv1d in one": (lambda: nn.Conv1d(7, 4, 1), ((7, 5),)),
    "conv2d": (lambda: nn.Conv2d(2, 5, 3, padding=1), ((2, 6, 7),)),
    "conv2d strided": (lambda: nn.Conv2d(3, 4, (3, 2), (2, 1), (1, 0)), ((3, 9, 6),)),
    "conv2d dilated": (lambda: nn.Conv2d(2, 4, 3, dilation=(2, 3), padding=3), ((2, 7, 8),)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 4, 3, 2, 1, groups=4), ((4, 7, 6),)),
    "conv2d grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), ((4, 5, 6),)),
    "conv, norm, activation": (
        lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 3)), ((3, 12),)),
    "transposed": (lambda: nn.ConvTranspose1d(3, 5, 4, 2, 1), ((3, 6),)),
    "transposed, sparse": (lambda: nn.ConvTranspose1d(3, 5, 2, 3, output_padding=1), ((3, 6),)),
    "transposed, dilated": (lambda: nn.ConvTranspose1d(4, 6, 3, 2, 2, 1, groups=2, dilation=2), ((4, 5),)),
    "transposed depthwise": (lambda: nn.ConvTranspose1d(4, 8, 3, 2, 1, 1, groups=4), ((4, 5),)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(3, 4, (3, 2), (2, 3), (1, 0), (1, 2)), ((3, 4, 3),)),
    "max pool": (lambda: nn.MaxPool1d(3, 2, 1), ((4, 9),)),
    "max pool, ceil": (lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), ((2, 8, 7),)),
    "max pool, dilated": (lambda: nn.MaxPool1d(3, 1, 0, 2), ((4, 9),)),
    "average pool": (lambda: nn.AvgPool1d(3, 3), ((4, 10),)),
    "average pool, padded": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), ((2, 7, 6),)),
    "average pool, ceil": (lambda: nn.AvgPool2d(2, 2, ceil_mode=True), ((2, 7, 5),)),
    "adaptive average": (lambda: nn.AdaptiveAvgPool1d(4), ((3, 10),)),
    "adaptive average 2d": (lambda: nn.AdaptiveAvgPool2d((2, 1)), ((3, 6, 5),)),
    "adaptive max": (lambda: nn.AdaptiveMaxPool1d(3), ((3, 7),)),
    "group norm": (lambda: nn.GroupNorm(2, 6), ((6, 5),)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), ((4, 9),)),
    "layer norm over two axes": (lambda: nn.LayerNorm([4, 5]), ((3, 4, 5),)),
    "constant pad": (lambda: M(lambda x: F.pad(x, (1, 2, 0, 3), value=1.5)), ((4, 5),)),
    "negative pad": (lambda: M(lambda x: F.pad(x, (-1, 2))), ((4, 5),)),
    "reflection": (lambda: nn.ReflectionPad1d((2, 3)), ((2, 6),)),
    "replication 2d": (lambda: nn.ReplicationPad2d((1, 2, 0, 1)), ((2, 4, 3),)),
    "circular": (lambda: M(lambda x: F.pad(x, (2, 1), mode="circular")), ((2, 6),)),
    "circular conv": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), ((2, 6),)),
    "nearest": (lambda: nn.Upsample(scale_factor=2), ((3, 5),)),
    "nearest 2d": (lambda: nn.UpsamplingNearest2d((6, 9)), ((2, 3, 3),)),
    "gru": (lambda: M(lambda s, x: s.rnn(x)[0], rnn=nn.GRU(3, 5, batch_first=True)), ((7, 3),)),
    "gru, both results": (lambda: M(lambda s, x: (s.rnn(x)[0], s.rnn(x)[1][-1]), rnn=nn.GRU(3, 5, 2, False, True)),
                          ((7, 3),)),
    "gru, both ways": (lambda: M(lambda s, x: s.rnn(x)[0], rnn=nn.GRU(3, 5, 2, batch_first=True, bidirectional=True)),
                       ((7, 3),)),
    "gru from a state": (lambda: M(lambda s, x, h: s.rnn(x, h.unsqueeze(0))[0], rnn=nn.GRU(3, 5, batch_first=True)),
                         ((7, 3), (5,))),
    "lstm": (lambda: M(lambda s, x: s.rnn(x)[0][:, -1], rnn=nn.LSTM(3, 5, batch_first=True)), ((6, 3),)),
    "lstm, projected": (lambda: M(lambda s, x: s.rnn(x)[0], rnn=nn.LSTM(3, 6, 2, False, True, proj_size=4)), ((6, 3),)),
    "lstm cell state": (lambda: M(lambda s, x: s.rnn(x)[1][1][0], rnn=nn.LSTM(3, 5, batch_first=True)), ((6, 3),)),
    "lstm, steps first": (
        lambda: M(lambda s, x: s.rnn(x.transpose(0, 1))[0].transpose(0, 1), rnn=nn.LSTM(3, 5, bidirectional=True)),
        ((6, 3),)),
    "rnn, tanh": (lambda: M(lambda s, x: s.rnn(x)[0], rnn=nn.RNN(3, 5, batch_first=True)), ((6, 3),)),
    "rnn, relu": (lambda: M(lambda s, x: s.rnn(x)[0], rnn=nn.RNN(3, 5, nonlinearity="relu", batch_first=True)),
                  ((6, 3),)),
    "gru on merged rows": (
        lambda: M(lambda s, x: s.rnn(x.flatten(0, 1).unsqueeze(-1))[0].unflatten(0, (-1, 4)),
                  rnn=nn.GRU(1, 3, batch_first=True)), ((4, 6),)),
    "attention": (lambda: M(F.scaled_dot_product_attention), ((2, 5, 4), (2, 7, 4), (2, 7, 3))),
    "attention, causal": (lambda: M(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3)),
                          ((5, 4),)),
    "attention, mask": (
        lambda: M(lambda s, q: F.scaled_dot_product_attention(q, q, q, attn_mask=s.mask),
                  mask=nn.Buffer(torch.eye(5).bool() | (torch.arange(5) < 3))), ((2, 5, 4),)),
    "attention, groups": (lambda: M(lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True)),
                          ((4, 5, 6), (2, 5, 6))),
    "multi-head": (lambda: M(lambda s, x: s.layer(x, x, x)[0], layer=nn.MultiheadAttention(8, 2, batch_first=True)),
                   ((5, 8),)),
    "multi-head, weights": (
        lambda: M(lambda s, x, y: s.attention(x, y, y), attention=nn.MultiheadAttention(8, 2, batch_first=True)),
        ((5, 8), (4, 8))),
    "multi-head, steps first": (
        lambda: M(lambda s, x: s.attention(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0].transpose(0, 1),
                  attention=nn.MultiheadAttention(8, 2)), ((5, 8),)),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), ((5, 8),)),
    "transformer layer, steps first": (
        lambda: M(lambda s, x: s.layer(x.transpose(0, 1)).transpose(0, 1), layer=nn.TransformerEncoderLayer(8, 2, 16)),
        ((5, 8),)),
    "bmm": (lambda: M(lambda a, b: torch.bmm(a, b)), ((3, 5), (5, 4))),
    "matmul of stacks": (lambda: M(lambda a, b: a @ b.mT), ((2, 3, 5), (2, 4, 5))),
    "matmul, broadcast": (lambda: M(lambda a, b: a.unsqueeze(1) @ b), ((3, 5), (2, 5, 4))),
    "constant matrices": (lambda: M(lambda s, x: x[:, None] @ s.w, w=nn.Parameter(torch.randn(4, 5, 3))), ((2, 5),)),
    "constant on the left": (lambda: M(lambda s, x: s.w @ x, w=nn.Parameter(torch.randn(6, 5))), ((5, 3),)),
    "einsum": (lambda: M(lambda s, x: torch.einsum("btd,edh->bteh", x, s.w), w=nn.Parameter(torch.randn(3, 5, 4))),
               ((2, 5),)),
    "einsum of values": (lambda: M(lambda a, b: torch.einsum("bid,bjd->bij", a, b)), ((4, 5), (3, 5))),
    "baddbmm": (lambda: M(lambda a, b, c: torch.baddbmm(a, b, c, beta=0.5, alpha=2)), ((3, 4), (3, 5), (5, 4))),
    "masked fill": (lambda: M(lambda s, x: x.masked_fill(s.mask, -5), mask=nn.Buffer(torch.eye(4).bool())), ((4, 4),)),
    "where": (lambda: M(lambda s, x: torch.where(s.mask, x, 0.0), mask=nn.Buffer(torch.eye(4).bool())), ((4, 4),)),
    "triangle": (lambda: M(lambda x: torch.tril(x, -1)), ((4, 5),)),
    "flip": (lambda: M(lambda x: x.flip(1)), ((4, 5),)),
    "roll": (lambda: M(lambda x: x.roll((2, -1), (1, 2))), ((4, 5),)),
    "index": (lambda: M(lambda x: x[:, [3, 0, 1, 1]]), ((4, 5),)),
    "index select": (lambda: M(lambda s, x: x.index_select(2, s.order), order=nn.Buffer(torch.tensor([2, 3, 0]))),
                     ((4, 5),)),
    "repeat": (lambda: M(lambda x: x.repeat(1, 2, 3)), ((2, 3),)),
    "repeat interleave": (lambda: M(lambda x: x.repeat_interleave(3, 1)), ((2, 3),)),
    "class token": (lambda: M(lambda s, x: torch.cat([s.token.expand(x.shape[0], -1, -1), x], 1),
                              token=nn.Parameter(torch.randn(1, 1, 5))), ((3, 5),)),
    "batches joined and taken apart": (
        lambda: M(lambda x: torch.cat([x, 2 * x]).unflatten(0, (2, -1)).permute(1, 0, 2)), ((3,),)),
    "stack": (lambda: M(lambda x, y: torch.stack([x, y], 1)), ((3,), (3,))),
    "cumulative sum": (lambda: M(lambda x: x.cumsum(1)), ((6, 3),)),
    "least": (lambda: M(lambda x: (x.amin(1), x.min(2)[0])), ((4, 5),)),
    "logsumexp": (lambda: M(lambda x: torch.logsumexp(x * 30, 1)), ((4, 5),)),
    "cosine": (lambda: M(lambda x, y: F.cosine_similarity(x, y, -1)), ((4, 5), (4, 5))),
    "glu": (lambda: M(lambda x: F.glu(x)), ((3, 8),)),
    "prelu": (lambda: nn.PReLU(3), ((3, 5),)),
    "log sigmoid": (lambda: nn.LogSigmoid(), ((3, 5),)),
    "powers": (lambda: M(lambda x: x**4 + x**3), ((5,),)),
    "steps in front": (lambda: M(lambda x: (x.transpose(0, 1) * x.mean(1) + x[:, 0]).transpose(0, 1).softmax(1)),
                       ((4, 3),)),
    "patches": (lambda: M(lambda x: x.unfold(-1, 4, 2)), ((3, 12),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operation_matches_pytorch_and_its_engine_the_reference(name: str) -> None:
    torch.manual_seed(0)
    make, shapes = CASES[name]
    check(make(), *shapes)


IDS: dict[str, Case] = {
    "embedding": (lambda: nn.Embedding(9, 4), ((5,),)),
    "one a row": (lambda: M(lambda s, x: s.table(x[:, 1]), table=nn.Embedding(9, 4)), ((3,),)),
    "shifted": (lambda: M(lambda s, x: s.table(x + 2), table=nn.Embedding(11, 4)), ((3,),)),
    "one-hot": (lambda: M(lambda x: F.one_hot(x, 9).float() * 2), ((3,),)),
    "table by index": (lambda: M(lambda s, x: s.table[x], table=nn.Parameter(torch.randn(9, 2, 3))), ((4,),)),
}  # fmt: skip


@pytest.mark.parametrize("name", IDS)
def test_integers_choose_rows(name: str) -> None:
    torch.manual_seed(0)
    make, shapes = IDS[name]
    check(make(), *shapes, ids=9)


def test_float_columns_may_be_ids() -> None:
    table = nn.Embedding(6, 3)
    module = Call(lambda s, x: torch.cat([s.table(x[:, 0].long()), x[:, 1:]], -1), table=table)
    rows = torch.cat([torch.randint(0, 6, (8, 1)).float(), torch.randn(8, 2)], -1)
    graph, *_ = from_torch(module, rows)
    with torch.no_grad():
        np.testing.assert_array_equal(run(graph, [rows.numpy()])[0], module(rows).numpy())


@given(st.data())
@FEW
def test_any_convolution_matches(data: Any) -> None:
    any_convolution(data)


@pytest.mark.slow
@given(st.data())
@settings(FEW, max_examples=60)
def test_any_of_many_convolutions_matches(data: Any) -> None:
    any_convolution(data)


def any_convolution(data: Any) -> None:
    space, groups = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    size, step, apart = ([draw(1, 3) for _ in range(space)] for _ in range(3))
    pads = [draw(0, 2) for _ in range(space)]
    long = [(k - 1) * a + draw(1, 5) for k, a in zip(size, apart, strict=True)]
    channels, out = groups * draw(1, 3), groups * draw(1, 3)
    transposed = data.draw(st.booleans())
    torch.manual_seed(draw(0, 100))
    kinds: Any = {
        (1, False): nn.Conv1d,
        (2, False): nn.Conv2d,
        (1, True): nn.ConvTranspose1d,
        (2, True): nn.ConvTranspose2d,
    }
    more: dict[str, Any] = {"dilation": apart, "groups": groups, "bias": data.draw(st.booleans())}
    if transposed:
        more["output_padding"] = [draw(0, max(s, a) - 1) for s, a in zip(step, apart, strict=True)]
        pads = [min(p, ((n - 1) * s + (k - 1) * a) // 2)
                for p, n, s, k, a in zip(pads, long, step, size, apart, strict=True)]  # fmt: skip
    check(kinds[space, transposed](channels, out, size, step, pads, **more), (channels, *long))


def test_convolution_keeps_channels_last_and_norm_and_activation_in_its_product() -> None:
    graph = check(nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 3)), (3, 12))
    ops = [node.op for node in graph.nodes if node.op not in ("reshape", "window", "transpose")]
    assert ops == ["linear", "linear"] and sum(node.op == "transpose" for node in graph.nodes) == 2


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "statistics of the batch": (lambda: M(lambda x: x - x.mean(0)), (4,), "the batch"),
    "attention over the batch": (lambda: M(lambda s, x: s.a(x, x, x)[0], a=nn.MultiheadAttention(4, 1)), (3, 4),
                                 "batch"),
    "recurrence over the batch": (lambda: M(lambda s, x: s.rnn(x)[0], rnn=nn.GRU(4, 4)), (3, 4), "batch"),
    "samples joined": (lambda: M(lambda x: x.reshape(1, -1)), (4,), "axis 1"),
    "batch turned away": (lambda: M(lambda x: x.transpose(0, 1)), (4,), "axis 1"),
    "integers cut": (lambda: M(lambda x: x.long() * 2), (4,), "cuts floats"),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 4, 4), "upsample_bilinear2d"),
    "three dimensions": (lambda: nn.Conv3d(1, 1, 2), (1, 4, 4, 4), "conv3d"),
    "data-dependent mask": (lambda: M(lambda x: torch.where(x > 0, x, 0.0)), (4,), "aten."),
    "sorting": (lambda: M(lambda x: x.sort(-1)[0]), (4,), "sort"),
    "sine": (lambda: M(torch.sin), (4,), "aten.sin"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(name: str) -> None:
    make, shape, words = REFUSED[name]
    with pytest.raises(ExportError) as refused:
        from_torch(make(), torch.randn(3, *shape))
    assert words in str(refused.value)


def test_a_recurrence_for_too_large_a_batch_says_so() -> None:
    module = Call(lambda s, x: s.rnn(x)[0], rnn=nn.GRU(2, 512, batch_first=True)).eval()
    graph, *_ = from_torch(module, torch.randn(2, 20, 2))
    with pytest.raises(ExportError, match=r"20 steps .* for 60000 samples at once .*: lower max_batch"):
        exporter.build(graph, max_batch=60000)
