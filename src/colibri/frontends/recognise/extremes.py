"""Test that a block does only what a claim says between its experts and their sum, for numbers of any size.

Random rows of variance 1 show no clamp, no guard against what is not finite, no threshold and little of a cast that
rounds. Here the experts' outputs, their input and the logits are all replaced by numbers from 1e-20 to 1e20, NaN and
infinity, and the mixture must be the weighted sum that the claim makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from colibri.frontends.recognise.experts import Placement, mixed
from colibri.frontends.recognise.recording.tape import BENDING, Call, Recording, function_name
from colibri.frontends.recognise.routing import TOLERANCE, weigh
from colibri.frontends.recognise.watch import Probe
from colibri.ir.graph import Router

SIZES = (1e-20, 1e-9, 1e-6, 1e-3, 1.0, 40.0, 300.0, 7e4, 1e6, 1e20)  # of experts' outputs; 65504 ends float16
INPUTS = (-6.0, 6.0)  # powers of ten: the sizes of elements of the experts' input
EPS = torch.finfo(torch.float32).eps
WEIGHT = 1e-30  # what is not finite counts where its weight is larger
GUARDS = frozenset({"nan_to_num", "isnan", "isinf", "isfinite", "isposinf", "isneginf"})


@dataclass(frozen=True)
class Extremes:
    """One claim about a place of the block: with these logits in place of its own, `router` gives the weights."""

    probe: Probe
    place: Placement
    logits: int
    made: Tensor
    router: Router
    shared: int  # rows that may share a capacity

    def reason(self) -> str | None:
        """What the block does beside what is claimed, in words; None for nothing."""
        try:
            found = self._guarded() or next(filter(None, self._checks()), None)
        except Exception as error:
            return f"it cannot be run on large and small rows: {type(error).__name__}: {error}"
        if found is None:
            return None
        return f"{found}{self._suspects()}"

    def _checks(self) -> Iterator[str | None]:
        if self.place.body is None:
            yield self._outputs()
            yield self._outputs_not_finite()
            yield self._inputs()
        else:
            yield self._whole()
        yield self._inputs_not_finite()

    # --- what is claimed ----------------------------------------------------------------------------------------------

    @property
    def _weights(self) -> tuple[Tensor, Tensor]:
        """(n, experts), and which rows choose clearly."""
        return weigh(self.made, self.router, self.shared, made=True)

    def _run(self, z: Tensor | None, outputs: Callable[[int, Tensor], Tensor] | None) -> Recording:
        width = self.probe.tokens.shape[1]
        rows = torch.randn(len(self.made), width, generator=torch.Generator().manual_seed(11))
        values = {self.logits: self.made}
        if z is not None and self.place.input != self.logits:
            values[self.place.input] = z
        return self.probe.driven(rows, values, outputs)

    def _mixture(self, recording: Recording) -> tuple[Tensor, Tensor]:
        """The rows of the mixture and of what it is added to."""
        seen = self.probe.at(self.place.mixture, recording)
        base = None if self.place.base is None else self.probe.at(self.place.base, recording)
        assert seen is not None
        return seen.double(), torch.zeros_like(seen).double() if base is None else base.reshape(seen.shape).double()

    # --- outputs ------------------------------------------------------------------------------------------------------

    def _filled(self, rows: Tensor) -> Callable[[int, Tensor], Tensor]:
        """Each expert's row (experts, width) in the place of all it gives."""

        def outputs(expert: int, y: Tensor) -> Tensor:
            return rows[expert].expand(y.numel() // self.place.width, -1).reshape(y.shape)

        return outputs

    def _outputs(self) -> str | None:
        weights, clear = self._weights
        count, width = self.made.shape[1], self.place.width
        applied = (weights != 0).double() if self.place.apply == "input" else weights.double()
        generator = torch.Generator().manual_seed(12)
        for first in range(0, len(SIZES), width):
            size = torch.tensor([SIZES[(first + n) % len(SIZES)] for n in range(width)])
            sign = torch.randint(0, 2, (count, width), generator=generator) * 2 - 1
            for turned in (sign, -sign):
                rows = (1 + torch.rand(count, width, generator=generator)) * size * turned
                seen, base = self._mixture(self._run(None, self._filled(rows)))
                expected, scale = applied @ rows.double(), applied.abs() @ rows.double().abs()
                slack = TOLERANCE * scale + 4 * EPS * base.abs() + 1e-37
                off = ~((seen - base - expected).abs() <= slack)
                if off[clear].any():
                    worst = size[off[clear].any(0)]
                    return f"it does more with its experts' outputs than weigh them, seen in outputs of {_span(worst)}"
        return None

    def _outputs_not_finite(self) -> str | None:
        weights, clear = self._weights
        counts = clear & (weights.abs().amax(1) > WEIGHT)
        kinds = torch.tensor([math.nan, math.inf, -math.inf])
        for first in range(0, len(kinds), self.place.width):
            row = kinds[(torch.arange(self.place.width) + first) % len(kinds)]
            seen, _ = self._mixture(self._run(None, self._filled(row.expand(self.made.shape[1], -1))))
            if torch.isfinite(seen[counts]).any():
                return "it replaces what is not finite in its experts' outputs"
        return None

    # --- input --------------------------------------------------------------------------------------------------------

    def _wild(self) -> Tensor:
        """Rows for the experts: each of another size, some with elements of many sizes."""
        generator = torch.Generator().manual_seed(13)
        count, width = len(self.made), self.probe.width(self.place.input)
        low, high = INPUTS
        powers = low + (high - low) * torch.rand(count, width, generator=generator)
        powers = torch.where(torch.arange(count)[:, None] % 4 == 0, powers, powers[:, :1])
        return torch.randn(count, width, generator=generator) * 10**powers

    def _inputs(self) -> str | None:
        z = self._wild()
        recording = self._run(z, lambda e, y: torch.zeros_like(y))
        rows = self.probe.at(self.place.input, recording)
        assert rows is not None
        weights, clear = self._weights
        sample = self.probe.rows.unit == "sample"
        there = {row.tobytes() for row in rows.numpy() + 0.0}
        for e, x, _ in recording.used:
            given = x.flatten(1) if sample else x.reshape(-1, x.shape[-1])
            if self.place.apply == "output":
                wrong = [row for row in given.numpy() + 0.0 if row.any() and row.tobytes() not in there]
                if wrong:
                    return "it does more with its experts' input than choose rows"
                continue
            ours = (weights[:, e, None] * rows)[clear & (weights[:, e].abs() > WEIGHT)]
            if not _all_near(ours, given):
                return "it does more with its experts' input than weigh it"
        return None

    def _inputs_not_finite(self) -> str | None:
        z = self._wild()
        row = torch.arange(len(z))
        z[row, row % z.shape[1]] = torch.tensor([math.nan, math.inf, -math.inf])[row % 3]
        weights, clear = self._weights
        if self.place.body is not None:
            seen, _ = self._mixture(self._run(z, None))
            nan = clear & (weights.abs().amax(1) > WEIGHT) & torch.isnan(z).any(1)
            return "it replaces NaN between its experts" if torch.isfinite(seen[nan]).all(1).any() else None
        recording = self._run(z, lambda e, y: torch.zeros_like(y))
        broken = torch.zeros(self.made.shape[1], dtype=torch.int64)
        for e, x, _ in recording.used:
            given = x.flatten(1) if self.probe.rows.unit == "sample" else x.reshape(-1, x.shape[-1])
            broken[e] += int((~torch.isfinite(given)).any(1).sum())
        rows = self.probe.at(self.place.input, recording)
        assert rows is not None
        chosen = (clear & (~torch.isfinite(rows)).any(1))[:, None] & (weights.abs() > WEIGHT)
        return "it replaces what is not finite in its experts' input" if (broken < chosen.sum(0)).any() else None

    def _whole(self) -> str | None:
        """Of experts in parameters, whose outputs cannot be replaced: the mixture of what they give for wild rows."""
        recording = self._run(self._wild(), None)
        seen, base = self._mixture(recording)
        rows = self.probe.at(self.place.input, recording)
        assert rows is not None
        weights, clear = self._weights
        ours = mixed(self.place.experts, rows, weights, self.place.apply, self.place.width).double()
        size = torch.zeros(len(ours), dtype=torch.float64)
        for e, expert in enumerate(self.place.experts):
            size += weights[:, e].abs() * expert(rows).abs().amax(1).nan_to_num(math.inf)
        slack = 5 * TOLERANCE * size + 4 * EPS * base.abs().amax(1) + 1e-30
        off = ~((seen - base - ours).abs().amax(1) <= slack)
        if off[clear & torch.isfinite(size)].any():
            return "its experts give something else for large and small rows"
        return None

    # --- by name ------------------------------------------------------------------------------------------------------

    def _guarded(self) -> str | None:
        """What replaces NaN in the router would not show in a choice that NaN takes part in."""
        names = {function_name(call.func) for call in self._between()} & GUARDS
        told = ", ".join(sorted(names))
        return f"it asks for what is not finite ({told}) between its logits and its sum" if names else None

    def _suspects(self) -> str:
        called = [(function_name(call.func), call.line) for call in self._between() if call.line]
        told = dict.fromkeys(f"{name} at {line}" for name, line in called if name in BENDING - {"to", "where", "type"})
        return f" ({', '.join(list(told)[:4])})" if told else ""

    def _between(self) -> list[Call]:
        """The calls from logits, experts' input and experts' outputs to the mixture."""
        known = [self.logits, self.place.input, *([] if self.place.base is None else [self.place.base])]
        return self.probe.program.between(self.place.mixture, known)


def _all_near(ours: Tensor, given: Tensor) -> bool:
    """Whether every row of ours is among those given, to rounding."""

    def near(row: Tensor) -> bool:
        off = (given.double() - row).abs().amax(1) <= TOLERANCE * row.abs().max()
        return bool(off.any())

    return all(near(row) for row in ours.double())


def _span(sizes: Tensor) -> str:
    low, high = float(sizes.min()), float(sizes.max())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


__all__ = ["Extremes"]
