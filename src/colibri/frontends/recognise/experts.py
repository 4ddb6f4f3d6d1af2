"""Inputs and outputs of experts: where a block's calls have them and the mixture, and with what weights.

Experts that are modules are watched directly: they are made to give unit vectors, so that the mixture shows the
weights. Experts that are slices of parameters are taken out one at a time, and what is missing is theirs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colibri.frontends.recognise.recording.tape import Recording
from colibri.frontends.recognise.stacks import Body, Stack, ablated, bodies, subsets
from colibri.frontends.recognise.watch import Probe, largest

BASES = 3  # at most, of the values a mixture may have been added to
FIT = 1e-4  # of what is looked for; what is found is measured more closely afterwards

Run = Callable[[Any], Recording]  # of the block, with something in place of the experts' outputs


@dataclass
class Placement:
    """Where a block's experts are: the values that are their input and their mixture, and what was there before it."""

    experts: list[nn.Module]  # each (rows, in) -> (rows, out)
    input: int
    mixture: int
    base: int | None
    width: int
    apply: str = "output"
    body: Body | None = None


class Experts(Protocol):
    """A group of things that may be a block's experts."""

    @property
    def count(self) -> int:
        """How many they are."""

    @property
    def watched(self) -> list[nn.Module]:
        """Those that are called as experts."""

    @property
    def tensors(self) -> list[Tensor]:
        """What is theirs."""

    def places(self, probe: Probe) -> Iterator[Placement]:
        """The places they may have in the block, the likeliest first."""

    def weights(self, probe: Probe, place: Placement, run: Run) -> Tensor | None:
        """With what each expert's output goes into each row of the mixture, (n, experts)."""


# --- modules ----------------------------------------------------------------------------------------------------------


class OfRows(nn.Module):
    """An expert as a function of flat rows, where it takes whole samples of shape `inner`."""

    def __init__(self, expert: nn.Module, inner: tuple[int, ...]) -> None:
        super().__init__()
        self.expert, self.inner = expert, inner

    def forward(self, x: Tensor) -> Tensor:
        """(rows, in) -> (rows, out)."""
        y: Tensor = self.expert(x.reshape(-1, *self.inner))
        return y.flatten(1)


class ModuleExperts:
    """Experts that are modules; `bodies` are these with the calls around them that are theirs too."""

    def __init__(self, modules: Sequence[nn.Module], bodies: Sequence[nn.Module] | None = None) -> None:
        self.watched = list(modules)
        self.bodies = list(modules if bodies is None else bodies)
        self.count = len(self.watched)
        self.tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]

    def places(self, probe: Probe) -> Iterator[Placement]:
        """One for each value that all experts' rows are taken from."""
        used = probe.seen.used
        if not used:
            return
        sample = probe.rows.unit == "sample"
        inner = tuple(used[0][1].shape[1:])
        if any(x.dim() == 0 or (sample and x.shape[1:] != inner) for _, x, _ in used):
            return
        given = torch.cat([_flat(x, sample) for _, x, _ in used])
        experts = [OfRows(m, inner) for m in self.bodies] if sample and len(inner) > 1 else self.bodies
        nothing = probe.record(lambda e, y: torch.zeros_like(y))
        values = [(v, _rows(probe, v)) for v in _different(probe, given.shape[1])]
        equal = [v for v, rows in values if _among(given, rows)]
        for z in equal or [v for v, rows in values if (_direction(given, rows) >= 0).all()]:
            apply = "output" if equal else "input"
            with contextlib.suppress(Exception):  # experts that do not take flat rows are none of this place
                yield from _ordered(self._mixtures(probe, list(experts), z, apply, nothing))

    def _mixtures(
        self, probe: Probe, experts: list[nn.Module], z: int, apply: str, nothing: Recording
    ) -> Iterator[Placement]:
        rows = probe.at(z)
        assert rows is not None
        width = experts[0](rows[:2]).shape[1]
        met: set[tuple[int, bytes]] = set()  # the same values in another shape are the same place
        for mixture in probe.mixtures(width):
            before, after = probe.at(mixture, nothing), probe.at(mixture)
            if before is None or after is None or torch.equal(before, after):
                continue
            key = probe.program.root(mixture), after.numpy().tobytes()
            if key in met:
                continue
            met.add(key)
            for base in _bases(probe, before):
                place = Placement(experts, z, mixture, base, width, apply)
                weights = self.weights(probe, place, probe.record)
                if weights is None:
                    continue
                ours = before + mixed(experts, rows, weights, apply, width)
                if largest(ours - after) <= FIT * max(largest(after - before), 1e-30):
                    yield place

    def weights(self, probe: Probe, place: Placement, run: Run) -> Tensor | None:
        """Seen in the mixture of unit vectors, or in the experts' input."""
        if place.apply == "input":
            return self._on_input(probe, place, run(None))
        columns = []
        nothing = probe.at(place.mixture, run(lambda e, y: torch.zeros_like(y)))
        for first in range(0, self.count, place.width):
            seen = probe.at(place.mixture, run(lambda e, y, first=first: _unit_vector(y, e - first, place.width)))
            if seen is None or nothing is None:
                return None
            columns.append((seen - nothing)[:, : self.count - first])
        return torch.cat(columns, 1)

    def _on_input(self, probe: Probe, place: Placement, recording: Recording) -> Tensor | None:
        """A weight is what a row of the value is multiplied by."""
        rows = probe.at(place.input, recording)
        if rows is None:
            return None
        weights = torch.zeros(len(rows), self.count)
        for e, x, _ in recording.used:
            flat = _flat(x, probe.rows.unit == "sample")
            flat = flat[flat.any(1)]  # zeros are padding
            of = _direction(flat, rows)
            if (of < 0).any():
                return None
            top = rows[of].abs().argmax(1, keepdim=True)
            ratio = flat.gather(1, top) / rows[of].gather(1, top)
            weights[of, e] = ratio[:, 0]
        return weights


