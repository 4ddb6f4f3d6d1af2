"""Identification of a router from its logits and the weights that a block gives its experts.

`solve` proposes: the weights of the chosen experts tell score, normalisation and scale, which experts are chosen tells
bias, groups and capacity. `deviation` decides, on logits made to bring every branch about.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from colibri.errors import ExportError
from colibri.ir.graph import Router
from colibri.reference import ops

MARGIN = 1e-6  # a choice of experts closer than this (relative) may go either way
TOLERANCE = 2e-5  # of a weight, relative to itself
ROUNDING = 2e-6  # of a weight: routers that agree to this are not told apart by their error
ALMOST = 1.01 * TOLERANCE  # the error of weights that are only right beside the token's largest
LEAST = 1e-30  # of a token's largest weight, or of a score: what is smaller may be a denormal


# --- what a router does -----------------------------------------------------------------------------------------------


def weigh(logits: Tensor, router: Router, tokens: int = 0, made: bool = False) -> tuple[Tensor, Tensor]:
    """Weights (n, experts), zero where not chosen, and which of the n choices are clear of ties.

    `tokens`: how many of the rows share the experts' capacity, one group of them after the other. `made`: the logits
    may be larger or smaller than any model's; what is chosen for weights of 1, or for the softmax of the chosen, may be
    compared as probabilities, equal then.
    """
    with np.errstate(all="ignore"):
        chosen, weights = ops.route(logits.numpy(force=True), router)
        ops.drop_overflow(chosen, router, tokens or len(chosen))
    kept = torch.from_numpy(chosen >= 0)
    at = torch.from_numpy(chosen.clip(min=0)).long()
    dense = torch.zeros(logits.shape, dtype=torch.float32)
    dense.scatter_add_(1, at, torch.where(kept, torch.from_numpy(weights), 0.0))
    clear = clear_choices(logits, router, MARGIN)
    if made and router.normalize in ("one", "softmax") and router.k < router.experts and not router.keyed:
        for score in ("softmax", "sigmoid") if router.normalize == "one" else ("softmax",):
            p = _scores(logits, score)
            nothing = p.topk(router.k).values[:, -1] == 0 if router.normalize == "softmax" else False
            clear &= _apart(p, p.abs(), router.k, MARGIN) | nothing
    if router.capacity:  # what one token takes, the others lack
        clear = clear.view(-1, tokens or len(chosen)).all(1, keepdim=True).expand(-1, tokens or len(chosen)).flatten()
    return dense, clear


def clear_choices(logits: Tensor, router: Router, margin: float) -> Tensor:
    """Which rows choose their experts by more than rounding could turn around."""
    p = _scores(logits, router.score)
    keys, size = p, p.abs()
    if router.bias:
        bias = torch.tensor(router.bias)
        keys, size = p + bias, size + bias.abs()
    clear = ~torch.isnan(logits).any(-1)
    if router.groups > 1:
        parts = keys.view(len(keys), router.groups, -1).sort(-1, descending=True).values
        ranks = parts[..., 0] if router.group_rule == "max" else parts[..., 0] + parts[..., 1]
        if router.kept_groups < router.groups:
            clear &= _apart(ranks, ranks.abs(), router.kept_groups, margin)
        kept = torch.zeros_like(ranks).scatter(1, ranks.topk(router.kept_groups).indices, 1.0)
        keys = torch.where(kept.repeat_interleave(parts.shape[-1], 1) > 0, keys, -math.inf)
    clear &= torch.isfinite(keys.topk(router.k).values).all(-1)
    if router.k < router.experts:
        apart = _apart(keys, size, router.k, margin)
        if not router.keyed and router.normalize in ("none", "sum"):  # it does not matter which are chosen for nothing
            apart |= p.topk(router.k).values[:, -1] == 0
        clear &= apart
    return clear


def _apart(keys: Tensor, size: Tensor, k: int, margin: float) -> Tensor:
    """Whether the k-th largest key and the next are apart; -inf masks one, which is as clear as can be."""
    order = keys.topk(k + 1).indices[:, k - 1 :]
    last, next_ = keys.gather(1, order).unbind(1)
    largest = size.gather(1, order).amax(1)
    return (last - next_ > margin * largest) | (torch.isneginf(next_) & (last > -math.inf))


def _scores(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return logits.softmax(-1)
    if score == "sqrt_softplus":
        return F.softplus(logits).sqrt()
    return logits.sigmoid() if score == "sigmoid" else logits


# --- logits that bring every branch about -----------------------------------------------------------------------------


def telling_logits(experts: int, tokens: int, natural: Tensor) -> Tensor:
    """Logits (n, experts) for whole samples of `tokens`: spread, near ties, very low ones, all for one expert.

    Near ties show what moves a choice ever so little, low ones what is added to a sum before dividing by it, wide ones
    bounds and thresholds, and a crowd shows a capacity. `natural` are logits as they come.
    """
    generator = torch.Generator().manual_seed(4)

    def normal(count: int) -> Tensor:
        return torch.randn(count, experts, generator=generator)

    ties = normal(160)
    order = ties.argsort(1)
    rank = torch.randint(experts - 1, (160, 1), generator=generator)
    gap = 10 ** (-5.5 + 4.5 * torch.rand(160, 1, generator=generator))
    ties.scatter_(1, order.gather(1, rank + 1), ties.gather(1, order.gather(1, rank)) + gap)
    low = normal(48) - torch.tensor([5.0, 10, 20, 40, 60, 80]).repeat(8)[:, None]
    crowd = normal(experts * tokens)
    favoured = torch.arange(experts).repeat_interleave(tokens)[:, None]
    crowd.scatter_(1, favoured, crowd.amax(1, keepdim=True) + 0.5)
    wide = normal(48) * 10 ** torch.linspace(1.2, 6.0, 48)[:, None]
    wide[torch.arange(48), torch.arange(48) % experts] = wide.abs().amax(1)
    wide = torch.where((wide < -80) & (wide > -120), -120.0, wide)  # whose exponentials are denormals
    spread = [normal(64), normal(64) * 4, normal(32) * 0.1, normal(16) * 1e-3, wide, natural[:64]]
    each = normal(2 * experts) - 8.0  # against whatever speaks for the others
    each[torch.arange(2 * experts), torch.arange(2 * experts) % experts] += 16.0
    rows = torch.cat([crowd, *spread, ties, low, each])
    return rows[torch.arange(-(-len(rows) // tokens) * tokens) % len(rows)]


# --- finding the router -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """The weights (n, experts) a block gave its experts for these logits, n rows in samples of `tokens`.

    A weight below its entry of `floor` (n, 1) is only known to the precision of one of that size.
    """

    logits: Tensor
    weights: Tensor
    tokens: int
    floor: Tensor | None = None

    def deviation(self, router: Router) -> float:
        """The largest difference from what `router` gives, relative to the weight."""
        ours, clear = weigh(self.logits, router, self.tokens, made=True)
        finite = torch.isfinite(self.weights).all(1)  # sigmoids that are all 0 have no sum to be divided by
        if (torch.isfinite(ours).all(1) != finite)[clear].any():
            return math.inf
        return self.miss(ours, clear & finite)

    def miss(self, ours: Tensor, rows: Tensor) -> float:
        """The largest difference of these weights, relative to each, over the rows where `rows` holds.

        Beyond the tolerance it is relative to the token's largest, which tells the nearer of two wrong routers.
        """
        if not rows.any():
            return math.inf
        size, off = torch.maximum(ours.abs(), self.weights.abs()), (ours - self.weights).abs()
        largest = size.amax(1, keepdim=True).clamp_min(1e-37)
        least = (LEAST * largest if self.floor is None else torch.maximum(LEAST * largest, self.floor)).clamp_min(1e-37)
        worst = float((off / torch.maximum(size, least))[rows].max())
        if worst <= TOLERANCE:
            return worst
        coarse = float((off / largest)[rows].max())
        return max(coarse, ALMOST) if math.isfinite(coarse) else math.inf


@dataclass(frozen=True)
class Proposal:
    """A router, how far it is from what was seen, and the block's tensors it holds."""

    error: float
    router: Router
    tensors: tuple[str, ...] = ()

    @property
    def complexity(self) -> int:
        """How much there is beside score and k; of two that agree, the simpler is right."""
        r = self.router
        return sum((bool(r.bias), r.groups > 1, bool(r.expert_scale), r.epsilon > 0, r.capacity > 0, r.scale != 1))


