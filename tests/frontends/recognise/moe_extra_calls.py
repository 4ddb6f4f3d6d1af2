"""A Mixture of Experts with one more call at one place: a bound, a guard, a cast, a scale, a threshold, or nothing.

`family` makes the modules; what each is to do is in `test_moe_extra_calls`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.frontends.recognise.user_moes import DIM, HIDDEN

EXPERTS, K = 4, 2

PLACES = ("block input", "gate input", "logits", "softmax", "weights", "renormalised", "expert input", "in the expert",
          "expert output", "weighted", "sum", "residual")  # fmt: skip
IDIOMS = ("loop", "mask", "einsum", "gather")

CALLS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "clamp to 0.4": lambda x, training: x.clamp(-0.4, 0.4),
    "clamp to 50": lambda x, training: x.clamp(-50.0, 50.0),
    "clamp to 65504": lambda x, training: x.clamp(-65504.0, 65504.0),
    "in-place clamp": lambda x, training: x.clone().clamp_(max=20.0),
    "scale": lambda x, training: x * 1.0001,
    "no NaN": lambda x, training: torch.nan_to_num(x, 0.0, 1e4, -1e4),
    "minimum": lambda x, training: torch.minimum(x, torch.tensor(30.0)),
    "maximum": lambda x, training: torch.maximum(x, torch.tensor(-30.0)),
    "half": lambda x, training: x.half().float(),
    "bfloat16": lambda x, training: x.to(torch.bfloat16).to(torch.float32),
    "epsilon": lambda x, training: x + 1e-6,
    "dropout": lambda x, training: F.dropout(x, 0.1, training),
    "noise": lambda x, training: x + 0.1 * torch.randn_like(x) if training else x,
    "threshold": lambda x, training: F.hardshrink(x, 1e-3),
    "round": lambda x, training: (x * 1000).round() / 1000,
}


class Expert(nn.Module):
    def __init__(self, extra: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.extra = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM), extra

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.extra(F.relu(self.up(x))))


class Extra(nn.Module):
    """Top-2 of 4, renormalised, with a residual; `call` at `place`, dispatched by `idiom`."""

    def __init__(self, place: str, call: str, idiom: str) -> None:
        super().__init__()
        self.place, self.call, self.idiom = place, CALLS[call], idiom
        self.gate = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(Expert(lambda h: self.at("in the expert", h)) for _ in range(EXPERTS))

    def at(self, place: str, x: Tensor) -> Tensor:
        return self.call(x, self.training) if place == self.place else x

    def each(self, expert: nn.Module, x: Tensor) -> Tensor:
        return self.at("expert output", expert(self.at("expert input", x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.at("block input", x)
        p = self.at("softmax", self.at("logits", self.gate(self.at("gate input", x))).softmax(-1))
        weights, chosen = p.topk(K, -1)
        weights = self.at("weights", weights)
        weights = self.at("renormalised", weights / weights.sum(-1, keepdim=True))
        mixed = self.at("sum", getattr(self, self.idiom)(x, weights, chosen))
        return x + self.at("residual", mixed)

    def loop(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == e)
            if len(row):
                y.index_add_(0, row, self.at("weighted", weights[row, slot, None] * self.each(expert, x[row])))
        return y

    def dense(self, weights: Tensor, chosen: Tensor) -> Tensor:
        return torch.zeros(len(weights), EXPERTS).scatter(1, chosen, weights)

    def mask(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        of = self.dense(weights, chosen)
        return sum(self.at("weighted", of[:, e, None] * self.each(m, x)) for e, m in enumerate(self.experts))

    def einsum(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        each = torch.stack([self.each(m, x) for m in self.experts], 1)
        return self.at("weighted", torch.einsum("te,ted->td", self.dense(weights, chosen), each))

    def gather(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        each = torch.stack([self.each(m, x) for m in self.experts], 1)
        picked = each.gather(1, chosen[:, :, None].expand(-1, -1, DIM))
        return self.at("weighted", picked * weights[:, :, None]).sum(1)


def family() -> Iterator[tuple[str, str, str]]:
    """(place, call, idiom): every call at every place, the idioms in turns, and every place in every idiom."""
    for n, (place, call) in enumerate(itertools.product(PLACES, CALLS)):
        yield place, call, IDIOMS[n % len(IDIOMS)]
    for n, (place, idiom) in enumerate(itertools.product(PLACES, IDIOMS)):
        yield place, list(CALLS)[(7 * n) % len(CALLS)], idiom
