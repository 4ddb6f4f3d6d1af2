"""The forecaster: one Mixture-of-Experts block and a linear head, and the dense net it is compared with."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MoE(nn.Module):
    """Top-1 routing as in Switch Transformer (Fedus et al. 2021): y = p_max · expert(x)."""

    def __init__(self, inputs: int, hidden: int, outputs: int, experts: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.gate = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(rows, inputs) -> (rows, outputs)"""
        weight, chosen = torch.topk(self.gate(x).softmax(dim=-1), k=1, dim=-1)
        y = x.new_zeros(x.shape[0], self.outputs)
        for e, expert in enumerate(self.experts):
            rows = chosen[:, 0] == e
            y[rows] = weight[rows] * expert(x[rows])
        return y


class Forecaster(nn.Module):
    """Three experts and their gate on the features themselves, then a head: (rows, features) -> (rows, 1)."""

    def __init__(self, features: int, hidden: int = 32, width: int = 16, experts: int = 3) -> None:
        super().__init__()
        self.moe = MoE(features, hidden, width, experts)
        self.activation = nn.ReLU()
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, features) -> (rows, 1)"""
        y: Tensor = self.head(self.activation(self.moe(x)))
        return y


class Dense(nn.Sequential):
    """The same net with one expert and no gate, whose parameters go into three more hidden units."""

    def __init__(self, features: int, hidden: int = 35, width: int = 16) -> None:
        super().__init__(
            nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU(), nn.Linear(width, 1)
        )


def active_parameters(model: nn.Module) -> int:
    """How many parameters one row passes through: all of them but the experts it is not sent to."""
    total = sum(p.numel() for p in model.parameters())
    if not isinstance(model, Forecaster):
        return total
    in_experts = sum(p.numel() for p in model.moe.experts.parameters())
    return total - in_experts + in_experts // len(model.moe.experts)
