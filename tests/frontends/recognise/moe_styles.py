"""More ways to write a Mixture of Experts, each of which must export exactly; `user_moes` has the common ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.frontends.recognise.user_moes import DIM, HIDDEN, Gated, Mlp, Variant, experts, loop


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# --- dispatch ---------------------------------------------------------------------------------------------------------


class SortedDispatch(Variant):
    """Tokens sorted by expert, cut where the expert changes, put back by index_add."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(tokens))
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=4).tolist()
        source = order // chosen.shape[1]
        parts = [e(part) for e, part in zip(self.experts, tokens[source].split(counts), strict=True)]
        y = torch.cat(parts) * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add_(0, source, y).view_as(x)


class EinsumDispatch(Variant):
    """A one-hot mask by einsum: every expert sees all tokens, those of others as zeros (GShard without capacity)."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(tokens))
        mask = F.one_hot(chosen, 4).to(x.dtype)
        combine = torch.einsum("tk,tke->te", weights, mask)
        given = torch.einsum("te,td->etd", mask.sum(1), tokens)
        y = torch.stack([e(part) for e, part in zip(self.experts, given.unbind(0), strict=True)])
        return torch.einsum("te,etd->td", combine, y).view_as(x)


class RankLoop(Variant):
    """For each rank and each expert, the tokens with that expert at that rank."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(tokens))
        out = torch.zeros_like(tokens)
        for rank in range(2):
            for e, expert in enumerate(self.experts):
                hit = (chosen[:, rank] == e).nonzero().flatten()
                if hit.numel():
                    out[hit] += weights[hit, rank : rank + 1] * expert(tokens[hit])
        return out.view_as(x)


class IndexPut(Variant):
    """Accumulates with index_put_; the weights by scatter."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(tokens))
        dense = torch.zeros(len(tokens), 4).scatter(1, chosen, weights)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            (hit,) = torch.where(dense[:, e] > 0)
            out.index_put_((hit,), dense[hit, e].unsqueeze(1) * expert(tokens[hit]), accumulate=True)
        return out.reshape(x.shape)


class DenseMask(Variant):
    """All experts on all tokens, times a mask of ones at the top-k."""

    def forward(self, x: Tensor) -> Tensor:
        p = self.logits(x).softmax(-1)
        mask = torch.zeros_like(p).scatter(-1, p.topk(2, -1).indices, 1.0)
        return torch.einsum("...e,...ed->...d", p * mask, torch.stack([e(x) for e in self.experts], -2))


class KthValue(Variant):
    """Keeps what is at least the k-th largest probability, renormalised."""

    def forward(self, x: Tensor) -> Tensor:
        p = self.logits(x).softmax(-1)
        kth = p.topk(2, -1).values[..., -1:]
        p = torch.where(p >= kth, p, torch.zeros_like(p))
        p = p / p.sum(-1, keepdim=True)
        return sum(p[..., e : e + 1] * expert(x) for e, expert in enumerate(self.experts))


class ExpertHit(Variant):
    """Mixtral in transformers 4: one_hot, permute, only experts that are hit."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        batch, length, dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, dim)
        router_logits = self.gate(hidden_states)
        weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        weights, selected = torch.topk(weights, 2, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        final = torch.zeros((batch * length, dim), dtype=hidden_states.dtype)
        mask = F.one_hot(selected, num_classes=4).permute(2, 1, 0)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            idx, top_x = torch.where(mask[e].squeeze(0))
            current = hidden_states[None, top_x].reshape(-1, dim)
            final.index_add_(0, top_x, self.experts[e](current) * weights[top_x, idx, None])
        return final.reshape(batch, length, dim), router_logits


class TokenLoop(Variant):
    """One token after the other, its experts by .item(), on vectors without a batch."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(tokens))
        out = torch.zeros_like(tokens)
        for t in range(tokens.shape[0]):
            for j in range(2):
                out[t] = out[t] + weights[t, j] * self.experts[chosen[t, j].item()](tokens[t])
        return out.view_as(x)


class TopOneMax(Variant):
    """Switch: the largest probability, jitter in training, tokens gathered by nonzero."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        noisy = tokens * torch.empty_like(tokens).uniform_(0.9, 1.1) if self.training else tokens
        p, chosen = torch.max(self.logits(noisy).softmax(-1), dim=-1)
        out = torch.empty_like(tokens)
        for e, expert in enumerate(self.experts):
            hit = torch.eq(chosen, e).nonzero(as_tuple=True)[0]
            out[hit] = expert(tokens[hit])
        return (out * p.unsqueeze(-1)).view(x.size())


# --- routers ----------------------------------------------------------------------------------------------------------


class DeepSeekV3(Variant):
    """Sigmoid scores, a selection bias, groups by their two best, normalised, scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.experts = nn.Parameter(torch.randn(8, DIM) * 0.5), experts(8)
        self.shared_experts = Mlp()
        self.register_buffer("e_score_correction_bias", torch.randn(8) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        scores = F.linear(tokens.float(), self.weight.float()).sigmoid()
        choice = scores.view(-1, 8) + self.e_score_correction_bias.unsqueeze(0)
        group = choice.view(-1, 4, 2).topk(2, dim=-1)[0].sum(-1)
        kept = torch.zeros_like(group).scatter_(1, group.topk(2, dim=-1, sorted=False)[1], 1)
        mask = kept.unsqueeze(-1).expand(-1, 4, 2).reshape(-1, 8)
        chosen = choice.masked_fill(~mask.bool(), float("-inf")).topk(3, dim=-1, sorted=False)[1]
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
        return (loop(tokens, chosen, weights, self.experts) + self.shared_experts(tokens)).view_as(x)


class DeepSeekV2(Variant):
    """Softmax scores, groups by their best, scaled and not normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 6, bias=False), experts(6)

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(-1)
        group = scores.view(-1, 3, 2).amax(-1).topk(2, -1).indices
        mask = torch.zeros(len(scores), 3).scatter(1, group, 1.0).repeat_interleave(2, 1)
        weights, chosen = (scores * mask).topk(2, -1)
        return weights * 16.0, chosen