def _ordered(places: Iterable[Placement]) -> list[Placement]:
    """Mixtures of nothing else first; of those the last, which has the weights where these are multiplied late."""
    return sorted(places, key=lambda place: (place.base is not None, -place.mixture))


def mixed(experts: Sequence[nn.Module], rows: Tensor, weights: Tensor, apply: str, width: int) -> Tensor:
    """Σ w·expert(rows), or Σ expert(w·rows), over the experts whose weight is not zero; (n, width)."""
    total = rows.new_zeros(len(rows), width)
    for e, expert in enumerate(experts):
        chosen = weights[:, e].nonzero()[:, 0]
        if len(chosen):
            z, w = rows[chosen], weights[chosen, e, None]
            total[chosen] += expert(z * w) if apply == "input" else w * expert(z)
    return total


def _flat(x: Tensor, sample: bool) -> Tensor:
    return x.flatten(1) if sample else x.reshape(-1, x.shape[-1])


def _direction(given: Tensor, rows: Tensor) -> Tensor:
    """For each row given, which of `rows` it is a multiple of; -1 where none, the first where it is zero."""
    largest_first = (t.double() / t.double().abs().amax(1, keepdim=True).clamp_min(1e-300) for t in (given, rows))
    one, other = (F.normalize(t, dim=1) for t in largest_first)
    if not len(given):
        return torch.zeros(0, dtype=torch.int64)
    near, at = (one @ other.T).max(1)
    return torch.where((near > 1 - 1e-9) | (given == 0).all(1), at, -1)


def _among(given: Tensor, rows: Tensor) -> bool:
    """Whether every row given is one of `rows`, or zero as padding is."""
    there = {row.tobytes() for row in rows.numpy() + 0.0}
    return all(row.tobytes() in there or not row.any() for row in given.numpy() + 0.0)


def _unit_vector(y: Tensor, at: int, width: int) -> Tensor:
    """Rows of the shape of `y` with a 1 at position `at`."""
    flat = torch.zeros_like(y).reshape(-1, width)
    if 0 <= at < width:
        flat[:, at] = 1.0
    return flat.reshape(y.shape)


def _bases(probe: Probe, before: Tensor) -> list[int | None]:
    """The value that a mixture of nothing is: None where it is zero; empty where it is no value."""
    if not before.any():
        return [None]
    equal = [v for v in probe.before(before.shape[1]) if torch.equal(_rows(probe, v), before)]
    roots = {probe.program.root(v): v for v in reversed(equal)}
    return list(itertools.islice(reversed(roots.values()), BASES))


