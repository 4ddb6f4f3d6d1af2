"""View of a block through its calls: candidates for logits, the experts' input and the mixture, and the rest.

A `Probe` runs the block on rows of its own with these experts. `Watched` is what the block computes around a mixture.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from colibri.frontends.recognise.moe import Mixture
from colibri.frontends.recognise.recording.calls import Rows, rows_of
from colibri.frontends.recognise.recording.common_calls import SHAPES, CommonCalls
from colibri.frontends.recognise.recording.tape import ExpertCall, Recording, function_name, refs

ROWS = 48  # at least, of the recordings in which values are looked for
TRIED, SIZES = 64, (0.1, 4.0, 16.0)  # of the model's own samples, and factors on random ones, to reach every expert


class Probe:
    """Recordings of a block on random rows of variance 1, and the values they have in common.

    `experts` count as one call each. `theirs` are the tensors of experts that are no modules, which only they read.
    `like` is another probe of such experts.
    """

    def __init__(
        self, rows: Rows, experts: Sequence[nn.Module], theirs: Sequence[Tensor], like: Probe | None = None
    ) -> None:
        self.rows, self.experts = rows, experts
        self._stacked = set() if experts else {id(t) for t in theirs}
        self._around: Sequence[tuple[int, int]] = ()
        self._forced: tuple[int, ...] = ()  # logits in whose place others are put, to reach every expert
        self.tokens: Tensor
        self.more: Tensor
        self.seen: Recording
        self.program: CommonCalls
        if like is not None and not experts:
            self.tokens, self.more, self.seen, self.program = like.tokens, like.more, like.seen, like.program
            return
        width = sum(rows.widths)
        samples = max(3, -(-ROWS // rows.per_sample))
        while samples * rows.per_sample in (len(experts), *rows.widths):  # no axis may be mistaken for the rows
            samples += 1
        counts = (samples * rows.per_sample, (samples + 2) * rows.per_sample)
        self.tokens, self.more = (torch.randn(n, width, generator=torch.Generator().manual_seed(n)) for n in counts)
        for tokens in (self.tokens, self.more):
            reaching = self._reaching(tokens)[: len(tokens) - rows.per_sample]
            tokens[: len(reaching)] = reaching
        self.seen = self.record()
        self.program = CommonCalls(self.seen, rows.record(self.more, experts))
        rows.main = next((n for n in rows.fitting if self._of_experts(self.program.outputs[n])), rows.main)

    def _reaching(self, tokens: Tensor) -> Tensor:
        """Samples' rows that go to experts which these tokens leave out: the model's own, or of another size."""
        per = self.rows.per_sample

        def called(rows: Tensor) -> set[int]:
            return {expert for expert, _, _ in self.rows.record(rows, self.experts).used}

        reached, found = called(tokens), []
        if len(reached) < len(self.experts):
            real = self.rows.real
            own = [real[at : at + per] for at in range(0, len(real), per * max(1, len(real) // per // TRIED))]
            sizes = itertools.product(SIZES, range(0, len(tokens), per))
            for sample in itertools.chain(own, (tokens[at : at + per] * size for size, at in sizes)):
                if new := called(sample) - reached:
                    found.append(sample)
                    reached |= new
                if len(reached) == len(self.experts):
                    break
        return torch.cat(found) if found else tokens[:0]

    @property
    def unreached(self) -> list[int]:
        """The experts that no row of one of the recordings was given to."""
        reached = [{expert for expert, _, _ in run.used} for run in (self.program.one, self.program.two)]
        return sorted(set(range(len(self.experts))) - (reached[0] & reached[1]))

    def reaching_all(self, logits: int) -> Probe:
        """The same with other logits in the place of this value, some for each expert."""
        other = copy.copy(self)
        other._forced = (logits,)
        return other._again()

    def of_result(self, result: int, logits: Sequence[int]) -> Probe:
        """The same, seeing another of the tensors the block returns as its output; `logits` belong to others."""
        other = copy.copy(self)
        other._forced = (*self._forced, *logits)
        other.rows = copy.copy(self.rows)
        other.rows.main = result
        return other

    def missing(self, mixture: int) -> list[int]:
        """The results that need more of the experts than this value."""
        outputs = self.program.outputs
        unknown = [n for n in self.rows.fitting if n != self.rows.main and outputs[n] is not None]
        return [n for n in unknown if self.program.needed([outputs[n] or 0], [mixture]) is None]

    def with_calls(self, around: Sequence[tuple[int, int]]) -> Probe:
        """The same with so many calls before and after each expert as part of it."""
        other = copy.copy(self)
        other._around = around
        return other._again()

    def _again(self) -> Probe:
        self.__dict__.pop("_begun", None)
        self.seen, more = self.driven(self.tokens, {}), self.driven(self.more, {})
        self.program = CommonCalls(self.seen, more)
        return self

    def record(self, outputs: object = None) -> Recording:
        """A recording on the probe's tokens; `outputs` replaces what the experts give."""
        return self.driven(self.tokens, {}, outputs)

    def driven(self, tokens: Tensor, values: Mapping[int, Tensor], outputs: object = None) -> Recording:
        """A recording on other tokens, in which these values have other rows than those that are computed."""
        drive: dict[tuple[int, int], Tensor] = {}
        if values or self._forced:
            forced = {value: self._for_each(len(tokens)) for value in self._forced}
            inputs = self.rows.split(tokens)
            for value, rows in {**forced, **values}.items():
                call, slot = self.program.one.origin[value]
                shaped = rows.reshape(self.program.sizes(value, len(tokens) // self.rows.per_sample))
                if call == 0:
                    inputs[slot] = shaped
                else:
                    drive[call, slot] = shaped
            tokens = self.rows.joined(inputs)
        return self.rows.record(tokens, self.experts, drive, outputs, self._around)

    def _for_each(self, count: int) -> Tensor:
        """Logits that speak for one expert after the other, and less so for the next."""
        experts = len(self.experts)
        logits = torch.randn(count, experts, generator=torch.Generator().manual_seed(9))
        row = torch.arange(count)
        logits[row, row % experts] += 8.0
        logits[row, (row + 1) % experts] += 4.0
        return logits

    # --- values -------------------------------------------------------------------------------------------------------

    def at(self, value: int, recording: Recording | None = None) -> Tensor | None:
        """The rows (n, width) of a value, of the probe's recording unless told otherwise; None where it has none."""
        place = self.program.place(value)
        if place is None or self.program.shape(value) is None:
            return None
        calls = len(self.program.one.calls)
        if self.program.first == calls and place[0] >= self._begun:
            place = (place[0] - calls, *place[1:])  # experts that no token chose until now may add calls before it
        recording = self.seen if recording is None else recording
        tensor = self.program.find(recording, place)
        return rows_of(tensor, recording.samples * self.rows.per_sample) if tensor.dtype == torch.float32 else None

    def width(self, value: int) -> int:
        """Of a value's rows; 0 where it has none."""
        rows = self.at(value)
        return 0 if rows is None else rows.shape[1]

    def before(self, width: int) -> list[int]:
        """Values whose rows have this width and that need no expert: those that differ, then those equal to one."""
        found: dict[bytes, list[int]] = {}
        for value, (call, _) in enumerate(self.program.one.origin):
            if call >= self.program.first or self.width(value) != width:
                continue
            calls = self.program.needed([value])
            if calls is None or self._reads_stacks(calls):
                continue
            rows = self.at(value)
            assert rows is not None
            found.setdefault(rows.numpy().tobytes(), []).append(value)
        return [same[0] for same in found.values()] + [v for same in found.values() for v in same[1:]]

    def mixtures(self, width: int | None = None) -> Iterator[int]:
        """Values that cut the experts off: the block's output needs nothing of them but this value."""
        output = self.output
        if output is None:
            return
        for value in range(len(self.program.one.values)):
            size = self.width(value)
            if size == 0 or (width is not None and size != width):
                continue
            calls = self.program.needed([output], [value])
            if calls is not None and not self._reads_stacks(calls):
                yield value

    @functools.cached_property
    def _begun(self) -> int:
        """The first call that is an expert's."""
        program = self.program
        theirs = (n for n, call in enumerate(program.one.calls) if isinstance(call.func, ExpertCall)
                  or (n in program.templates and self._reads_stacks([n])))  # fmt: skip
        return next(theirs, len(program.one.calls))

    @property
    def output(self) -> int | None:
        """The value that is the block's main output."""
        return self.program.outputs[self.rows.main]

    def _of_experts(self, output: int | None) -> bool:
        calls = None if output is None else self.program.needed([output])
        return calls is None or self._reads_stacks(calls)

    def _reads_stacks(self, calls: Sequence[int]) -> bool:
        return any(id(tensor) in self._stacked for tensor in self.program.tensors(calls))

    @property
    def sequential(self) -> bool:
        """Whether an expert's input depends on an expert's output: layers one after the other, no experts."""
        after: set[int] = set()  # values that depend on an expert
        for call in self.program.one.calls:
            depends = any(value in after for value in refs(call.args))
            if isinstance(call.func, ExpertCall) and depends:
                return True
            if isinstance(call.func, ExpertCall) or depends:
                after.update(call.results)
        return False


class Watched:
    """The block's own calls before and after its experts.

    The values `logits` and `z` follow from the block's inputs, its outputs from the value `mixture`; `base` is added to
    the mixture where the experts' outputs are added to something that was there before.
    """

    def __init__(self, probe: Probe, logits: int, z: int, mixture: int, base: int | None) -> None:
        self.program = probe.program
        self.logits, self.z, self.mixture, self.base = logits, z, mixture, base
        self.widths = [probe.width(logits), probe.width(z)]
        self.output = probe.output  # the block's main output

    def __call__(
        self, inputs: Sequence[Tensor], mixture: Mixture, known: dict[int, Tensor] | None = None
    ) -> list[Tensor | None]:
        """The block's outputs; `known` keeps the values computed, for other mixtures in the same program."""
        program, (experts, width) = self.program, self.widths
        env = {} if known is None else known
        env.update(zip(program.inputs, inputs, strict=True))
        logits, z, *base = program.replay([self.logits, self.z, *self._bases], env)
        y = mixture(z.reshape(-1, width), logits.reshape(-1, experts))
        y = y.reshape(program.sizes(self.mixture, inputs[0].shape[0]))
        env[self.mixture] = y + base[0].reshape(y.shape) if base else y
        outs: list[Tensor | None] = []
        for value in program.outputs:
            follows = value is not None and program.needed([value], list(env)) is not None
            outs += program.replay([value], env) if follows and value is not None else [None]
        return outs

    @property
    def _bases(self) -> list[int]:
        return [] if self.base is None else [self.base]

    def _before(self) -> list[int]:
        return self.program.needed([self.logits, self.z, *self._bases]) or []

    def _behind(self, outputs: Sequence[int | None]) -> list[int]:
        known = [v for v in outputs if v is not None]
        return [n for v in known for n in self.program.needed([v], [self.mixture]) or []]

    def held(self) -> list[Tensor]:
        """What the calls before and behind the experts read."""
        return self.program.tensors([*self._before(), *self._behind(self.program.outputs)])

    def describe(self) -> tuple[str, str, list[str]]:
        """The logits, the experts' input, and what comes after, in words."""
        program, before = self.program, set(self._before())
        known = {*program.inputs, *(v for n in before for v in program.one.calls[n].results)}
        after = [f"added to {program.describe(v)}" for v in self._bases]
        for n in self._behind([self.output]):
            call = program.one.calls[n]
            name = call.path or function_name(call.func)
            others = [] if call.path else [program.describe(v) for v in refs(call.args) if v in known]
            if n not in before and name not in SHAPES and (name != "add" or others):
                after.append(" ".join([name, *others]))
        kept = [name for name in dict.fromkeys(after) if not any(name.startswith(f"{other}.") for other in after)]
        return program.describe(self.logits), program.describe(self.z), kept


def largest(tensor: Tensor) -> float:
    """The largest magnitude; infinite where there is a NaN, 0 where there is nothing."""
    worst = float(tensor.abs().max()) if tensor.numel() else 0.0
    return worst if math.isfinite(worst) else math.inf


__all__ = ["Probe", "Watched", "largest"]