class SumEpsilon(Variant):
    """Normalised by a sum that cannot be zero."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.sigmoid().topk(2, -1)
        return weights / (weights.sum(-1, keepdim=True) + 1e-6), chosen


class SumClamped(Variant):
    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.sigmoid().topk(2, -1)
        return F.normalize(weights, p=1, dim=-1, eps=1e-3), chosen


class SqrtSoftplus(Variant):
    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = F.softplus(logits).sqrt().topk(2, -1)
        return weights / weights.sum(-1, keepdim=True), chosen


class Unscaled(Variant):
    """The two best experts, added up as they are."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        chosen = logits.topk(2, -1).indices
        return torch.ones(chosen.shape), chosen


class SigmoidTopOne(Variant):
    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        value, chosen = logits.topk(1, -1)
        return value.sigmoid(), chosen


class BiasedSoftmax(Variant):
    """A selection bias that balances the load, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("balance", torch.tensor([0.1, -0.2, 0.05, 0.0]))

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        p = logits.softmax(-1)
        chosen = torch.topk(p + self.balance, 2).indices
        weights = p.gather(1, chosen)
        return weights / weights.sum(1, keepdim=True), chosen


class OutputScales(Variant):
    """Every expert's output times a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([[0.5], [1.5], [1.0], [2.0]]))

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(tokens))
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out[token] += weights[token, slot, None] * (self.scales[e] * expert(tokens[token]))
        return out.view_as(x)


class FixedScales(Variant):
    """Numbers in the code, one an expert."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(2, -1)
        return weights * torch.tensor([1.0, 2.0, 0.5, 0.25])[chosen], chosen


class RoutedOnProbabilities(Variant):
    """Softmax twice: of all, then of the chosen probabilities."""

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        p, chosen = logits.softmax(-1).topk(2, -1)
        return p.softmax(-1), chosen


# --- gates ------------------------------------------------------------------------------------------------------------


class FunctionalGate(Variant):
    """x @ W + b with parameters of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.w_gating, self.b_gating = nn.Parameter(torch.randn(DIM, 4)), nn.Parameter(torch.randn(4) * 0.1)

    def logits(self, z: Tensor) -> Tensor:
        return z @ self.w_gating + self.b_gating


class CosineTemperature(Variant):
    """Cosine between a projection and expert embeddings, times a learned temperature (Tutel, Swin-MoE)."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.keys = nn.Linear(DIM, 5), nn.Parameter(torch.randn(5, 4))
        self.temperature = nn.Parameter(torch.log(torch.full([1], 8.0)))

    def logits(self, z: Tensor) -> Tensor:
        cosine = F.normalize(self.project(z), dim=1) @ F.normalize(self.keys, dim=0)
        return cosine * torch.clamp(self.temperature, max=4.6).exp()


class NetworkGate(Variant):
    """A norm, a hidden layer and a scale in front of the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 6), nn.GELU(), nn.Linear(6, 4))

    def logits(self, z: Tensor) -> Tensor:
        return 3.0 * self.gate(z)