def solve(seen: Seen, vectors: Mapping[str, Tensor], numbers: Collection[float] = ()) -> list[Proposal]:
    """Routers that give the weights seen, or else those nearest to it; the best first.

    `vectors` are the block's tensors of one value an expert: what a selection bias or a scale may be; `numbers` those
    written in its code: what an epsilon may be.
    """
    found = [p for draft in _weightings(seen, vectors, numbers) for p in _selections(seen, draft, vectors)]

    rounding = max(ROUNDING, 4 * min((p.error for p in found), default=0.0))

    def order(p: Proposal) -> tuple[bool, float, int]:
        agrees = p.error <= TOLERANCE
        return not agrees, (p.error > rounding) if agrees else p.error, p.complexity

    return sorted(found, key=order)


def _weightings(seen: Seen, vectors: Mapping[str, Tensor], numbers: Collection[float]) -> Iterator[Proposal]:
    """Routers by how the weights of the experts that were chosen follow from their logits; bias and groups are left
    open, and the error is that of the weights alone."""
    chosen = seen.weights != 0
    counts = chosen.sum(1)
    experts, k = seen.logits.shape[1], int(counts.max())
    finite = torch.isfinite(seen.weights).all(1)
    if k == 0 or 2 * int(finite.sum()) < len(finite):
        return
    full = (counts == k) & finite & torch.isfinite(seen.logits).any(1)
    floor = None if seen.floor is None else seen.floor[full]
    fully = Seen(seen.logits[full], seen.weights[full], 1, floor)
    kinds = [("logit", "one"), ("softmax", "none"), ("sigmoid", "none"), ("sqrt_softplus", "none")]
    kinds += [("logit", "softmax")] if 1 < k < experts else []
    kinds += [("sigmoid", "sum"), ("sqrt_softplus", "sum"), ("softmax", "sum")]
    kinds += [("sigmoid", "clamped"), ("softmax", "clamped"), ("softmax", "one"), ("sigmoid", "one")]
    for score, normalize in kinds:
        router = Router(experts, k, score, normalize)
        drafts = [
            _scaled(replace(router, epsilon=epsilon), fully, vectors) for epsilon in _epsilons(fully, router, numbers)
        ]
        if drafts:
            yield min(drafts, key=lambda draft: max(draft.error, ROUNDING / 4))


