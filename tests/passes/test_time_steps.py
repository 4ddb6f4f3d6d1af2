"""Models exported with `stream` give, step by step, what the whole sequence's model gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import colibri  # noqa: E402
from colibri._engine import lib  # noqa: E402
from colibri.errors import ExportError  # noqa: E402
from colibri.format import spec  # noqa: E402
from colibri.frontends.torch.export import from_torch  # noqa: E402
from colibri.passes import optimize  # noqa: E402
from colibri.passes.stream import stream  # noqa: E402
from colibri.reference.interpreter import run  # noqa: E402
from tests.frontends.torch.small_models import Moe  # noqa: E402
from tests.frontends.torch.test_operators import Call  # noqa: E402

torch.set_num_threads(1)


class Forecast(nn.Module):
    """A GRU, an MoE on each of its states, and the step before beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.moe, self.head = nn.GRU(3, 8, 2, batch_first=True), Moe(8, k=2), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return self.head(self.moe(self.gru(x)[0])) + before[..., :2]


class Tcn(nn.Module):
    """Causal dilated convolutions, padded on both sides and cut, with residuals of other delays."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(2, 6, 3, padding=4, dilation=2), nn.Conv1d(6, 6, 2, groups=6)
        self.skip, self.norm, self.moe = nn.Conv1d(2, 6, 1), nn.BatchNorm1d(6), Moe(6)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.norm(self.a(x)[:, :, :-4])) + self.skip(x)
        h = h + self.b(F.pad(h, (1, 0)))
        return self.moe(h.transpose(1, 2)).transpose(1, 2)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {  # make, shape, axis, latency
    "gru and experts": (Forecast, (12, 3), 1, 0),
    "lstm": (lambda: Call(lambda s, x: s.rnn(x)[0], rnn=nn.LSTM(3, 5, batch_first=True, proj_size=4)), (9, 3), 1, 0),
    "convolutions": (Tcn, (2, 20), 2, 0),
    "centred window": (lambda: nn.Sequential(nn.Conv1d(3, 4, 5, padding=2), nn.Tanh()), (3, 15), 2, 2),
    "moving average": (lambda: Call(lambda x: x[:, 4:] - F.avg_pool1d(x.transpose(1, 2), 5, 1).transpose(1, 2)),
                       (14, 2), 1, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_stream_gives_what_the_sequence_gives(name: str, tmp_path: Path) -> None:
    make, shape, axis, latency = MODELS[name]
    torch.manual_seed(0)
    module = make().eval()
    x = torch.randn(3, *shape)
    colibri.export(module, x, tmp_path, stream=axis)
    model = colibri.load(tmp_path)
    assert list(model.latency.values()) == [latency]
    with torch.no_grad():
        whole = module(x).movedim(axis, 1).numpy()
    for sequence, expected in zip(x.movedim(axis, 1).numpy(), whole, strict=True):
        model.reset()
        pieces = [model(sequence[:1]), model(sequence[1:5]), model(sequence[5:])]  # a call goes on where one ended
        got = np.concatenate(pieces)[latency:]
        assert len(got) >= 7
        np.testing.assert_allclose(got, expected[: len(got)], rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_stream_goes_back_to_its_beginning_only(tmp_path: Path) -> None:
    """B6: its firmware has no records to look for how far its past reaches."""
    x = torch.randn(1, 9, 3)
    colibri.export(Forecast().eval(), x, tmp_path, stream=1)
    model = colibri.load(tmp_path)
    model(x[0].numpy())
    ((_, ctx, _),) = model._contexts
    assert ctx.position == 9
    assert lib.colibri_lm_rewind(ctx, 8) == spec.error_code("REWIND") and ctx.position == 9
    assert lib.colibri_lm_rewind(ctx, 0) == 0 and ctx.position == 0


def test_last_state_is_of_the_moment_itself(tmp_path: Path) -> None:
    module = Call(
        lambda s, x: s.head(s.rnn(x)[0][:, -1]), rnn=nn.GRU(3, 5, batch_first=True), head=nn.Linear(5, 2)
    ).eval()
    x = torch.randn(2, 8, 3)
    colibri.export(module, x, tmp_path, stream=1)
    model = colibri.load(tmp_path)
    with torch.no_grad():
        for n in (1, 4, 8):
            model.reset()
            np.testing.assert_allclose(model(x[0, :n].numpy())[-1], module(x[:1, :n])[0].numpy(), atol=1e-6)


def test_engine_gives_the_reference_bits_and_a_stream_has_no_end(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, x = Tcn().eval(), torch.randn(2, 2, 20)
    imported = from_torch(module, x)
    graph, _ = stream(optimize(imported.graph), 1)
    colibri.export(module, x, tmp_path, stream=2)
    model = colibri.load(tmp_path)
    rows = np.random.default_rng(0).standard_normal((60, 2)).astype(np.float32)
    expected = run(graph, [rows])[0]
    assert model(rows[:20]).tobytes() == expected[:20].tobytes()
    context = model._contexts[0][1]
    context.position += spec.LIMIT // 4 * 3 - 1024  # a multiple of all ring sizes, as if after so many calls
    context.position += 1024 - 40
    got = np.concatenate([model(rows[20 + n : 21 + n]) for n in range(40)])
    assert got.tobytes() == expected[20:].tobytes()
    assert context.position < spec.LIMIT // 2


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "the future": (lambda: Call(lambda s, x: s.rnn(x)[0], rnn=nn.GRU(3, 4, batch_first=True, bidirectional=True)),
                   (6, 3), "runs backwards"),
    "the whole": (lambda: Call(lambda x: x - x.mean(1, keepdim=True)), (6, 3), "whole sequence"),
    "attention": (lambda: Call(lambda x: F.scaled_dot_product_attention(x, x, x)), (6, 3), "matmul"),
    "positions": (lambda: Call(lambda s, x: x + s.p, p=nn.Parameter(torch.randn(6, 3))), (6, 3), "position"),
    "strides": (lambda: Call(lambda x: x[:, ::2]), (6, 3), "one rate"),
    "flat": (lambda: Call(lambda s, x: s.head(x.flatten(1)), head=nn.Linear(18, 2)), (6, 3), "joins the axis of time"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_more_than_the_past_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, shape, words = REFUSED[name]
    with pytest.raises(ExportError, match=words):
        colibri.export(make(), torch.randn(2, *shape), tmp_path, stream=1)
    assert not list(tmp_path.iterdir())
