"""Elementwise calls around an expert that are part of it, with constants, such as a clamp of its output.

A dispatch loop may bound what goes into an expert and what comes out of it. Where only that expert has the value, the
bound is an operation of the expert like its own layers, and is exported as one. A bound acts on wide rows only, where
rounding of the logits and overflow may hide what it does: it is exported only where that can be verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from colibri.common.compare import compare
from colibri.errors import ExportError
from colibri.frontends.recognise.experts import OfRows
from colibri.frontends.recognise.moe import Block, kind_of
from colibri.frontends.recognise.recording.tape import (
    BENDING,
    Call,
    ExpertCall,
    Held,
    Recording,
    Ref,
    function_name,
    leaves,
    mapped,
    refs,
)
from colibri.ir.graph import Graph
from colibri.reference.interpreter import run

SIZES = (1e1, 1e2, 1e3, 1e4, 1e5, 1e6)  # of the rows on which a bound is verified
ROWS = 256  # of each size
LARGEST = 3e38  # of elements at which sums overflow
TOLERANCE = 1e-5  # of the largest element of the rows of one size
BOUNDS = BENDING - {"relu"}  # what acts on wide rows only

ELEMENTWISE = frozenset(
    {"clamp", "clamp_min", "clamp_max", "clip", "hardtanh", "nan_to_num", "minimum", "maximum", "round", "half",
     "bfloat16", "float", "to", "type", "threshold", "hardshrink", "softshrink", "relu", "relu6", "tanh", "sigmoid",
     "gelu", "silu", "elu", "leaky_relu", "softplus", "abs", "neg", "square", "mul", "div", "add", "sub", "dropout"}
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One call with a tensor in the place of `HERE`."""

    func: Any
    args: Any
    line: str = ""  # of the source

    def __call__(self, x: Tensor) -> Tensor:
        """The function of x, which is left as it was."""
        x = x.clone()
        args, kwargs = mapped(self.args, lambda leaf: x if leaf is HERE else leaf)
        y: Tensor = self.func(*args, **kwargs)
        return y

    def __str__(self) -> str:
        return f"{function_name(self.func)}{tuple(str(leaf) for leaf in leaves(self.args) if leaf is not HERE)}"


class Chained(nn.Module):
    """An expert with the steps before and after it."""

    def __init__(self, expert: nn.Module, before: Sequence[Step], after: Sequence[Step]) -> None:
        super().__init__()
        self.expert, self.before, self.after = expert, list(before), list(after)

    @property
    def around(self) -> tuple[int, int]:
        """How many steps there are before and after the expert."""
        return len(self.before), len(self.after)

    def forward(self, x: Tensor) -> Tensor:
        """As the expert, elementwise steps included."""
        for step in self.before:
            x = step(x)
        y: Tensor = self.expert(x)
        for step in self.after:
            y = step(y)
        return y

    def extra_repr(self) -> str:
        """What tells two chains apart whose experts are alike."""
        return f"{[*map(str, self.before)]}, {[*map(str, self.after)]}"


HERE = object()


def chained(recording: Recording, experts: Sequence[nn.Module]) -> list[Chained]:
    """The experts with the elementwise calls around them that are the same in each of their calls."""
    readers: dict[int, list[int]] = {}
    for n, call in enumerate(recording.calls):
        for value in {*refs(call.args), *(v for v in call.changed if v is not None)}:
            readers.setdefault(value, []).append(n)
    chains: dict[int, tuple[list[Step], list[Step]]] = {}
    for n, call in enumerate(recording.calls):
        if isinstance(call.func, ExpertCall):
            before, after = _before(recording, readers, n), _after(recording, readers, n)
            held = chains.get(call.func.number, (before, after))
            chains[call.func.number] = _common(held[0], before), _common(held[1], after)
    return [Chained(expert, *chains.get(n, ([], []))) for n, expert in enumerate(experts)]


def _common(one: list[Step], other: list[Step]) -> list[Step]:
    return one if list(map(str, one)) == list(map(str, other)) else []