def _epsilons(seen: Seen, router: Router, numbers: Collection[float]) -> list[float]:
    """What the epsilon may be, the likeliest first; none where it must be one and cannot."""
    if router.normalize not in ("sum", "clamped"):
        return [0.0]
    p = torch.where(seen.weights != 0, _scores(seen.logits, router.score), 0.0).double()
    fitted = _epsilon(p, p.sum(1), seen.weights.double(), router.normalize)
    if router.normalize == "sum":
        return [0.0, *numbers, fitted]
    return [*numbers, fitted] if fitted else []  # a bound that is never reached is nothing but "sum"


def _given(seen: Seen, router: Router) -> Tensor:
    """The weights of the experts that were chosen, before they are scaled."""
    chosen, logits = seen.weights != 0, seen.logits
    if router.normalize == "one":
        return chosen.float()
    if router.normalize == "softmax":
        return torch.where(chosen, logits, -math.inf).softmax(-1)
    p = torch.where(chosen, _scores(logits, router.score), 0.0)
    if router.normalize == "none":
        return p
    total = p.double().sum(1, keepdim=True)
    whole = total + router.epsilon if router.normalize == "sum" else total.clamp_min(router.epsilon)
    return (p / whole).float()


def _epsilon(p: Tensor, total: Tensor, theirs: Tensor, normalize: str) -> float:
    """What `total` was increased by, or clamped to, before it divided the scores p, from the weights that gave.

    One expert tells, the one in the smallest sum: p / w is (total + epsilon) / scale, or max(total, epsilon) / scale.
    """
    ratio = p / theirs
    exact = torch.minimum(p, theirs.abs()) >= LEAST  # a quotient of denormals has few digits
    usable = torch.isfinite(ratio) & exact
    if not usable.any():
        return 0.0
    expert = int(torch.where(usable, total[:, None], math.inf).amin(0).argmin())
    rows = usable[:, expert]
    total, ratio = total[rows], ratio[rows, expert]
    (least, low), (most, high) = ((total[n], ratio[n]) for n in (total.argmin(), total.argmax()))
    if normalize == "clamped":
        epsilon = float(low * most / high)
        return _round(epsilon, 1e-3) if epsilon > 1.01 * float(least) else 0.0
    epsilon = float(low * (most - least) / (high - low) - least) if high > low else 0.0
    return _round(epsilon, 1e-3) if epsilon > ROUNDING * float(least) else 0.0


