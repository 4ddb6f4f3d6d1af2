"""What a module computes, call by call, and parts of it computed once more.

A `Recording` lists every torch function that a module's forward calls, with its results; its experts count as one
call each. The calls that two recordings with different rows have in common, from the first call on and back from the
last, form a `Program`: they do not depend on the data. What they compute can be computed again from other inputs, in
eager mode or while torch.export traces, as the ordinary tensor operations it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

INPUT, RETURN, OVERWRITTEN = "input", "return", "overwritten"
SHAPES = frozenset(  # functions that change no value, left out of descriptions
    {"reshape", "view", "view_as", "flatten", "contiguous", "getitem", "squeeze", "unsqueeze", "to", "float", "clone"}
)


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
class PerSample:
    """A size that is `factor` times the number of samples."""

    factor: int


@dataclass(frozen=True)
class Expert:
    """In place of a function: the expert of this number."""

    number: int


@dataclass
class Call:
    """One call: `results` are first the values that replace the `changed` ones, then those of its result."""

    func: Any
    args: Any  # (args, kwargs), each tensor as Ref, Held or the constant it is
    path: str  # of the innermost module
    changed: list[int | None] = field(default_factory=list)
    results: list[int] = field(default_factory=list)


Place = tuple[int, int, bool]  # call, counted from the end where negative; result or (True) argument of it
Drive = Mapping[tuple[int, int], Tensor]  # (call, which of its results) -> what it is to be instead


class Recording(TorchFunctionMode):
    """The calls of one run of `module`, and a copy of every value.

    `drive` puts other tensors in the place of some results. `outputs` does so for the experts' outputs.
    """

    def __init__(
        self, module: nn.Module, experts: Sequence[nn.Module], drive: Drive | None = None,
        outputs: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module, self.experts = module, experts
        self.drive, self.outputs = drive or {}, outputs
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
        self.calls.append(Call(RETURN, _mapped(tuple(tensors), self._name), ""))
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record one call; what computes no tensor (sizes, .item()) is not recorded."""
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        tensors = {id(t): t for t in leaves((args, kwargs)) if isinstance(t, Tensor)}
        named = _mapped((args, kwargs), self._name)
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
        call = Call(func, named, self._paths[-1])
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
            for path, m in self.module.named_modules():
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
                named = _mapped((args, kwargs), self._name)
                y = forward(*args, **kwargs)
                given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
                if not isinstance(y, Tensor) or not given:
                    return y
                y = y.view_as(y) if any(y is t for t in given) else y
                self.used.append((number, given[0].detach().clone(), y.detach().clone()))
                y = y if self.outputs is None else self.outputs(number, y)
                self._enter(Expert(number), named, [y], [])
                return y
            finally:
                self._paused = False

        return run


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