class PartialGate(Variant):
    """Looks at half of the features, and at their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM // 2 + 1, 4)

    def logits(self, z: Tensor) -> Tensor:
        return self.gate(torch.cat([z[:, : DIM // 2], z.mean(-1, keepdim=True)], -1))


class AttentionGate(Variant):
    """Queries against expert keys, divided by the root of their width."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys = nn.Linear(DIM, 6, bias=False), nn.Parameter(torch.randn(4, 6))

    def logits(self, z: Tensor) -> Tensor:
        return torch.matmul(self.query(z), self.keys.t()) / 6**0.5


class ResidualGate(Variant):
    """Two gates added, the second one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Linear(DIM, 4)

    def logits(self, z: Tensor) -> Tensor:
        logits = self.gate(z)
        logits += torch.tanh(self.coarse(z))
        return logits


class Clamped(Variant):
    """Logits kept between bounds."""

    def logits(self, z: Tensor) -> Tensor:
        return self.gate(z).clamp(-1.5, 1.5)


class LateGate(Variant):
    """A soft mixture whose gate runs after its experts."""

    def forward(self, x: Tensor) -> Tensor:
        outs = torch.stack([expert(x) for expert in self.experts], dim=2)
        return (outs * torch.softmax(self.gate(x), -1).unsqueeze(-1)).sum(2)


class TwoInputs(Variant):
    """Routes one input by another."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(flat(context)))
        return loop(tokens, chosen, weights, self.experts).view_as(x)


class LogitsGiven(Variant):
    """The logits come from outside."""

    def forward(self, x: Tensor, router_logits: Tensor) -> Tensor:  # type: ignore[override]
        tokens = flat(x)
        weights, chosen = self.weigh(flat(router_logits))
        return loop(tokens, chosen, weights, self.experts).view_as(x)


# --- around the mixture -----------------------------------------------------------------------------------------------


class PostNorm(Variant):
    """A norm after the mixture, and a residual of the normed input."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        z = self.before(x)
        return z + self.after(super().forward(z))


class PostProjection(Variant):
    """Experts narrower than the block, projected afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.out = nn.ModuleList(nn.Linear(DIM, 5) for _ in range(4)), nn.Linear(5, DIM)

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(tokens))
        mixed = torch.zeros(len(tokens), 5)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            mixed.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
        return x + self.out(F.gelu(mixed)).view_as(x)


class StartsFromShared(Variant):
    """The shared expert's output is what the others are added to."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(tokens))
        out = self.shared(tokens)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
        return out.view_as(x)


class StartsFromInput(Variant):
    """The residual is what the experts are added to, in place and through a view."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.weigh(self.logits(tokens))
        y = x.clone()
        rows = y.view(-1, x.shape[-1])
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            rows[token] += weights[token, slot, None] * expert(tokens[token])
        return y


class AddsInPlace(Variant):
    """Shared experts from a list of their own, added in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        for expert in self.shared:
            out += expert(x)
        return out


class WeightedShared(Variant):
    """Mixture and shared expert weighed by a learned softmax of two (PR-MoE)."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.coefficient = Mlp(), nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        c = self.coefficient(x).softmax(-1)
        return super().forward(x) * c[..., 0:1] + self.shared(x) * c[..., 1:]


class Bottleneck(Variant):
    """Experts in a space of their own: down before, up after."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(DIM, 6), nn.Linear(6, DIM)
        self.experts = nn.ModuleList(Mlp(6, 9, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        z = F.silu(self.down(flat(x)))
        weights, chosen = self.weigh(self.logits(flat(x)))
        return self.up(loop(z, chosen, weights, self.experts)).view_as(x)


class ReturnsDict(Variant):
    """A dictionary of output, logits and a loss."""

    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        logits = self.gate(x)
        return {"logits": logits, "loss": logits.square().mean(), "out": super().forward(x)}


class Inner(nn.Module):
    """Routing in a module of its own: gives weights and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.proj(x).softmax(-1).topk(2, -1)
        return weights / weights.sum(-1, keepdim=True), chosen


