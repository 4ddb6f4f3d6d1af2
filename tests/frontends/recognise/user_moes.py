"""Mixture-of-Experts blocks as people write them by hand, and near misses that must not be taken for one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIM, HIDDEN = 8, 12


class Mlp(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = HIDDEN, out: int = DIM) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Gated(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def experts(count: int, out: int = DIM) -> nn.ModuleList:
    return nn.ModuleList(Mlp(out=out) for _ in range(count))


def loop(tokens: Tensor, chosen: Tensor, weights: Tensor, bank: nn.ModuleList) -> Tensor:
    """Each expert on the tokens that chose it, added up by index."""
    out = torch.zeros_like(tokens)
    for e, expert in enumerate(bank):
        token, slot = torch.where(chosen == e)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
    return out


# --- styles ------------------------------------------------------------------------------------------------------


class WhereLoop(nn.Module):
    """Softmax over the top-k logits; torch.where and +=; gated experts of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 4, bias=False)
        self.experts = nn.ModuleList(Gated(hidden=HIDDEN + 2 * (n % 2)) for n in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, x.shape[-1])
        weights, chosen = torch.topk(self.gate(tokens), 2)
        weights = F.softmax(weights, dim=-1)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out[token] += weights[token, slot, None] * expert(tokens[token])
        return out.view(x.shape)