def _scaled(router: Router, seen: Seen, vectors: Mapping[str, Tensor]) -> Proposal:
    """The router with the scale, of all experts or of each, that comes nearest."""
    ours, theirs = _given(seen, router), seen.weights
    large = (theirs != 0) & (ours.abs() > 1e-3 * ours.abs().amax(1, keepdim=True)) & (ours != 0)
    ratio = theirs / torch.where(large, ours, 1.0)
    everywhere = torch.ones(len(ours), dtype=torch.bool)

    def miss(scale: Tensor) -> float:
        return seen.miss(ours * scale, everywhere)

    if not large.any():
        return Proposal(math.inf, router)
    common = torch.tensor(_round(float(ratio[large].median()), ROUNDING))
    error = miss(common)
    plain = Proposal(error, replace(router, scale=float(common)))
    if error <= TOLERANCE or not large.any(0).all():
        return plain
    each = torch.stack([ratio[large[:, e], e].median() for e in range(router.experts)])
    for name, vector in vectors.items():
        same = (vector - each).abs() <= 1e-4 * each.abs()
        if same.all() and miss(vector) <= TOLERANCE:
            return Proposal(miss(vector), replace(router, expert_scale=tuple(vector.tolist())), (name,))
    fitted = torch.tensor([_round(float(v), ROUNDING) for v in each])
    if not torch.isfinite(fitted).all() or miss(fitted) > TOLERANCE:
        return plain
    return Proposal(miss(fitted), replace(router, expert_scale=tuple(fitted.tolist())))


def _selections(seen: Seen, draft: Proposal, vectors: Mapping[str, Tensor]) -> Iterator[Proposal]:
    """The draft with every way to choose the experts, until one gives those that were chosen."""
    router = draft.router
    keyed_only = router.normalize == "one" and router.score != "logit"
    if draft.error > TOLERANCE:
        if not keyed_only:
            yield replace(draft, error=max(draft.error, seen.deviation(router)))
        return
    for capacity in _capacities(seen):
        for groups, (name, bias) in itertools.product(_groupings(router), (("", None), *vectors.items())):
            if keyed_only and bias is None and groups[0] == 1:
                continue
            number, kept, rule = groups
            try:
                tried = replace(
                    router, bias=() if bias is None else tuple(bias.tolist()), groups=number, kept_groups=kept,
                    group_rule=rule, capacity=capacity,
                )  # fmt: skip
            except ExportError:
                continue
            tensors = (*draft.tensors, name) if name else draft.tensors
            proposal = Proposal(max(draft.error, seen.deviation(tried)), tried, tensors)
            yield proposal
            if proposal.error <= TOLERANCE:
                return


def _capacities(seen: Seen) -> list[int]:
    """None, or the most tokens of a sample that any expert was given, where some were left out."""
    chosen = (seen.weights != 0).view(-1, seen.tokens, seen.logits.shape[1])
    most = int(chosen.sum(1).max())
    dropped = bool((chosen.sum(2) < chosen.sum(2).max()).any())
    return [most] if dropped and most < seen.tokens else [0]


def _groupings(router: Router) -> Iterator[tuple[int, int, str]]:
    yield 1, 1, "max"
    for number in range(2, router.experts // 2 + 1):
        if router.experts % number == 0 and router.k < router.experts:
            for kept, rule in itertools.product(range(1, number), ("max", "top2")):
                if kept * (router.experts // number) >= router.k:
                    yield number, kept, rule


def _round(value: float, within: float) -> float:
    """A number of few digits where one is that near."""
    for digits in range(1, 5):
        short = float(f"{value:.{digits}g}")
        if abs(short - value) <= within * abs(value):
            return short
    return value


__all__ = ["ALMOST", "MARGIN", "TOLERANCE", "Proposal", "Seen", "clear_choices", "solve", "telling_logits", "weigh"]
