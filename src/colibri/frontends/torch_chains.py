"""The calls around an expert that are part of it: elementwise ones with constants, such as a clamp of what it gives.

A dispatch loop may bound what goes into an expert and what comes out of it. Where only that expert has the value, the
bound is an operation of the expert like its own layers, and is exported as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from colibri.frontends.torch_tape import Call, Expert, Held, Recording, Ref, function_name, leaves, mapped, refs

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
        if isinstance(call.func, Expert):
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

    return Step(call.func, mapped(call.args, fixed))


__all__ = ["Chained", "Step", "chained"]
