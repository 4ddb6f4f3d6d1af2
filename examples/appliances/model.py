"""The classifier: a convolutional stem, then one of several small convolutional networks for a whole series."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES, LENGTH = 7, 96
CHANNELS = 16  # of the stem
EXPERTS, HIDDEN, WIDTH = 4, 24, 32  # of the mixture


def expert(hidden: int, width: int) -> nn.Sequential:
    """Two convolutions and the mean over time: (series, CHANNELS, time) -> (series, width)."""
    return nn.Sequential(
        nn.Conv1d(CHANNELS, hidden, 7, padding=3),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(hidden, width, 5, padding=4, dilation=2),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
    )


class MoE(nn.Module):
    """Top-1 routing of whole series: y = p_max · expert(x), the gate looking at each channel's mean and maximum."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.gate = nn.Linear(2 * CHANNELS, experts)
        self.experts = nn.ModuleList(expert(hidden, width) for _ in range(experts))

    def logits(self, x: Tensor) -> Tensor:
        """(series, CHANNELS, time) -> (series, experts)"""
        y: Tensor = self.gate(torch.cat([x.mean(dim=2), x.amax(dim=2)], dim=1))
        return y

    def forward(self, x: Tensor) -> Tensor:
        """(series, CHANNELS, time) -> (series, width)"""
        weight, chosen = torch.topk(self.logits(x).softmax(dim=-1), k=1, dim=-1)
        y = x.new_zeros(x.shape[0], self.width)
        for e, network in enumerate(self.experts):
            rows = chosen[:, 0] == e
            y[rows] = weight[rows] * network(x[rows])
        return y


class Classifier(nn.Module):
    """Stem, body, head: (series, LENGTH) -> (series, CLASSES)."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(1, CHANNELS, 7, padding=3), nn.BatchNorm1d(CHANNELS), nn.ReLU(), nn.MaxPool1d(2)
        )
        self.body = body
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(series, LENGTH) -> (series, CLASSES)"""
        y: Tensor = self.head(self.body(self.stem(x.unsqueeze(1))))
        return y


def mixture() -> Classifier:
    """The model of this example."""
    return Classifier(MoE(EXPERTS, HIDDEN, WIDTH), WIDTH)


def dense(hidden: int = HIDDEN, width: int = WIDTH) -> Classifier:
    """What the mixture is compared with: one expert for every series, and no gate."""
    return Classifier(expert(hidden, width), width)


@torch.no_grad()
def cost(model: Classifier) -> tuple[int, int]:
    """Parameters that one series meets, and its multiply-accumulates."""
    parameters = macs = 0

    def count(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        nonlocal parameters, macs
        parameters += len(output) * sum(p.numel() for p in module.parameters())
        if isinstance(module, nn.Conv1d | nn.Linear):
            macs += output.numel() * module.weight[0].numel()

    hooks = [m.register_forward_hook(count) for m in model.modules() if not list(m.children())]
    model.eval()(torch.zeros(1, LENGTH))
    for hook in hooks:
        hook.remove()
    return parameters, macs
