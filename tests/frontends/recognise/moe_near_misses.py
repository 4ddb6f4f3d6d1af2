"""Blocks that differ from a common Mixture of Experts in one place that is easily overlooked.

`user_moes` has more of them. Each is exported exactly or refused; which of the two is said in `test_moe_near_misses`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.frontends.recognise.moe_styles import flat
from tests.frontends.recognise.user_moes import DIM, Gated, Variant, experts, loop

# --- weights ----------------------------------------------------------------------------------------------------------


class Squared(Variant):
    """Probabilities squared after the choice."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(2, -1)
        return weights.square(), chosen


class StraightThrough(Variant):
    """w + (1 - w) detached: a gradient trick that is 1 forwards."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(2, -1)
        return weights + (1 - weights).detach(), chosen


class AlmostOne(Variant):
    """A straight-through trick gone wrong by one in a thousand."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(2, -1)
        return 1 + 1e-3 * (weights - weights.detach().mean(-1, keepdim=True)), chosen


class Tanh(Variant):
    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.topk(2, -1)
        return weights.tanh(), chosen


class FixedByRank(Variant):
    """The best expert counts 0.7, the second 0.3, whatever their logits."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        chosen = logits.topk(2, -1).indices
        return torch.tensor([0.7, 0.3]).expand(len(chosen), 2), chosen


class SometimesNormalised(Variant):
    """Normalised only where the sum is small: a branch that random tokens rarely take."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.sigmoid().topk(2, -1)
        total = weights.sum(-1, keepdim=True)
        return torch.where(total < 1e-4, weights / total, weights), chosen


class Floor(Variant):
    """No weight below one in a thousand."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(2, -1)
        return weights.clamp_min(1e-3), chosen


class DropsLow(Variant):
    """The second expert only where it has more than one part in ten thousand (GShard's threshold)."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(2, -1)
        return torch.where(weights > 1e-4, weights, 0.0), chosen


class InputDependentScale(Variant):
    """The mixture's weight also looks at the token."""

    def __init__(self) -> None:
        super().__init__()
        self.confidence = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(tokens))
        sure = 1 + 1e-3 * torch.tanh(self.confidence(tokens))
        return loop(tokens, chosen, weights * sure, self.experts).view_as(x)


class AlmostScale(Variant):
    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(2, -1)
        return weights * 1.0001, chosen


class LargeEpsilon(Variant):
    """Normalised by the sum and a tenth."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(2, -1)
        return weights / (weights.sum(-1, keepdim=True) + 0.1), chosen


class NormOfExperts(Variant):
    """Every expert's output normed before it is weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(tokens))
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out[token] += weights[token, slot, None] * self.norm(expert(tokens[token]))
        return out.view_as(x)


class Product(Variant):
    """The two experts multiplied."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        chosen = self.logits(tokens).topk(2, -1).indices
        every = torch.stack([e(tokens) for e in self.experts], 1)
        picked = every.gather(1, chosen.unsqueeze(-1).expand(-1, -1, DIM))
        return (picked[:, 0] * picked[:, 1]).view_as(x)


# --- choices ----------------------------------------------------------------------------------------------------------


class ConstantBias(Variant):
    """A selection bias of 1e-4 written as numbers in the code."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        p = logits.softmax(-1)
        chosen = (p + torch.tensor([1e-4, 0.0, -1e-4, 0.0])).topk(2, -1).indices
        return p.gather(1, chosen), chosen


class AttributeBias(Variant):
    """The same of 1e-7 in a plain attribute, no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.tensor([1e-7, 0.0, -1e-7, 0.0])

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        p = logits.softmax(-1)
        chosen = (p + self.shift).topk(2, -1).indices
        return p.gather(1, chosen), chosen


class ParameterBias(Variant):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([1e-4, 0.0, 0.0, -2e-4]))

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        p = logits.sigmoid()
        chosen = (p + self.bias).topk(2, -1).indices
        return p.gather(1, chosen), chosen


class ByMagnitude(Variant):
    """The largest logits by magnitude."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        chosen = logits.abs().topk(2, -1).indices
        return logits.softmax(-1).gather(1, chosen), chosen


class Worst(Variant):
    """The least likely experts."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = (-logits).softmax(-1).topk(2, -1)
        return weights, chosen


class Hashed(nn.Module):
    """The expert follows from a sign: there are no logits."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = experts(2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        chosen = (tokens[:, 0] > 0).long()
        return loop(tokens, chosen[:, None], torch.ones(len(tokens), 1), self.experts).view_as(x)


class ByPosition(Variant):
    """Every third position has an expert of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y[:, ::3] = self.experts[0](x[:, ::3])
        return y


class ByNeighbour(Variant):
    """A token is routed by the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(flat(before)))
        return loop(tokens, chosen, weights, self.experts).view_as(x)


