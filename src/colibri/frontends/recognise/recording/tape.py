"""Record of a module's computation, call by call.

A `Recording` lists every torch function that a module's forward calls, with its results; its experts count as one call
each. Results can be replaced while it is made. `common_calls` says which calls do not depend on the data.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

INPUT, RETURN, OVERWRITTEN = "input", "return", "overwritten"
BENDING = frozenset(  # functions that give back what they get for some values and not for others
    {"clamp", "clamp_min", "clamp_max", "clip", "hardtanh", "nan_to_num", "minimum", "maximum", "fmin", "fmax",
     "round", "half", "bfloat16", "to", "type", "threshold", "hardshrink", "softshrink", "where", "masked_fill",
     "isnan", "isinf", "isfinite", "relu", "trunc", "floor", "ceil"}
)  # fmt: skip


@dataclass(frozen=True)
class Ref:
    """The recording's value of this number."""

    value: int


@dataclass(frozen=True)
class Held:
    """A parameter or buffer, looked up at each use, since tracing exchanges them."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        """What the module holds now."""
        held: Tensor = getattr(self.module, self.name)
        return held


@dataclass(frozen=True)
class ExpertCall:
    """In place of a function: the expert of this number."""

    number: int


@dataclass
class Call:
    """One call: `results` are first the values that replace the `changed` ones, then those of its result."""

    func: Any
    args: Any  # (args, kwargs), each tensor as Ref, Held or the constant it is
    path: str  # of the innermost module
    line: str = ""  # of the source, for a function that is BENDING
    changed: list[int | None] = field(default_factory=list)
    results: list[int] = field(default_factory=list)


CallSite = tuple[int, int, bool]  # call, counted from the end where negative; result or (True) argument of it
Drive = Mapping[tuple[int, int], Tensor]  # (call, which of its results) -> what it is to be instead


class Recording(TorchFunctionMode):
    """The calls of one run of `module`, and a copy of every value.

    `drive` puts other tensors in the place of some results. `outputs` does so for the experts' outputs. Modules are
    called by their paths below `root`. `around` says of each expert how many calls before and after it are its own.
    """

    def __init__(
        self, module: nn.Module, experts: Sequence[nn.Module], drive: Drive | None = None,
        outputs: Callable[[int, Tensor], Tensor] | None = None, root: str = "",
        around: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.module, self.experts, self.root = module, experts, root
        self.drive, self.outputs = drive or {}, outputs
        self.around = around or [(0, 0)] * len(experts)
        self.calls: list[Call] = []
        self.values: list[Tensor] = []
        self.origin: list[tuple[int, int]] = []  # of a value: its call, and which of the results
        self.used: list[tuple[int, Tensor, Tensor]] = []  # expert, input and output of each of its calls
        self.constants: list[Tensor] = []  # neither held by a module nor computed here
        self.samples = 0
        self._held = {id(t): Held(m, name) for m in module.modules() for name, t in _own(m)}
        self._current: dict[int, int] = {}  # the value of a tensor, by id,
        self._seen: dict[int, int] = {}  # and how often its storage had been written to then
        self._writes: dict[int, tuple[int, Tensor]] = {}  # of a storage, how often, and through which tensor last
        self._alive: list[Tensor] = []  # so that ids and storages stay unique
        self._unfinished: dict[int, _Unfinished] = {}  # experts' outputs, by id, that more of their calls follow
        self._paths: list[str] = [""]
        self._paused = False

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module, once; returns its result."""
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.samples = len(inputs[0])
        self._enter(INPUT, (), inputs, [])
        with self._watched(), self:
            result = self.module(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        self.calls.append(Call(RETURN, mapped(tuple(tensors), self._name), ""))
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record one call; what computes no tensor (sizes, .item()) is not recorded."""
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        tensors = {id(t): t for t in leaves((args, kwargs)) if isinstance(t, Tensor)}
        unfinished = next((self._unfinished[n] for n in tensors if n in self._unfinished), None)
        if unfinished is not None:
            return self._finish(unfinished, func(*args, **kwargs))
        named = mapped((args, kwargs), self._name)
        versions = [t._version for t in tensors.values()]
        result = func(*args, **kwargs)
        changed = [t for t, version in zip(tensors.values(), versions, strict=True) if t._version != version]
        flat, spec = pytree.tree_flatten(result)
        if not changed and not any(isinstance(leaf, Tensor) for leaf in flat):
            return result
        at, slot = len(self.calls), len(changed)
        for n, tensor in enumerate(changed):
            if (at, n) in self.drive:
                tensor.copy_(self.drive[at, n])
        driven = False
        for n, leaf in enumerate(flat):
            if isinstance(leaf, Tensor):
                driven |= (at, slot) in self.drive
                flat[n] = self.drive.get((at, slot), leaf)
                slot += 1
        self._enter(func, named, [leaf for leaf in flat if isinstance(leaf, Tensor)], changed)
        return pytree.tree_unflatten(flat, spec) if driven else result

    # --- names --------------------------------------------------------------------------------------------------------

    def _name(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._current:
            writes, writer = self._writes.get(_storage(leaf), (0, leaf))
            if self._seen[id(leaf)] != writes:
                self._reread(leaf, writer)
            return Ref(self._current[id(leaf)])
        if id(leaf) not in self._held:
            self.constants.append(leaf)
            return leaf
        return self._held[id(leaf)]

    def _reread(self, tensor: Tensor, writer: Tensor) -> None:
        """Its storage has been written to through another tensor: the value is that one's, seen in this shape."""
        at, source = len(self.calls), self._current.get(id(writer))
        whole = tensor.is_contiguous() and writer.is_contiguous() and tensor.numel() == writer.numel()
        known = whole and source is not None
        args: Any = ((Ref(source), tuple(tensor.shape)), {}) if source is not None else ((), {})
        self.calls.append(Call(torch.Tensor.reshape if known else OVERWRITTEN, args, self._paths[-1]))
        self.calls[-1].results.append(self._value(tensor, at, 0))

    def _value(self, tensor: Tensor, call: int, slot: int) -> int:
        number = len(self.values)
        self.values.append(tensor.detach().clone())
        self.origin.append((call, slot))
        self._current[id(tensor)] = number
        self._seen[id(tensor)] = self._writes.get(_storage(tensor), (0, tensor))[0]
        self._alive.append(tensor)
        return number

    def _enter(self, func: Any, named: Any, results: Sequence[Tensor], changed: Sequence[Tensor]) -> None:
        call = Call(func, named, self._paths[-1], _line() if function_name(func) in BENDING else "")
        at = len(self.calls)
        self.calls.append(call)
        call.changed += [self._current.get(id(tensor)) for tensor in changed]
        for tensor in changed:
            self._writes[_storage(tensor)] = (self._writes.get(_storage(tensor), (0, tensor))[0] + 1, tensor)
            call.results.append(self._value(tensor, at, len(call.results)))
        overwritten = {id(t) for t in changed}
        for tensor in results:
            again = id(tensor) in overwritten
            call.results.append(self._current[id(tensor)] if again else self._value(tensor, at, len(call.results)))

    # --- modules ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """While this is open, modules tell their paths, and experts run as one call."""
        hooks = []
        with contextlib.ExitStack() as stack:
            for n, expert in enumerate(self.experts):
                stack.enter_context(replaced(expert, functools.partial(self._expert, n)))
            for name, m in self.module.named_modules():
                path = name.removeprefix(self.root).removeprefix(".")
                hooks.append(m.register_forward_pre_hook(lambda m, args, path=path: self._paths.append(path)))
                hooks.append(m.register_forward_hook(lambda m, args, y: self._leave(), always_call=True))
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()

    def _leave(self) -> None:
        self._paths.pop()

    def _expert(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._paused:
                return forward(*args, **kwargs)
            self._paused = True
            try:
                named = mapped((args, kwargs), self._name)
                y = forward(*args, **kwargs)
                given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
                if not isinstance(y, Tensor) or not given:
                    return y
                y = y.view_as(y) if any(y is t for t in given) else y
                before, after = self.around[number]
                x = given[0]
                if before:
                    source = self._source(self._current[id(x)], before)
                    named, x = ((Ref(source),), {}), self.values[source]
                return self._finish(_Unfinished(number, after + 1, x.detach().clone(), named), y)
            finally:
                self._paused = False

        return run

    def _source(self, value: int, steps: int) -> int:
        """The value that the last `steps` calls made this one of."""
        for _ in range(steps):
            value = next(refs(self.calls[self.origin[value][0]].args))
        return value

    def _finish(self, expert: _Unfinished, y: Tensor) -> Tensor:
        """Note what one more of an expert's calls gave; after the last, it is the expert's output."""
        self._unfinished = {n: e for n, e in self._unfinished.items() if e.number != expert.number}
        left = expert.left - 1
        if left:
            self._alive.append(y)
            self._unfinished[id(y)] = _Unfinished(expert.number, left, expert.input, expert.named)
            return y
        self.used.append((expert.number, expert.input, y.detach().clone()))
        if self.outputs is not None:  # in its place, where the module may hold on to a tensor written to
            y = (
                y.copy_(self.outputs(expert.number, y))
                if self.around[expert.number][1]
                else self.outputs(expert.number, y)
            )
        self._enter(ExpertCall(expert.number), expert.named, [y], [])
        return y


@dataclass(frozen=True)
class _Unfinished:
    """An expert with `left` of its calls to come."""

    number: int
    left: int
    input: Tensor
    named: Any


def _line() -> str:
    """Where in the module's source the call being recorded stands."""
    frame = sys._getframe(1)
    own = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def function_name(func: Any) -> str:
    """`add` for torch.add, Tensor.add_, Tensor.__iadd__ and aten.add.Tensor alike."""
    name = str(getattr(func, "__name__", func)).strip("_").partition(".")[0]
    return {"iadd": "add", "radd": "add", "truediv": "div", "itruediv": "div", "imul": "mul"}.get(name, name)


@contextlib.contextmanager
def replaced(module: nn.Module, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While this is open, the module's forward is `by` of what it was."""
    held = module.__dict__.get("forward")
    forward = by(module.forward)
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if held is not None:
            module.forward = held


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for table in (module._parameters, module._buffers):
        yield from ((name, t) for name, t in table.items() if t is not None)


def leaves(structure: Any) -> Iterator[Any]:
    """What is not a list, tuple, dict or slice in `structure`, in order."""
    if isinstance(structure, tuple | list):
        for part in structure:
            yield from leaves(part)
    elif isinstance(structure, dict):
        yield from leaves(list(structure.values()))
    elif isinstance(structure, slice):
        yield from (structure.start, structure.stop, structure.step)
    else:
        yield structure


def mapped(structure: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with `function` of every leaf; named tuples become plain ones."""
    if isinstance(structure, tuple):
        return tuple(mapped(part, function) for part in structure)
    if isinstance(structure, list):
        return [mapped(part, function) for part in structure]
    if isinstance(structure, dict):
        return {key: mapped(part, function) for key, part in structure.items()}
    if isinstance(structure, slice):
        return slice(*(mapped(part, function) for part in (structure.start, structure.stop, structure.step)))
    return function(structure)


def refs(structure: Any) -> Iterator[int]:
    """The values that arguments name."""
    return (leaf.value for leaf in leaves(structure) if isinstance(leaf, Ref))


__all__ = [
    "BENDING",
    "OVERWRITTEN",
    "Call",
    "CallSite",
    "Drive",
    "ExpertCall",
    "Held",
    "Recording",
    "Ref",
    "function_name",
    "leaves",
    "mapped",
    "refs",
    "replaced",
]  # fmt: skip
