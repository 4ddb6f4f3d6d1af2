"""Thirteen kinds of small models, as people write them, each with its feed-forward part made a Mixture of Experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Moe(nn.Module):
    """Top-k of the softmax over a linear gate, experts of two layers, tokens along the last axis."""

    def __init__(self, width: int, hidden: int = 24, experts: int = 4, k: int = 1, out: int = 0) -> None:
        super().__init__()
        self.k, self.out = k, out or width
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, self.out)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.k, -1)
        out = tokens.new_zeros(len(tokens), self.out)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out.index_add_(0, token, weights[token, slot, None] * expert(tokens[token]))
        return out.view(*x.shape[:-1], self.out)


class MlpBatchNorm(nn.Module):
    shape = (20,)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2))
        self.moe, self.head = Moe(32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(self.stem(x))).log_softmax(-1)


class Cnn1d(nn.Module):
    shape = (3, 60)

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(3, 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(8, 16, 3, stride=2, padding=1), nn.BatchNorm1d(16), nn.ELU(), nn.MaxPool1d(3, 2, 1),
            nn.Conv1d(16, 16, 3, groups=4, bias=False), nn.LeakyReLU(0.1), nn.AdaptiveAvgPool1d(3),
        )  # fmt: skip
        self.moe, self.head = Moe(48, k=2), nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(self.features(x).flatten(1)))


class DepthwiseSeparable(nn.Module):
    shape = (2, 16, 12)

    def __init__(self) -> None:
        super().__init__()

        def block(a: int, b: int, stride: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(a, a, 3, stride, 1, groups=a, bias=False), nn.BatchNorm2d(a), nn.ReLU6(),
                nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b), nn.Hardswish(),
            )  # fmt: skip

        self.stem = nn.Sequential(nn.Conv2d(2, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6())
        self.blocks = nn.Sequential(block(8, 12, 1), block(12, 16, 2))
        self.moe, self.head = Moe(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(self.stem(x))
        h = self.moe(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # every pixel a token
        return self.head(F.adaptive_avg_pool2d(h, 1).flatten(1))


class Gru(nn.Module):
    shape = (14, 5)

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 12, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.moe, self.head = Moe(24), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, last = self.gru(x)
        return self.head(self.moe(states)[:, -1] + torch.cat([last[-2], last[-1]], -1))


class LstmAutoencoder(nn.Module):
    shape = (10, 4)

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(4, 16, batch_first=True)
        self.decoder = nn.LSTM(8, 16, batch_first=True, proj_size=6)
        self.moe, self.squeeze, self.out = Moe(16), nn.Linear(16, 8), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, _) = self.encoder(x)
        code = self.squeeze(self.moe(h[-1])).unsqueeze(1).repeat(1, x.shape[1], 1)
        return self.out(self.decoder(code)[0])


class _EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=batch_first)
        self.norm1, self.norm2, self.moe = nn.LayerNorm(width), nn.LayerNorm(width), Moe(width, k=2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        z = self.norm1(x)
        x = x + self.attention(z, z, z, attn_mask=mask, need_weights=False)[0]
        return x + self.moe(self.norm2(x))


class TransformerEncoder(nn.Module):
    """One layer with the batch first, one with the steps first, and PyTorch's own layer."""

    shape = (9, 6)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.positions = nn.Parameter(torch.randn(9, 16) * 0.1)
        self.first, self.second = _EncoderLayer(16, 4, True), _EncoderLayer(16, 2, False)
        self.plain = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.embed(x) + self.positions)
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1])
        h = self.second(h.transpose(0, 1), mask).transpose(0, 1)
        return self.head(self.plain(h).mean(1))


class Tcn(nn.Module):
    """Causal dilated convolutions with residuals."""

    shape = (4, 40)

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(4 if n == 0 else 12, 12, 3, dilation=2**n) for n in range(3))
        self.skip, self.moe, self.head = nn.Conv1d(4, 12, 1), Moe(12), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        for n, conv in enumerate(self.convs):
            y = F.relu(conv(F.pad(x, (2 * 2**n, 0))))
            x = y + (self.skip(x) if n == 0 else x)
        return self.head(self.moe(x.transpose(1, 2))[:, -1])


class DLinear(nn.Module):
    """A moving average splits trend and season; reversible instance normalisation around."""

    shape = (48, 3)

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(3) + 0.5), nn.Parameter(torch.randn(3))
        self.season, self.trend = Moe(48, out=12), nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = x.mean(1, keepdim=True), torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
        z = ((x - mean) / deviation * self.scale + self.shift).transpose(1, 2)
        ends = z[:, :, :1].repeat(1, 1, 12), z[:, :, -1:].repeat(1, 1, 12)
        trend = F.avg_pool1d(torch.cat([ends[0], z, ends[1]], -1), 25, 1)
        y = (self.season(z - trend) + self.trend(trend)).transpose(1, 2)
        return (y - self.shift) / self.scale * deviation + mean