class BooleanMask(nn.Module):
    """Top-1 times its probability, with masks and .any()."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 3), experts(3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            mask = chosen == e
            if mask.any():
                out[mask] = weight[mask].unsqueeze(-1) * expert(flat[mask])
        return out.view_as(x)


class OneHotSigmoid(nn.Module):
    """Sigmoid scores normalised over the chosen, one_hot dispatch, index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 4), experts(4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.sigmoid(self.gate(flat)).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        dispatch = F.one_hot(chosen, 4).permute(2, 1, 0)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            slot, token = torch.where(dispatch[e])
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(x)


class DenseSoft(nn.Module):
    """Every expert, weighted by the softmax (Jacobs 1991)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 3), experts(3, out=5)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.gate(x), -1)
        return (weights.unsqueeze(-1) * torch.stack([e(x) for e in self.experts], -2)).sum(-2)


class ScatterInf(nn.Module):
    """Noisy top-k in training; scatter into -inf, softmax, dense combine (Shazeer 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.w_gate, self.w_noise = nn.Linear(DIM, 4, bias=False), nn.Linear(DIM, 4, bias=False)
        self.experts = nn.ModuleDict({f"e{n}": Mlp() for n in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        logits = self.w_gate(x)
        if self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(self.w_noise(x))
        value, chosen = logits.topk(2, -1)
        weights = torch.full_like(logits, float("-inf")).scatter(-1, chosen, value).softmax(-1)
        return sum(weights[..., n, None] * e(x) for n, e in enumerate(self.experts.values()))


class ItemIndex(nn.Module):
    """One row at a time: .item() picks the expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 3), experts(3, out=5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        chosen = self.gate(rows).argmax(-1)
        parts = [self.experts[int(e.item())](row) for e, row in zip(chosen, rows.split(1), strict=True)]
        return torch.cat(parts).view(*x.shape[:-1], -1)


class Param3d(nn.Module):
    """All experts in 3-D parameters, einsum, gather: no module to recognise."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 4, bias=False)
        self.w1 = nn.Parameter(torch.randn(4, DIM, HIDDEN) * 0.3)
        self.w2 = nn.Parameter(torch.randn(4, HIDDEN, DIM) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        hidden = F.gelu(torch.einsum("td,edh->teh", flat, self.w1))
        out = torch.einsum("teh,ehd->ted", hidden, self.w2)
        picked = out.gather(1, chosen.unsqueeze(-1).expand(-1, -1, out.shape[-1]))
        return (picked * weights.unsqueeze(-1)).sum(1).view_as(x)


class Slice3d(nn.Module):
    """One expert of Param3d, as a module."""

    def __init__(self, block: Param3d, index: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(block.w1[index].detach()), nn.Parameter(block.w2[index].detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.w1) @ self.w2


class Unusual(Param3d):
    """Experts in parameters whose activation none of the usual bodies has."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        hidden = F.gelu(torch.einsum("td,edh->teh", flat, self.w1)).square()
        out = torch.einsum("teh,ehd->ted", hidden, self.w2)
        picked = out.gather(1, chosen.unsqueeze(-1).expand(-1, -1, out.shape[-1]))
        return (picked * weights.unsqueeze(-1)).sum(1).view_as(x)


class UnusualSlice(Slice3d):
    """One expert of Unusual, for register_moe."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.w1).square() @ self.w2


class SharedResidual(nn.Module):
    """Norm, top-2 of 4, shared expert and residual, all inside the block; a bare weight as gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shared, self.experts = nn.LayerNorm(DIM), Mlp(), experts(4)
        self.gate_weight = nn.Parameter(torch.randn(4, DIM))

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x).reshape(-1, x.shape[-1])
        weights, chosen = F.linear(z, self.gate_weight).softmax(-1).topk(2, -1)
        return x + (loop(z, chosen, weights, self.experts) + self.shared(z)).view_as(x)


class TwoLayerGate(nn.Module):
    """Top-1 of a small gate network, the expert's output unscaled."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, 3))
        self.expert_a, self.expert_b, self.expert_c = Mlp(), Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate((self.expert_a, self.expert_b, self.expert_c)):
            mask = chosen == e
            out[mask] = expert(x[mask])
        return out


# --- variants: what is computed differs in one place ------------------------------------------------------------------


class Variant(nn.Module):
    """Top-2 of 4, softmax; subclasses change one step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 4), experts(4)

    def logits(self, z: Tensor) -> Tensor:
        return self.gate(z)

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.softmax(-1).topk(2, -1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.weigh(self.logits(flat))
        return loop(flat, chosen, weights, self.experts).view_as(x)


class Temperature(Variant):
    def logits(self, z: Tensor) -> Tensor:
        return self.gate(z) / 1.01


class Threshold(Variant):
    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().weigh(logits)
        return torch.where(weights > 0.2, weights, 0.0), chosen


class ExpertScale(Variant):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([1.0, 1.0, 1.001, 1.0]))

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().weigh(logits)
        return weights * self.scales[chosen], chosen


class CosineGate(Variant):
    def logits(self, z: Tensor) -> Tensor:
        return self.gate(F.normalize(z, dim=-1))


class SelectionBias(Variant):
    """A bias so small that a thousand random tokens rarely show it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tensor([1e-6, 0.0, 0.0, -1e-6]))

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(-1)
        chosen = (scores + self.bias).topk(2, -1).indices
        return scores.gather(-1, chosen), chosen


class Capacity(Variant):
    """Switch's capacity over the whole batch: later tokens are dropped."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.weigh(self.logits(flat))
        place = F.one_hot(chosen[:, 0], 4).cumsum(0).gather(1, chosen[:, :1])
        weights = torch.where(place <= len(flat) // 2 + 1, weights, 0.0)
        return loop(flat, chosen, weights, self.experts).view_as(x)


class EvalNoise(Variant):
    def logits(self, z: Tensor) -> Tensor:
        return self.gate(z) + 1e-3 * torch.randn(len(z), 4)


class BatchSoftmax(Variant):
    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.softmax(0).topk(2, -1)


class TopP(Variant):
    """As many experts as it takes to reach 70 % of the probability."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(4, -1)
        return torch.where(weights.cumsum(-1) - weights < 0.7, weights, 0.0), chosen


class GatedShared(Variant):
    """A shared expert behind a sigmoid of its own (Qwen2-MoE)."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.shared_gate = Mlp(), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.sigmoid(self.shared_gate(x)) * self.shared(x)


class InputScaled(Variant):
    """The weight multiplies the expert's input (Llama-4)."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).sigmoid().max(-1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            mask = chosen == e
            out[mask] = expert(flat[mask] * weights[mask, None])
        return out.view_as(x)


class Scaled(Variant):
    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().weigh(logits)
        return 2.5 * weights, chosen


class NormedGate(Variant):
    def __init__(self) -> None:
        super().__init__()
        self.gate_norm = nn.LayerNorm(DIM)

    def logits(self, z: Tensor) -> Tensor:
        return self.gate(self.gate_norm(z))


class WithLoss(Variant):
    """Returns a balancing loss besides the output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.gate(x).softmax(-1).mean()


class Nested(Variant):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Variant() for _ in range(4))


# --- around a block ---------------------------------------------------------------------------------------------------


class Host(nn.Module):
    """(batch, 6, 3) -> linear, residual with norm, the block, mean over the sequence, head -> (batch, 5)."""

    def __init__(self, moe: nn.Module, width: int = DIM) -> None:
        super().__init__()
        self.stem, self.norm, self.moe, self.head = nn.Linear(3, DIM), nn.LayerNorm(DIM), moe, nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        y = self.moe(h + F.gelu(self.norm(h)))
        y = y[0] if isinstance(y, tuple) else y
        return self.head(y.mean(1)).softmax(-1)
