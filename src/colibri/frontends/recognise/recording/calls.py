"""Runs of a block of a model on chosen rows, in the way the model itself runs it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from colibri.frontends.recognise.recording.tape import Drive, Recording

UNITS = ("token", "sample")


class Turned(nn.Module):
    """A module whose inputs have the batch in axis 1 (steps first), with the batch in axis 0."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's, every tensor that begins as the first input does turned before and after."""
        leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        lead = leaves[0].shape[1], leaves[0].shape[0]
        inside, named = pytree.tree_map(_turn, (args, kwargs))
        result = self.block(*inside, **named)
        return pytree.tree_map(lambda y: _turn(y) if begins(y, lead) else y, result)


def _turn(x: Any) -> Any:
    return x.transpose(0, 1).contiguous() if isinstance(x, Tensor) else x


def begins(y: Any, lead: tuple[Any, ...]) -> bool:
    """Whether a tensor has these first axes, and at least one behind them."""
    return isinstance(y, Tensor) and y.dim() > len(lead) and tuple(y.shape[: len(lead)]) == lead


class Calls:
    """How a module was called while the model ran: its arguments, its result, and every input it saw.

    `runs` is the module, or where the batch is in axis 1 of its inputs the `Turned` one, to which `seen` belongs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = self.runs = module
        self.usable = True
        self.leaves: list[Any] = []  # of the first call's arguments
        self.at: list[int] = []  # which of them are tensors
        self.result: Any = None
        self.seen: list[list[Tensor]] = []  # the tensors of each call
        self.sizes: dict[int, int] = {}  # numbers among the arguments that are multiples of the number of samples

    def hook(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """A forward hook that remembers one call."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        inputs = [leaves[n].detach() for n in at]
        results = [y for y in pytree.tree_leaves(result) if isinstance(y, Tensor)]
        if any(map(torch._C._functorch.is_batchedtensor, (*inputs, *results))):
            self.usable = False  # under vmap: tensors that must not be kept
            return
        if any(x.numel() == 0 for x in inputs):
            return  # an expert that was not chosen
        if not inputs or any(x.dim() < 2 or x.dtype != torch.float32 or len(x) != len(inputs[0]) for x in inputs):
            self.usable = False
            return
        turned = isinstance(self.runs, Turned)
        inputs = [_turn(x) for x in inputs] if turned else inputs
        if self.seen and [x.shape[1:] for x in inputs] != [x.shape[1:] for x in self.seen[0]]:
            steps_first = all(
                x.dim() == y.dim() > 2 and x.shape[0] == y.shape[0] and x.shape[2:] == y.shape[2:]
                for seen in self.seen
                for x, y in zip(inputs, seen, strict=True)
            )
            if turned or not steps_first:
                self.usable = False  # called with different shapes: not a block one operation can stand for
                return
            lead = tuple(self.seen[0][0].shape[:2])
            self.runs = Turned(self.module)
            self.result = pytree.tree_map(lambda y: _turn(y) if begins(y, lead) else y, self.result)
            self.seen, inputs = [[_turn(x) for x in seen] for seen in self.seen], [_turn(x) for x in inputs]
        numbers = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, int) and not isinstance(leaf, bool)}
        if not self.seen:
            self.leaves, self.spec, self.at, self.result = leaves, spec, at, result
            self.sizes = {n: m // len(inputs[0]) for n, m in numbers.items() if m and m % len(inputs[0]) == 0}
        flags = [(n, leaf) for n, leaf in enumerate(leaves) if n not in numbers and n not in at]
        if len(leaves) != len(self.leaves) or any(
            leaf is not (held := self.leaves[n]) and leaf != held for n, leaf in flags
        ):
            self.usable = False  # called in different ways
            return
        for n, m in numbers.items():
            if m == self.leaves[n] and len(inputs[0]) != len(self.seen[0][0] if self.seen else inputs[0]):
                self.sizes.pop(n, None)  # the same whatever the number of samples
            elif m != self.leaves[n] and m != self.sizes.get(n, 0) * len(inputs[0]):
                self.usable = False
        self.seen.append([x.clone() for x in inputs])

    @property
    def root(self) -> str:
        """The module's path below what `runs`."""
        return "block" if isinstance(self.runs, Turned) else ""

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[Any, Any]:
        """The recorded arguments with other tensors."""
        leaves = list(self.leaves)
        for n, x in zip(self.at, inputs, strict=True):
            leaves[n] = x
        for n, factor in self.sizes.items():
            leaves[n] = factor * len(inputs[0])
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


class Rows:
    """A recorded module as a function of rows: tokens (…, width), or whole samples flattened.

    Several inputs are laid side by side in a row.
    """

    def __init__(self, calls: Calls, unit: str) -> None:
        shapes = [tuple(x.shape) for x in calls.seen[0]]
        token = unit == "token"
        self.calls, self.unit = calls, unit
        self.inner = [shape[1:] for shape in shapes]
        self.usable = not token or len({shape[:-1] for shape in shapes}) == 1
        self.per_sample = math.prod(shapes[0][1:-1]) if token else 1  # rows in a sample
        self.widths = [shape[-1] if token else math.prod(shape[1:]) for shape in shapes]
        results = [y for y in pytree.tree_leaves(calls.result) if isinstance(y, Tensor)]
        count = len(calls.seen[0][0]) * self.per_sample
        self.results = len(results)
        self.fitting = [n for n, y in enumerate(results) if y.is_floating_point() and rows_of(y, count) is not None]
        self.usable &= bool(self.fitting)
        self.main = next(iter(self.fitting), 0)  # of the tensors returned, the one that is the block's output

    def joined(self, inputs: Sequence[Tensor]) -> Tensor:
        """The rows (n, width) that are in the module's inputs."""
        count = len(inputs[0]) * self.per_sample
        return torch.cat([x.reshape(count, -1) for x in inputs], 1)

    def split(self, rows: Tensor) -> list[Tensor]:
        """The module's inputs made of whole samples' rows."""
        samples = len(rows) // self.per_sample
        ends = itertools.accumulate(self.widths)
        parts = [rows[:, end - width : end] for end, width in zip(ends, self.widths, strict=True)]
        return [part.reshape(samples, *inner) for part, inner in zip(parts, self.inner, strict=True)]

    @property
    def real(self) -> Tensor:
        """The rows the model gave it, in order."""
        return torch.cat([self.joined(inputs) for inputs in self.calls.seen])

    def whole(self, rows: Tensor, at_least: int = 0) -> Tensor:
        """The rows, repeated up to a whole number of samples."""
        samples = -(-max(len(rows), at_least) // self.per_sample)
        return rows[torch.arange(samples * self.per_sample) % len(rows)]

    def __call__(self, rows: Tensor) -> Tensor:
        """The module's output (n, out) for rows (n, width)."""
        whole = self.whole(rows)
        args, kwargs = self.calls.arguments(self.split(whole))
        results = [y for y in pytree.tree_leaves(self.calls.runs(*args, **kwargs)) if isinstance(y, Tensor)]
        y = rows_of(results[self.main], len(whole))
        if y is None:
            raise ValueError("its output has not one row for each row of its input")
        return y[: len(rows)]

    def record(
        self, rows: Tensor, experts: Sequence[nn.Module], drive: Drive | None = None, outputs: Any = None,
        around: Sequence[tuple[int, int]] = (),
    ) -> Recording:  # fmt: skip
        """A recording of the module on whole samples' rows."""
        recording = Recording(self.calls.runs, experts, drive, outputs, self.calls.root, around)
        recording.run(*self.calls.arguments(self.split(rows.clone())))  # a module may write to its input
        return recording

    def dependence(self, rows: Tensor) -> str | None:
        """Why the output is no function of one row at a time, or None if it is one."""
        y = self(rows)
        if any(not torch.equal(y, self(rows)) for _ in range(3)):
            return "its output is random in eval mode, or depends on earlier calls"
        if any(map(self._mixes, (rows, self._uniform(rows)) if self.unit == "sample" else (rows,))):
            return f"the output of a {self.unit} depends on other {self.unit}s (capacity or batch statistics)"
        return None

    def _mixes(self, rows: Tensor) -> bool:
        """Whether a row's output changes with the other rows."""
        y = self(rows)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
        others = rows.clone()
        others[1:] = rows[order][1:] * 0.5
        crowd = rows[:1].expand(4 * len(rows), -1)
        same = (self(rows[order]) - y[order], (self(others) - y)[:1], self(crowd) - y[:1], self(rows[:1]) - y[:1])
        return any(not float(d.abs().max() / y.abs().max().clamp_min(1e-30)) <= 1e-5 for d in same)

    def _uniform(self, rows: Tensor) -> Tensor:
        """Samples that are the same all along their first axis: if they share a capacity, these exceed it."""
        return self.joined([x[:, :1].expand_as(x) if x.dim() > 2 else x for x in self.split(rows)])


def rows_of(tensor: Tensor, count: int) -> Tensor | None:
    """The tensor as (count, width), where its leading axes number that many rows; else None."""
    lead = 1
    for n, size in enumerate(tensor.shape):
        lead *= size
        if lead == count and n + 1 < tensor.dim():
            return tensor.reshape(count, -1)
    return None


__all__ = ["UNITS", "Calls", "Rows", "Turned", "begins", "rows_of"]