# --- batches, capacity, randomness ------------------------------------------------------------------------------------


class SwitchBatch(Variant):
    """Switch's capacity over the batch; what is beyond passes unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        p, chosen = self.gate(tokens).softmax(-1).max(-1)
        hot = F.one_hot(chosen, 4)
        place = (hot.cumsum(0) * hot).sum(-1)
        out = tokens.clone()
        for e, expert in enumerate(self.experts):
            mask = (chosen == e) & (place <= len(tokens) // 4 + 1)
            out[mask] = p[mask, None] * expert(tokens[mask])
        return out.view_as(x)


class GShardCapacity(Variant):
    """Top-2 with a capacity for each sample; the second choices queue behind all first ones."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        hot = F.one_hot(chosen, 4)  # (batch, tokens, rank, expert)
        queue = hot.transpose(1, 2).flatten(1, 2).cumsum(1).unflatten(1, (2, -1)).transpose(1, 2)
        weights = weights * ((queue * hot).sum(-1) <= 2)
        return loop(flat(x), flat(chosen), flat(weights), self.experts).view_as(x)


class DropsToInput(Variant):
    """A capacity for each sample; dropped tokens pass unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        p, chosen = self.gate(x).softmax(-1).max(-1)
        hot = F.one_hot(chosen, 4)
        place = (hot.cumsum(1) * hot).sum(-1)
        out = x.clone()
        for e, expert in enumerate(self.experts):
            mask = (chosen == e) & (place <= 2)
            out[mask] = p[mask, None] * expert(x[mask])
        return out


class ExpertChoice(Variant):
    """Experts choose their tokens."""

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        value, token = p.transpose(1, 2).topk(2, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            index = token[:, e].unsqueeze(-1).expand(-1, -1, DIM)
            out = out.scatter_add(1, index, expert(x.gather(1, index)) * value[:, e].unsqueeze(-1))
        return out


class RandomSecond(Variant):
    """The second expert is kept at random, in eval mode too."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(2, -1)
        keep = torch.rand(len(weights)) < 2 * weights[:, 1]
        return torch.stack([weights[:, 0], weights[:, 1] * keep], 1), chosen


class DropoutAlways(Variant):
    def logits(self, z: Tensor) -> Tensor:
        return F.dropout(self.gate(z), 0.1, training=True)


class LoadBalancing(Variant):
    """Counts how often experts were chosen and prefers the others: state that changes while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(4))

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        p = logits.softmax(-1)
        chosen = (p - 1e-3 * self.load).topk(2, -1).indices
        self.load += F.one_hot(chosen, 4).sum((0, 1))
        return p.gather(1, chosen), chosen


class SoftSlots(Variant):
    """Soft MoE: every expert gets mixtures of all tokens of the sample."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        slots = torch.einsum("bte,btd->bed", logits.softmax(1), x)
        y = torch.stack([expert(slots[:, e]) for e, expert in enumerate(self.experts)], 1)
        return torch.einsum("bte,bed->btd", logits.softmax(2), y)


# --- experts ----------------------------------------------------------------------------------------------------------


class TiedExpert(Variant):
    """One expert sees the sum of two tokens' features: its input is no token."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(tokens))
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            z = tokens[token] if e else tokens[token] * (1 + 1e-3 * tokens[token].sign())
            out.index_add_(0, token, expert(z) * weights[token, slot, None])
        return out.view_as(x)


class AlmostGelu(nn.Module):
    """Experts in parameters with an activation that is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 4)
        self.w1, self.w2 = nn.Parameter(torch.randn(4, DIM, 12) * 0.3), nn.Parameter(torch.randn(4, 12, DIM) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for e in range(4):
            token, slot = torch.where(chosen == e)
            h = tokens[token] @ self.w1[e]
            out.index_add_(0, token, (h * torch.sigmoid(1.69 * h)) @ self.w2[e] * weights[token, slot, None])
        return out.view_as(x)


class SharedMatrix(Variant):
    """Experts share their second matrix, which one of them scales."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Gated() for _ in range(4))
        for expert in self.experts[1:]:
            expert.down = self.experts[0].down


class Vmapped(nn.Module):
    """The experts' weights stacked and mapped over by torch.func: no expert is ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 3), experts(3)

    def forward(self, x: Tensor) -> Tensor:
        params, _ = torch.func.stack_module_state(list(self.experts))
        weights, chosen = self.gate(x).softmax(-1).topk(1, -1)

        def run(p: dict[str, Tensor]) -> Tensor:
            y: Tensor = torch.func.functional_call(self.experts[0], p, (x,))
            return y

        every = torch.func.vmap(run)(params).movedim(0, -2)
        index = chosen.unsqueeze(-1).expand(*chosen.shape, DIM)
        return every.gather(-2, index).squeeze(-2) * weights