class Bank(nn.Module):
    """Experts in a module of their own, which is given weights and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = experts(4)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return loop(x, chosen, weights, self.experts)


class RouterAndBank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.bank = Inner(), Bank()

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        return self.bank(tokens, *self.router(tokens)).view_as(x)


# --- experts ----------------------------------------------------------------------------------------------------------


class MixedExperts(Variant):
    """Experts of different kinds and sizes."""

    def __init__(self) -> None:
        super().__init__()
        deep = nn.Sequential(nn.Linear(DIM, 5), nn.Tanh(), nn.Linear(5, 7), nn.SiLU(), nn.Linear(7, DIM))
        self.experts = nn.ModuleList([Mlp(), Gated(hidden=20), nn.Linear(DIM, DIM), deep])


class IdentityExpert(Variant):
    """One expert does nothing (LongCat's zero computation)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Mlp(), Mlp(), Mlp(), nn.Identity()])


class NormedExperts(Variant):
    """Every expert with a norm and a residual of its own."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(DIM), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.norm(x))

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(self.Block() for _ in range(4))


class ManyExperts(Variant):
    """Sixteen experts, the four best, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 16)
        self.experts = nn.ModuleDict({f"expert_{n}": nn.Linear(DIM, DIM) for n in range(16)})

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).topk(4, -1)
        dense = torch.zeros(*x.shape[:-1], 16).scatter(-1, chosen, weights.softmax(-1))
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts.values()):
            mask = dense[..., n] > 0
            out[mask] += dense[..., n][mask].unsqueeze(-1) * expert(x[mask])
        return out


