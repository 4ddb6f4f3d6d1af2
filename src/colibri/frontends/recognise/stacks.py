"""Experts that are not modules: parameters with one slice for each expert.

`stacks` finds such parameters, `bodies` puts their slices together the way experts usually are. Which body is the
experts' is decided by `identify`, by numbers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
    "squared_relu": lambda x: F.relu(x).square(),
    "mish": F.mish,
    "selu": F.selu,
}


@dataclass(frozen=True)
class Stack:
    """One tensor for each expert: slices of a parameter, or the members of a ParameterList."""

    name: str
    tensors: tuple[Tensor, ...]  # those the block holds: one of (experts, …), or one an expert
    slices: tuple[Tensor, ...]  # views, one an expert

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one slice, axes of size 1 around a vector left out."""
        shape = tuple(self.slices[0].shape)
        return shape if len(shape) < 2 or 1 not in shape else tuple(n for n in shape if n != 1) or (1,)


def stacks(block: nn.Module) -> dict[int, list[Stack]]:
    """The stacks that `block` or a child holds by their number of experts, where at least one is of matrices."""
    found: dict[int, list[Stack]] = {}
    owners = [("", block), *block.named_children()]
    for path, owner in owners:
        if isinstance(owner, nn.ParameterList) and len(owner) > 1:
            tensors = tuple(owner)
            if all(isinstance(t, Tensor) and t.shape == tensors[0].shape and t.dim() in (1, 2) for t in tensors):
                found.setdefault(len(tensors), []).append(Stack(path, tensors, tuple(t.detach() for t in tensors)))
        elif not type(owner).__module__.startswith("torch.nn"):
            for name, tensor in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)):
                if tensor.dim() in (2, 3) and len(tensor) > 1 and tensor.is_floating_point():
                    stack = Stack(f"{path}.{name}".strip("."), (tensor,), tuple(tensor.detach().unbind(0)))
                    found.setdefault(len(tensor), []).append(stack)
    return {count: group for count, group in found.items() if any(len(s.shape) == 2 for s in group)}


def subsets(group: Sequence[Stack]) -> Iterator[list[Stack]]:
    """All its matrices with some of its vectors, the most first: a matrix used as a gate looks like biases too."""
    matrices = [s for s in group if len(s.shape) == 2]
    vectors = [s for s in group if len(s.shape) == 1]
    for count in range(min(len(vectors), 4), -1, -1):
        for some in itertools.combinations(vectors, count):
            yield [*matrices, *some]


@contextlib.contextmanager
def ablated(group: Sequence[Stack], experts: Sequence[int]) -> Iterator[None]:
    """While this is open, these experts' slices are zero."""
    held = [(s.slices[e], s.slices[e].clone()) for s in group for e in experts]
    try:
        for view, _ in held:
            view.zero_()
        yield
    finally:
        for view, value in held:
            view.copy_(value)


class SlicedExpert(nn.Module):
    """One expert, made of views of the block's tensors."""

    def __init__(self, body: Body, number: int) -> None:
        super().__init__()
        self.body = body
        for n, stack in enumerate(body.used):
            self.register_parameter(f"w{n}", nn.Parameter(stack.slices[number].reshape(stack.shape), False))

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, in) -> (tokens, out)."""
        return self.body.run(x, [getattr(self, f"w{n}") for n in range(len(self.body.used))])


@dataclass(frozen=True)
class Body:
    """How slices make an expert: matrices (transposed where they are (in, out)), biases, activation.

    `form`: "one" x W + b; "two" act(x W + b) V + c; "three" act(x G + a)·(x U + b) into V + c; or, with G and U fused
    into one matrix, "halves" (G first), "halves reversed" or "interleaved".
    """

    form: str
    activation: str
    matrices: tuple[Stack, ...]
    transposed: tuple[bool, ...]
    biases: tuple[Stack | None, ...]

    @property
    def used(self) -> list[Stack]:
        """Its stacks in the order of an expert's tensors."""
        return [*self.matrices, *(b for b in self.biases if b is not None)]

    def experts(self) -> list[nn.Module]:
        """One module an expert."""
        return [SlicedExpert(self, n) for n in range(len(self.matrices[0].slices))]

    def run(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """One expert's output for tokens (n, in), from its tensors."""
        count = len(self.matrices)
        rest = iter(tensors[count:])
        biases = [None if b is None else next(rest) for b in self.biases]
        act = ACTIVATIONS[self.activation]

        def linear(z: Tensor, n: int) -> Tensor:
            weight = tensors[n].T if self.transposed[n] else tensors[n]
            return F.linear(z, weight, biases[n])

        h = linear(x, 0)
        if self.form == "one":
            return h
        if self.form == "two":
            return linear(act(h), 1)
        if self.form == "three":
            return linear(act(h) * linear(x, 1), 2)
        if self.form == "interleaved":
            return linear(act(h[..., ::2]) * h[..., 1::2], 1)
        first, second = h.chunk(2, -1)
        gate, up = (first, second) if self.form == "halves" else (second, first)
        return linear(act(gate) * up, 1)

    def __str__(self) -> str:
        names = ", ".join(stack.name for stack in self.used)
        return f"{self.form} {self.activation} of {names}"


def bodies(group: Sequence[Stack], width: int, out: int) -> Iterator[Body]:
    """The bodies that take `width` values and give `out`, with all the stacks of matrices in `group`."""
    matrices = [s for s in group if len(s.shape) == 2]
    vectors = [s for s in group if len(s.shape) == 1]
    if len(matrices) > 3:
        return
    for order in itertools.permutations(matrices):
        for transposed in itertools.product((True, False), repeat=len(order)):
            sizes = [s.shape if t else s.shape[::-1] for s, t in zip(order, transposed, strict=True)]  # (in, out)
            for form in _forms(sizes, width, out):
                acts = ["identity"] if form == "one" else list(ACTIVATIONS)
                for biases, act in itertools.product(_biases([b for _, b in sizes], vectors), acts):
                    yield Body(form, act, tuple(order), transposed, biases)


def _forms(sizes: Sequence[tuple[int, ...]], width: int, out: int) -> list[str]:
    """The forms in which matrices of these sizes (in, out) lead from `width` to `out`."""
    if sizes[0][0] != width or sizes[-1][1] != out:
        return []
    if len(sizes) == 1:
        return ["one"]
    hidden = sizes[0][1]
    if len(sizes) == 3:
        return ["three"] if sizes[1] == sizes[0] and sizes[2][0] == hidden else []
    if sizes[1][0] == hidden:
        return ["two"]
    return ["halves", "halves reversed", "interleaved"] if 2 * sizes[1][0] == hidden else []


def _biases(widths: Sequence[int], vectors: Sequence[Stack]) -> list[tuple[Stack | None, ...]]:
    """The ways to give every vector its matrix; only a way with all of them can be the experts'."""
    found: list[tuple[Stack | None, ...]] = []
    for places in itertools.permutations(range(len(widths)), len(vectors)):
        if all(vectors[n].shape == (widths[place],) for n, place in enumerate(places)):
            row: list[Stack | None] = [None] * len(widths)
            for n, place in enumerate(places):
                row[place] = vectors[n]
            found.append(tuple(row))
    return found


__all__ = ["Body", "Stack", "ablated", "bodies", "stacks", "subsets"]
