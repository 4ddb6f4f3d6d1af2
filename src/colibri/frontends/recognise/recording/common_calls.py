"""Calls of a module that do not depend on the data, and their recomputation.

The calls that two recordings with different rows have in common, from the first call on and back from the last, form a
`CommonCalls`. What they compute can be computed again from other inputs, in eager mode or while torch.export traces,
as the ordinary tensor operations it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from colibri.frontends.recognise.recording.tape import (
    OVERWRITTEN,
    Call,
    CallSite,
    ExpertCall,
    Held,
    Recording,
    Ref,
    function_name,
    leaves,
    mapped,
    refs,
)

SHAPES = frozenset(  # functions that change no value, left out of descriptions
    {"reshape", "view", "view_as", "flatten", "contiguous", "getitem", "squeeze", "unsqueeze", "to", "float", "clone"}
)


@dataclass(frozen=True)
class PerSample:
    """A size that is `factor` times the number of samples."""

    factor: int


class CommonCalls:
    """The calls that two recordings of one module, of different numbers of samples, have in common.

    Values are numbered as in the first of them. `templates` are those calls' arguments, by call: sizes that follow the
    number of samples are `PerSample`.
    """

    def __init__(self, one: Recording, two: Recording) -> None:
        self.one, self.two = one, two
        self.templates: dict[int, Any] = {}
        self.boundary: dict[int, CallSite] = {}  # values computed between the two parts that the last one reads
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
        met: dict[int, CallSite] = {}
        try:
            template = self._merged(a.args, b.args, at, met)
        except _DifferError:
            return False
        self.templates[at] = template
        self.boundary.update(met)
        return True

    def _merged(self, a: Any, b: Any, at: int, met: dict[int, CallSite]) -> Any:
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

    def _same_value(self, a: Ref, b: Ref, at: int, met: dict[int, CallSite]) -> Ref:
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

    def place(self, value: int) -> CallSite | None:
        """Where every recording of the module has the value; None where that depends on the data."""
        call, slot = self.one.origin[value]
        if call < self.first:
            return call, slot, False
        if call in self.templates and value not in self.loose:
            return call - len(self.one.calls), slot, False
        return self.boundary.get(value)

    def find(self, recording: Recording, place: CallSite) -> Tensor:
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
            expert = isinstance(self.one.calls[call].func, ExpertCall)
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

    @property
    def numbers(self) -> list[float]:
        """The positive numbers below 1 written in the code, and the tensors of one such number."""
        found = [leaf for call in self.one.calls for leaf in leaves(call.args) if not isinstance(leaf, Ref | bool)]
        tensors = [leaf.tensor if isinstance(leaf, Held) else leaf for leaf in found]
        values = [float(t) for t in tensors if isinstance(t, float) or (isinstance(t, Tensor) and t.numel() == 1)]
        return sorted({value for value in values if 0 < value < 1})

    def root(self, value: int) -> int:
        """The value that this one is, in another shape."""
        while True:
            call = self.one.calls[self.one.origin[value][0]]
            first = next(refs(call.args), None)
            if first is None or call.changed or function_name(call.func) not in SHAPES:
                return value
            if self.one.values[first].dtype != self.one.values[value].dtype:
                return value
            value = first

    def between(self, value: int, known: Sequence[int]) -> list[Call]:
        """The calls that lead from the known values and the experts' outputs to this one, in the first recording."""
        done, found, todo = {*known, *self.inputs}, set(), [value]
        while todo:
            value = todo.pop()
            call = self.one.origin[value][0]
            if value in done or isinstance(self.one.calls[call].func, ExpertCall):
                continue
            done.add(value)
            found.add(call)
            todo += refs(self.one.calls[call].args)
            todo += [v for v in self.one.calls[call].changed if v is not None]
        return [self.one.calls[n] for n in sorted(found)]

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
            args, kwargs = mapped(self.templates[number], now)
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


class _DifferError(Exception):
    """Two recordings are not alike here."""


__all__ = ["SHAPES", "CommonCalls", "PerSample", "function_name"]
