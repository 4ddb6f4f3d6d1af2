"""Running a block of a model on tokens of one's own, the way the model itself runs it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from colibri.frontends.torch_moe import Rows


class Calls:
    """How a module was called while the model ran: its arguments, its result's structure, the tokens it saw."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.usable = True
        self.leaves: list[Any] = []
        self.at = 0  # which leaf of the arguments is the tensor of tokens
        self.result: Any = None
        self.main = 0  # which leaf of the result is the mixture: the first with one row for each token
        self.tokens: list[Tensor] = []
        self.fixed = False  # only ever call it with the recorded shape

    def hook(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """A forward hook that remembers one call."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(at) != 1 or leaves[at[0]].dim() < 2 or not leaves[at[0]].is_floating_point():
            self.usable = False
            return
        x = leaves[at[0]].detach()
        if self.leaves and x.shape[1:] != self.leaves[self.at].shape[1:]:
            self.usable = False  # called with different shapes: not a block one operation can stand for
            return
        if not self.leaves:
            rows = [isinstance(y, Tensor) and y.dim() == x.dim() and y.shape[:-1] == x.shape[:-1]
                    for y in pytree.tree_leaves(result)]  # fmt: skip
            self.usable = any(rows)
            self.main = rows.index(True) if self.usable else 0
            self.leaves, self.spec, self.at, self.result = leaves, spec, at[0], result
            self.fixed = any(isinstance(leaf, int) and not isinstance(leaf, bool) for leaf in leaves)
        self.tokens.append(x.reshape(-1, x.shape[-1]))

    @property
    def x(self) -> Tensor:
        """The first input."""
        tensor: Tensor = self.leaves[self.at]
        return tensor

    def _call(self, x: Tensor) -> Tensor:
        leaves = [*self.leaves[: self.at], x, *self.leaves[self.at + 1 :]]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        y: Tensor = pytree.tree_leaves(self.module(*args, **kwargs))[self.main]
        return y.reshape(-1, y.shape[-1])

    def __call__(self, tokens: Tensor) -> Tensor:
        """The block's output (n, out) for tokens (n, in), in batches of the shape it knows."""
        shape = self.x.shape
        per_row = math.prod(shape[1:-1])
        if not self.fixed:
            rows = -(-len(tokens) // per_row)
            try:
                return self._call(_padded(tokens, rows * per_row).view(rows, *shape[1:]))[: len(tokens)]
            except Exception:  # a program saved for one batch size runs with that size only
                self.fixed = True
        size = per_row * shape[0]
        parts = [self._call(_padded(part, size).view(shape))[: len(part)] for part in torch.split(tokens, size)]
        return torch.cat(parts)


def _padded(tokens: Tensor, count: int) -> Tensor:
    return tokens[torch.arange(count) % len(tokens)]


def attempt(call: Rows, tokens: Tensor) -> Tensor | None:
    """The output (n, out), or None if the part cannot be called so or gives anything else."""
    try:
        y = call(tokens)
    except Exception:
        return None
    fits = isinstance(y, Tensor) and y.dim() == 2 and len(y) == len(tokens) and y.dtype == torch.float32
    return y if fits else None


def dependence(call: Calls, tokens: Tensor) -> str | None:
    """Why the block is no function of one token at a time, or None if it is one."""
    y = call(tokens)
    if not torch.equal(y, call(tokens)):
        return "its output is random in eval mode"
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))
    others = tokens.clone()
    others[1:] = tokens[order][1:] * 0.5
    crowd = tokens[:1].expand(4 * len(tokens), -1)
    same = (call(tokens[order]) - y[order], (call(others) - y)[:1], call(crowd) - y[:1], call(tokens[:1]) - y[:1])
    for difference in same:
        if not float(difference.abs().max() / y.abs().max().clamp_min(1e-30)) <= 1e-5:
            return "the output of a token depends on other tokens (capacity or batch statistics)"
    return None


__all__ = ["Calls", "attempt", "dependence"]