class TsMixer(nn.Module):
    shape = (24, 6)

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm([24, 6]), nn.BatchNorm1d(24)
        self.time, self.features = nn.Linear(24, 24), Moe(6)
        self.head = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.relu(self.time(self.norm1(x).transpose(1, 2))).transpose(1, 2)
        x = x + self.features(self.norm2(x))
        return self.head(x.transpose(1, 2)).transpose(1, 2)


class PatchTst(nn.Module):
    """Channels are independent: merged with the batch; patches are the tokens."""

    shape = (4, 48)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(12, 16), nn.Parameter(torch.randn(1, 8, 16) * 0.1)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm, self.moe, self.head = nn.BatchNorm1d(16), Moe(16), nn.Linear(8 * 16, 6)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, _ = x.shape
        patches = F.pad(x, (0, 6), mode="replicate").unfold(-1, 12, 6)
        h = self.embed(patches.reshape(batch * channels, -1, 12)) + self.positions
        q, k, v = self.qkv(h).view(batch * channels, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        h = h + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch * channels, 8, 16))
        h = h + self.moe(h)
        return self.head(h.flatten(1)).view(batch, channels, 6)


class EmbeddingMlp(nn.Module):
    """Categories and numbers, two inputs."""

    shape = ((3,), (5,))
    categories = (7, 4, 12)

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 6) for n in self.categories)
        self.bag = nn.Embedding(12, 4, padding_idx=0)
        self.moe, self.head = Moe(27, k=2), nn.Linear(27, 2)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        rows = [table(ids[:, n]) for n, table in enumerate(self.tables)]
        bag = self.bag(ids).mean(1)
        return self.head(self.moe(torch.cat([*rows, bag, numbers], -1)))


class LlamaLike(nn.Module):
    """RMSNorm, rotary embedding, grouped queries, causal attention; ids in, logits out."""

    shape = ((8,),)
    categories = (30,) * 8

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.q, self.kv, self.out = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.moe = Moe(16, k=2)
        angles = torch.outer(torch.arange(8.0), 10000 ** (-torch.arange(0, 4, 2) / 4))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        z = self.norm1(h)
        q = self.q(z).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(z).unflatten(-1, (4, 4)).transpose(1, 2).chunk(2, 1)
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        h = h + self.out(
            F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return self.head(h + self.moe(self.norm2(h)))


class UNet1d(nn.Module):
    shape = (2, 32)

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv1d(2, 8, 3, padding=1), nn.Conv1d(8, 12, 4, stride=2, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.GroupNorm(3, 12)
        self.moe = Moe(12)
        self.up1, self.up2 = nn.ConvTranspose1d(12, 8, 4, stride=2, padding=1), nn.ConvTranspose1d(16, 6, 3, padding=1)
        self.odd, self.out = nn.ConvTranspose1d(6, 6, 3, 2, 1, output_padding=1, groups=3), nn.Conv1d(6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.norm1(self.down1(x)))
        b = F.silu(self.norm2(self.down2(a)))
        b = b + self.moe(b.transpose(1, 2)).transpose(1, 2)
        up = torch.cat([self.up1(b), a], 1)
        return self.out(F.max_pool1d(F.relu(self.odd(F.mish(self.up2(up)))), 2))


MODELS: list[type[nn.Module]] = [
    MlpBatchNorm, Cnn1d, DepthwiseSeparable, Gru, LstmAutoencoder, TransformerEncoder, Tcn, DLinear, TsMixer, PatchTst,
    EmbeddingMlp, LlamaLike, UNet1d,
]  # fmt: skip


def inputs(model: Any, count: int, seed: int) -> tuple[Tensor, ...]:
    """Random inputs: ids where the model has categories, else numbers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = model.shape if isinstance(model.shape[0], tuple) else (model.shape,)
    rows: list[Tensor] = []
    for n, shape in enumerate(shapes):
        if n == 0 and hasattr(model, "categories"):
            most = torch.tensor(model.categories)
            rows.append((torch.rand(count, *shape, generator=generator) * most).long())
        else:
            rows.append(torch.randn(count, *shape, generator=generator))
    return tuple(rows)


def trained(make: Callable[[], nn.Module]) -> nn.Module:
    """The module with batch norms that have seen data."""
    torch.manual_seed(0)
    model = make()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
            assert m.running_mean is not None and m.running_var is not None
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
    return model.eval()