def _mapped(structure: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with `function` of every leaf; named tuples become plain ones."""
    if isinstance(structure, tuple):
        return tuple(_mapped(part, function) for part in structure)
    if isinstance(structure, list):
        return [_mapped(part, function) for part in structure]
    if isinstance(structure, dict):
        return {key: _mapped(part, function) for key, part in structure.items()}
    if isinstance(structure, slice):
        return slice(*(_mapped(part, function) for part in (structure.start, structure.stop, structure.step)))
    return function(structure)


# --- what two recordings have in common -------------------------------------------------------------------------------


class Program:
    """The calls that two recordings of one module, of different numbers of samples, have in common.

    Values are numbered as in the first of them. `templates` are those calls' arguments, by call: sizes that follow the
    number of samples are `PerSample`.
    """

    def __init__(self, one: Recording, two: Recording) -> None:
        self.one, self.two = one, two
        self.templates: dict[int, Any] = {}
        self.boundary: dict[int, Place] = {}  # values computed between the two parts that the last one reads
        self.loose: set[int] = set()  # of these, those that other calls give in the other recording
        pairs = list(zip(one.calls, two.calls, strict=False))
        self.first = 0  # this many calls from the beginning
        while self.first < len(pairs) and self._join(self.first, *pairs[self.first]):
            self.first += 1
        count = len(one.calls)
        for back in range(1, min(count, len(two.calls)) - self.first + 1):
            if not self._join(count - back, one.calls[-back], two.calls[-back]):
                break

    def _join(self, at: int, a: Call, b: Call) -> bool:
        same = a.func == b.func and len(a.results) == len(b.results) and len(a.changed) == len(b.changed)
        if not same or a.func == OVERWRITTEN or None in a.changed:
            return False
        met: dict[int, Place] = {}
        try:
            template = self._merged(a.args, b.args, at, met)
        except _DifferError:
            return False
        self.templates[at] = template
        self.boundary.update(met)
        return True

    def _merged(self, a: Any, b: Any, at: int, met: dict[int, Place]) -> Any:
        if isinstance(a, tuple | list) and type(a) is type(b) and len(a) == len(b):
            return type(a)(self._merged(x, y, at, met) for x, y in zip(a, b, strict=True))
        if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            return {key: self._merged(a[key], b[key], at, met) for key in a}
        if isinstance(a, slice) and isinstance(b, slice):
            parts = zip((a.start, a.stop, a.step), (b.start, b.stop, b.step), strict=True)
            return slice(*(self._merged(x, y, at, met) for x, y in parts))
        if isinstance(a, Ref) and isinstance(b, Ref):
            return self._same_value(a, b, at, met)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)):
                return a
        elif type(a) is type(b) and a == b:
            return a
        elif type(a) is int and type(b) is int:
            factor, rest = divmod(a, self.one.samples)
            if rest == 0 and b == factor * self.two.samples:
                return PerSample(factor)
        raise _DifferError

    def _same_value(self, a: Ref, b: Ref, at: int, met: dict[int, Place]) -> Ref:
        (call_a, slot_a), (call_b, slot_b) = self.one.origin[a.value], self.two.origin[b.value]
        early_a, early_b = call_a < self.first, call_b < self.first
        if early_a != early_b or (early_a and (call_a, slot_a) != (call_b, slot_b)):
            raise _DifferError
        if not early_a:
            back = len(self.one.calls)
            if (call_a - back, slot_a) != (call_b - len(self.two.calls), slot_b):
                self.loose.add(a.value)
            place = next(n for n, ref in enumerate(refs(self.one.calls[at].args)) if ref == a.value)
            met[a.value] = (at - back, place, True)
        return a

    # --- where values are ---------------------------------------------------------------------------------------------

    def place(self, value: int) -> Place | None:
        """Where every recording of the module has the value; None where that depends on the data."""
        call, slot = self.one.origin[value]
        if call < self.first:
            return call, slot, False
        if call in self.templates and value not in self.loose:
            return call - len(self.one.calls), slot, False
        return self.boundary.get(value)

    def find(self, recording: Recording, place: Place) -> Tensor:
        """A copy of the value at `place` in any recording of the module."""
        at, n, argument = place
        call = recording.calls[at]
        return recording.values[(list(refs(call.args)) if argument else call.results)[n]]

    def shape(self, value: int) -> tuple[Any, ...] | None:
        """Its shape, with sizes that follow the number of samples as `PerSample`."""
        place = self.place(value)
        if place is None:
            return None
        one, two = (tuple(self.find(r, place).shape) for r in (self.one, self.two))
        try:
            merged: tuple[Any, ...] = self._merged(one, two, 0, {})
        except _DifferError:
            return None
        return merged

    # --- running parts of it again ------------------------------------------------------------------------------------

    @property
    def inputs(self) -> list[int]:
        """The values given to the module."""
        return self.one.calls[0].results

    @property
    def outputs(self) -> list[int | None]:
        """The values of the tensors it returns; None where one is no computed value."""
        return [leaf.value if isinstance(leaf, Ref) else None for leaf in leaves(self.one.calls[-1].args)]

    def needed(self, wanted: Sequence[int], given: Sequence[int] = ()) -> list[int] | None:
        """The calls that lead from the inputs and the given values to the wanted ones; None where that depends on data
        or takes an expert."""
        known, calls, todo = {*given, *self.inputs}, set(), list(wanted)
        while todo:
            value = todo.pop()
            if value in known:
                continue
            known.add(value)
            call = self.one.origin[value][0]
            expert = isinstance(self.one.calls[call].func, Expert)
            if expert or call not in self.templates or value in self.loose:
                return None
            if call not in calls:
                calls.add(call)
                todo += refs(self.templates[call])
                todo += [v for v in self.one.calls[call].changed if v is not None]
        return sorted(calls)

    def tensors(self, calls: Sequence[int]) -> list[Tensor]:
        """The parameters, buffers and other tensors these calls read that nothing computed."""
        found = [leaf for call in calls for leaf in leaves(self.templates[call]) if isinstance(leaf, Held | Tensor)]
        return [leaf.tensor if isinstance(leaf, Held) else leaf for leaf in found]

    @property
    def constants(self) -> list[Tensor]:
        """The tensors both recordings read that no module holds and nothing computed: attributes, globals."""
        both = {id(t) for t in self.one.constants} & {id(t) for t in self.two.constants}
        return list({id(t): t for t in self.one.constants if id(t) in both}.values())

    def replay(self, wanted: Sequence[int], env: dict[int, Tensor]) -> list[Tensor]:
        """The wanted values from those in `env`, the module's inputs at least; `env` keeps what was computed."""
        calls = self.needed(wanted, list(env))
        assert calls is not None
        samples = env[self.inputs[0]].shape[0]
        copies: dict[int, Tensor] = {}  # of what a call overwrites, which others may read as it was

        def now(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return copies[leaf.value] if leaf.value in copies else env[leaf.value]
            if isinstance(leaf, PerSample):
                return leaf.factor * samples
            return leaf.tensor if isinstance(leaf, Held) else leaf

        for number in calls:
            call = self.one.calls[number]
            copies.clear()
            copies.update({value: env[value].clone() for value in call.changed if value is not None})
            args, kwargs = _mapped(self.templates[number], now)
            result = call.func(*args, **kwargs)
            fresh = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            for value, tensor in zip(call.results, [*copies.values(), *fresh], strict=True):
                env.setdefault(value, tensor)
        return [env[value] for value in wanted]

    def sizes(self, value: int, samples: Any) -> tuple[Any, ...]:
        """The value's shape for that many samples."""
        shape = self.shape(value)
        assert shape is not None
        return tuple(n.factor * samples if isinstance(n, PerSample) else n for n in shape)

    # --- for the report -----------------------------------------------------------------------------------------------

    def describe(self, value: int) -> str:
        """What computes a value, in a word: a module's path, a parameter's name, or a function of one of them."""
        if value in self.inputs:
            return "x" if len(self.inputs) == 1 else f"input {self.inputs.index(value)}"
        call = self.one.calls[self.one.origin[value][0]]
        if call.path:
            return call.path
        name = function_name(call.func)
        used = [leaf for leaf in leaves(call.args) if isinstance(leaf, Ref | Held)]
        held = [leaf.name for leaf in used if isinstance(leaf, Held)]
        if held:
            return held[0]
        if name in SHAPES:
            return self.describe(used[0].value) if used and isinstance(used[0], Ref) else name
        inner = self.describe(used[0].value) if used and isinstance(used[0], Ref) else ""
        return f"{name}({inner})"


def function_name(func: Any) -> str:
    """`add` for torch.add, Tensor.add_, Tensor.__iadd__ and aten.add.Tensor alike."""
    name = str(getattr(func, "__name__", func)).strip("_").partition(".")[0]
    return {"iadd": "add", "radd": "add", "truediv": "div", "itruediv": "div", "imul": "mul"}.get(name, name)


class _DifferError(Exception):
    """Two recordings are not alike here."""


def refs(structure: Any) -> Iterator[int]:
    """The values that arguments name."""
    return (leaf.value for leaf in leaves(structure) if isinstance(leaf, Ref))


__all__ = [
    "SHAPES",
    "Drive",
    "Expert",
    "Held",
    "Place",
    "Program",
    "Recording",
    "function_name",
    "leaves",
    "refs",
    "replaced",
]  # fmt: skip