def _after(recording: Recording, readers: dict[int, list[int]], expert: int) -> list[Step]:
    value = recording.calls[expert].results[0]
    steps: list[Step] = []
    while len(readers.get(value, [])) == 1:
        call = recording.calls[readers[value][0]]
        step = _step(recording, call, value)
        if step is None:
            break
        steps.append(step)
        value = call.results[-1]
    return steps


def _before(recording: Recording, readers: dict[int, list[int]], expert: int) -> list[Step]:
    value, reader = next(refs(recording.calls[expert].args), None), expert
    steps: list[Step] = []
    while value is not None and readers[value] == [reader]:
        reader = recording.origin[value][0]
        call = recording.calls[reader]
        source = next(refs(call.args), None)
        step = None if source is None or call.changed else _step(recording, call, source)
        if step is None:
            break
        steps.insert(0, step)
        value = source
    return steps


def _step(recording: Recording, call: Call, value: int) -> Step | None:
    """The call as a function of the value alone; None where it is none, or not elementwise."""
    if function_name(call.func) not in ELEMENTWISE or len(set(call.results)) != 1:
        return None
    before, after = recording.values[value], recording.values[call.results[-1]]
    if before.shape != after.shape or next(refs(call.args), None) != value:
        return None
    constants: dict[int, Tensor] = {}
    for other in {*refs(call.args)} - {value}:
        maker = recording.calls[recording.origin[other][0]]
        made_of = [leaf for leaf in leaves(maker.args) if isinstance(leaf, Ref | Held)]
        if made_of or maker.func == "input" or recording.values[other].numel() != 1:
            return None
        constants[other] = recording.values[other]
    if any(isinstance(leaf, Held | Tensor) for leaf in leaves(call.args)):
        return None

    def fixed(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        return HERE if leaf.value == value else constants[leaf.value]

    return Step(call.func, mapped(call.args, fixed), call.line)


# --- bounds -----------------------------------------------------------------------------------------------------------


class Alone(nn.Module):
    """The main output of a block, as a module of its tensor inputs."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.rows, self.module = block.rows, block.module

    def forward(self, *inputs: Tensor) -> Tensor:
        """What the block returns for them, with the other arguments that it has in its model."""
        args, kwargs = self.rows.calls.arguments(inputs)
        results = pytree.tree_leaves(self.rows.calls.runs(*args, **kwargs))
        y: Tensor = [leaf for leaf in results if isinstance(leaf, Tensor)][self.rows.main]
        return y


def bounds(block: Block) -> list[Step]:
    """The calls around the block's experts that act on wide rows only, each once."""
    experts = (expert.expert if isinstance(expert, OfRows) else expert for expert in block.experts)
    chains = [expert for expert in experts if isinstance(expert, Chained)]
    steps = [step for chain in chains for step in (*chain.before, *chain.after)]
    return list({str(step): step for step in steps if function_name(step.func) in BOUNDS}.values())


def verify_bounds(block: Block, graph: Graph) -> None:
    """Compare the graph of the block alone with the block on rows of every size, the largest included.

    Raises ExportError where they differ by more than rounding, or where only one of them is finite.
    """
    width = block.rows.real.shape[1]
    generator = torch.Generator().manual_seed(14)
    sets = {size: torch.randn(ROWS, width, generator=generator) * size for size in SIZES}
    sets[LARGEST] = torch.tensor([[LARGEST], [-LARGEST]]).expand(-1, width)
    for size, wide in sets.items():
        rows = block.rows.whole(wide)
        theirs = block.rows(rows).numpy()
        ours = run(graph, [x.numpy() for x in block.rows.split(rows)])[0].reshape(theirs.shape)
        found = compare(*(np.where(np.isfinite(y), y, np.nan) for y in (theirs, ours)))
        if found.error > TOLERANCE:
            told = ", ".join(f"{function_name(step.func)} at {step.line}" for step in bounds(block))
            raise ExportError(
                f"{block.path or 'the module'} ({kind_of(block.module)}): {told}, which every expert's input or output "
                f"goes through, could not be verified on rows of size {size:g}, where it acts: "
                f"the relative error is {found.error:.1e} (infinite where only one of the two overflows). Put the call "
                "into the expert's own forward, where it is part of the expert's graph, or leave it out"
            )


__all__ = ["Alone", "Chained", "Step", "bounds", "chained", "verify_bounds"]