def _different(probe: Probe, width: int) -> list[int]:
    """The values of this width that need no expert: the first of those that are equal; behind them what other calls
    than changes of shape have made equal, as a bound does that these rows do not reach."""
    values = probe.before(width)
    first = {_rows(probe, v).numpy().tobytes(): v for v in reversed(values)}
    roots = {probe.program.root(v): v for v in reversed(values)}
    return list(dict.fromkeys([*reversed(first.values()), *reversed(roots.values())]))


def _rows(probe: Probe, value: int) -> Tensor:
    rows = probe.at(value)
    assert rows is not None
    return rows


# --- slices of parameters ---------------------------------------------------------------------------------------------


@dataclass
class StackedExperts:
    """Experts that are slices of these stacks."""

    group: list[Stack]
    watched: list[nn.Module] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of experts."""
        return len(self.group[0].slices)

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters the slices are of."""
        return [t for stack in self.group for t in stack.tensors]

    def _without(self, run: Run, experts: Sequence[int]) -> Recording:
        with ablated(self.group, experts):
            return run(None)

    def places(self, probe: Probe) -> Iterator[Placement]:
        """One for each body that gives what is missing without an expert, up to a weight."""
        yield from _ordered(self._mixtures(probe))

    def _mixtures(self, probe: Probe) -> Iterator[Placement]:
        nothing = self._without(probe.record, range(self.count))
        each = [self._without(probe.record, [e]) for e in range(self.count)]
        met: set[bytes] = set()
        for mixture in probe.mixtures():
            before, after = probe.at(mixture, nothing), _rows(probe, mixture)
            parts = [probe.at(mixture, r) for r in each]
            if before is None or torch.equal(before, after) or after.numpy().tobytes() in met:
                continue
            met.add(after.numpy().tobytes())
            shares = torch.stack([after - part for part in parts if part is not None], 1)  # (n, experts, width)
            size = max(largest(after - before), 1e-30)
            if largest(before + shares.sum(1) - after) > FIT * size:
                continue
            for base in _bases(probe, before):
                yield from self._bodies(probe, mixture, base, shares)

    def _bodies(self, probe: Probe, mixture: int, base: int | None, shares: Tensor) -> Iterator[Placement]:
        width = shares.shape[2]
        found: list[tuple[float, Placement]] = []
        sizes = {n for stack in self.group for n in stack.shape}
        for size in sorted(sizes):
            for z in _different(probe, size):
                for body in bodies(self.group, size, width):
                    experts = body.experts()
                    error = _misfit(shares, torch.stack([expert(_rows(probe, z)) for expert in experts], 1))
                    if error <= 100 * FIT:
                        found.append((error, Placement(experts, z, mixture, base, width, body=body)))
        found.sort(key=lambda f: f[0])
        yield from (place for _, place in found[:2])

    def weights(self, probe: Probe, place: Placement, run: Run) -> Tensor | None:
        """What is missing without each expert, in units of its output."""
        whole = run(None)
        after, rows = probe.at(place.mixture, whole), probe.at(place.input, whole)
        if after is None or rows is None:
            return None
        columns = []
        for e, expert in enumerate(place.experts):
            part = probe.at(place.mixture, self._without(run, [e]))
            if part is None:
                return None
            columns.append(_projected(after - part, expert(rows)))
        return torch.stack(columns, 1)


def _projected(share: Tensor, output: Tensor) -> Tensor:
    share, output = share.double(), output.double()
    weight = (share * output).sum(-1) / output.square().sum(-1).clamp_min(1e-300)
    return weight.float()


def _misfit(shares: Tensor, outputs: Tensor) -> float:
    """How far shares (n, experts, out) are from multiples of the outputs, over the largest share."""
    weights = _projected(shares, outputs)
    return largest(weights[..., None] * outputs - shares) / max(largest(shares), 1e-30)


def stacked(group: Sequence[Stack]) -> Iterator[StackedExperts]:
    """The ways to take stacks for experts."""
    return (StackedExperts(some) for some in subsets(group))


__all__ = ["Experts", "ModuleExperts", "OfRows", "Placement", "StackedExperts", "mixed", "stacked"]