class NarrowOutput(Variant):
    """More experts than outputs: a regression with one value a token."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = experts(4, out=1)

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        return (p * torch.cat([expert(x) for expert in self.experts], -1)).sum(-1, keepdim=True)


# --- experts in parameters --------------------------------------------------------------------------------------------


class Stacked(nn.Module):
    """Two matrices an expert, (experts, in, out), with biases; a loop over the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        self.w1, self.b1 = nn.Parameter(torch.randn(4, DIM, HIDDEN) * 0.3), nn.Parameter(torch.randn(4, HIDDEN) * 0.1)
        self.w2, self.b2 = nn.Parameter(torch.randn(4, HIDDEN, DIM) * 0.3), nn.Parameter(torch.randn(4, DIM) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for e in range(4):
            token, slot = torch.where(chosen == e)
            h = F.relu(tokens[token] @ self.w1[e] + self.b1[e])
            out.index_add_(0, token, (h @ self.w2[e] + self.b2[e]) * weights[token, slot, None])
        return out.view_as(x)


class GatheredBmm(nn.Module):
    """The chosen experts' matrices gathered for each token, and bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, HIDDEN, DIM) * 0.3), nn.Parameter(torch.randn(4, DIM, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        p, chosen = self.gate(tokens).max(-1)
        h = torch.bmm(self.up[chosen], tokens.unsqueeze(-1))
        return (torch.bmm(self.down[chosen], F.silu(h)).squeeze(-1) * p.sigmoid().unsqueeze(-1)).view_as(x)


class EinsumGated(nn.Module):
    """Gate, up and down by einsum over all experts, the top-k picked by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.wg = nn.Parameter(torch.randn(DIM, 4))
        self.w_gate, self.w_up = (nn.Parameter(torch.randn(4, DIM, HIDDEN) * 0.3) for _ in range(2))
        self.w_down = nn.Parameter(torch.randn(4, HIDDEN, DIM) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.wg
        value, chosen = logits.topk(2, -1)
        weights = torch.zeros_like(logits).scatter(-1, chosen, value.softmax(-1))
        h = F.silu(torch.einsum("bsd,edh->bseh", x, self.w_gate)) * torch.einsum("bsd,edh->bseh", x, self.w_up)
        return torch.einsum("bseh,ehd,bse->bsd", h, self.w_down, weights)


class FusedHalves(nn.Module):
    """Gate and up in one matrix (experts, 2·hidden, in), halves; a module of the experts (transformers 5)."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(4, 2 * HIDDEN, DIM) * 0.3)
            self.down_proj = nn.Parameter(torch.randn(4, DIM, HIDDEN) * 0.3)

        def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for e in range(4):
                token, slot = torch.where(chosen == e)
                gate, up = F.linear(x[token], self.gate_up_proj[e]).chunk(2, dim=-1)
                y = F.linear(F.silu(gate) * up, self.down_proj[e])
                out.index_add_(0, token, y * weights[token, slot, None])
            return out

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 4, bias=False), self.Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        return self.experts(tokens, chosen, weights / weights.sum(-1, keepdim=True)).view_as(x)


class Interleaved(nn.Module):
    """Gate and up in turns in one matrix, with biases (gpt-oss)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 4)
        self.gate_up, self.gate_up_bias = (
            nn.Parameter(torch.randn(4, DIM, 2 * HIDDEN)),
            nn.Parameter(torch.randn(4, 24)),
        )
        self.down, self.down_bias = nn.Parameter(torch.randn(4, HIDDEN, DIM)), nn.Parameter(torch.randn(4, DIM))

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        value, chosen = self.gate(tokens).topk(2, -1)
        weights = torch.zeros(len(tokens), 4).scatter(1, chosen, value.softmax(-1))
        h = torch.bmm(tokens.expand(4, -1, -1), self.gate_up) + self.gate_up_bias[:, None]
        gate, up = h[..., ::2], h[..., 1::2]
        y = torch.bmm(F.silu(gate) * up, self.down) + self.down_bias[:, None]
        return (y * weights.t().unsqueeze(-1)).sum(0).view_as(x)


class MatrixList(nn.Module):
    """One matrix an expert in a ParameterList, the best one only."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 3)
        self.weights = nn.ParameterList(torch.randn(DIM, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat(x)
        p, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros(len(tokens), 5)
        for e, weight in enumerate(self.weights):
            out[chosen == e] = tokens[chosen == e] @ weight
        return (out * p[:, None]).view(*x.shape[:-1], 5)


class SoftMatrices(nn.Module):
    """Linear experts mixed softly in one einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w = nn.Linear(DIM, 3), nn.Parameter(torch.randn(3, DIM, 5) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bse,bsd,edo->bso", self.gate(x).softmax(-1), x, self.w)


# --- a sample at a time -----------------------------------------------------------------------------------------------


class PerSample(nn.Module):
    """One expert for a whole sample, chosen by its mean; token-wise experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 3), experts(3)

    def forward(self, x: Tensor) -> Tensor:
        p, chosen = self.gate(x.mean(1)).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            hit = chosen == e
            if hit.any():
                out[hit] = p[hit, None, None] * expert(x[hit])
        return out


class Pooling(nn.Module):
    """An expert on a whole sample: flattened, to one row."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.out = nn.Linear(6 * DIM, HIDDEN), nn.Linear(HIDDEN, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.flat(x.flatten(1))))


class SampleExperts(nn.Module):
    """Experts that read the sample as a whole, two of three by its last position."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 3), nn.ModuleList(Pooling() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        value, chosen = self.gate(x[:, -1]).topk(2, -1)
        weights, rows = value.softmax(-1), []
        for b in range(x.shape[0]):
            rows.append(sum(weights[b, j] * self.experts[chosen[b, j].item()](x[b : b + 1]) for j in range(2)))
        return torch.cat(rows)


class SwitchCapacity(Variant):
    """Switch with a capacity of its own for every sample: tokens beyond it give nothing."""

    def forward(self, x: Tensor) -> Tensor:
        p, chosen = self.gate(x).softmax(-1).max(-1)
        hot = F.one_hot(chosen, 4)
        place = (hot.cumsum(1) * hot).sum(-1)
        p = torch.where(place <= 2, p, 0.0)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = (chosen == e) & (place <= 2)
            out[mask] = p[mask, None] * expert(x[mask])
        return out


# --- hosts ------------------------------------------------------------------------------------------------------------


class Alone(nn.Module):
    """Nothing but the block, on rows."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Any:
        return self.moe(x)


class Tower(nn.Module):
    """Two layers with norms and residuals, one head for each of two outputs."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.layers, self.norms = nn.ModuleList([first, second]), nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.stem, self.heads = nn.Linear(3, DIM), nn.ModuleList([nn.Linear(DIM, 2), nn.Linear(DIM, 3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            h = h + layer(norm(h))
        return self.heads[0](h), self.heads[1](h.mean(1))


class Pair(nn.Module):
    """Two inputs: the second one routes the first."""

    def __init__(self, moe: nn.Module, width: int) -> None:
        super().__init__()
        self.stem, self.side, self.moe = nn.Linear(3, DIM), nn.Linear(2, width), moe

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.moe(self.stem(x), self.side(context))


class Image(nn.Module):
    """Tokens on two axes."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.stem, self.moe = nn.Linear(3, DIM), moe

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.stem(x.view(-1, 2, 3, 3))).mean((1, 2))
