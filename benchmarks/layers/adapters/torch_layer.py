"""The layer as PyTorch modules: an eager loop over the chosen experts, its unrolled form, dense, grouped products."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.layers.sizes import Size, weights

warnings.filterwarnings("ignore")  # read-only weights, and the deprecation of what is being measured


class Expert(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate, self.up, self.down = _linear(gate), _linear(up), _linear(down)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Eager(nn.Module):
    """The loop of the usual model code: each expert that was chosen, on the rows that chose it."""

    def __init__(self, router: Tensor, experts: list[Expert], k: int) -> None:
        super().__init__()
        self.router, self.experts, self.k = _linear(router), nn.ModuleList(experts), k

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts, both (batch, k)."""
        share, chosen = self.router(x).softmax(-1).topk(self.k)
        return share / share.sum(-1, keepdim=True), chosen

    def visited(self, chosen: Tensor) -> Any:
        """The experts to loop over."""
        return torch.unique(chosen).tolist()

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.route(x)
        y = torch.zeros_like(x)
        for e in self.visited(chosen):
            row, slot = torch.where(chosen == e)
            y.index_add_(0, row, share[row, slot, None] * self.experts[e](x[row]))
        return y


class Unrolled(Eager):
    """The same with every expert in the trace, as torch.compile needs it; those nobody chose get no rows."""

    def visited(self, chosen: Tensor) -> Any:
        return range(len(self.experts))


class Dense(Eager):
    """Every expert on every row, masked: what exporters without data-dependent shapes produce."""

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.route(x)
        mask = torch.zeros(x.shape[0], len(self.experts)).scatter(1, chosen, share)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = y + mask[:, e : e + 1] * expert(x)
        return y


class Grouped(nn.Module):
    """Rows sorted by expert, then one grouped matrix product a projection."""

    def __init__(self, router: Tensor, gate: Tensor, up: Tensor, down: Tensor, k: int) -> None:
        super().__init__()
        self.router, self.k, self.experts = _linear(router), k, len(gate)
        self.gate, self.up, self.down = (w.transpose(1, 2) for w in (gate, up, down))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.router(x).softmax(-1).topk(self.k)
        share = share / share.sum(-1, keepdim=True)
        order = torch.argsort(chosen.reshape(-1))
        rows = order // self.k
        ends = torch.bincount(chosen.reshape(-1), minlength=self.experts).cumsum(0).to(torch.int32)
        taken = x[rows]
        gated = functional.silu(functional.grouped_mm(taken, self.gate, offs=ends))
        hidden = gated * functional.grouped_mm(taken, self.up, offs=ends)
        out = functional.grouped_mm(hidden, self.down, offs=ends) * share.reshape(-1)[order, None]
        return torch.zeros_like(x).index_add_(0, rows, out)


def layer(size: Size, kind: type[Eager]) -> Eager:
    """The layer on the mapped weights, which are not copied."""
    w = tensors(size)
    experts = [Expert(w["gate"][e], w["up"][e], w["down"][e]) for e in range(size.experts)]
    return kind(w["router"], experts, size.k)


def tensors(size: Size) -> dict[str, Tensor]:
    """The weights, mapped."""
    return {name: torch.from_numpy(array) for name, array in weights(size).items()}


def quantized(size: Size) -> nn.Module:
    """The eager loop with fbgemm's dynamic int8 in its experts; the router stays float32."""
    from torch.ao.quantization import quantize_dynamic

    module: Any = layer(size, Eager)
    router, module.router = module.router, nn.Identity()
    quantize_dynamic(module, {nn.Linear}, torch.qint8, inplace=True)  # type: ignore[no-untyped-call]
    module.router = router
    return module  # type: ignore[no-any-return]


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made
