"""Arena layout: the offset of every buffer in the context, so that buffers alive at the same time never overlap.

The lower bound is the largest sum of buffers alive at once: no planner can do better. First fit in one of a few orders,
improved by moving forward what lies at the peak, usually reaches it; where it does not, a search over placements from
the lowest address up goes on until it does or its allowance is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from colibri.format.spec import ALIGN_BUFFER, HEAD_BYTES, align
from colibri.lowering.program import Buffer, Op, Program, liveness

_IMPROVEMENTS, _EFFORT = 100, 4_000_000  # attempts, and attempts times the square of the number of buffers
_ALLOWANCE = 20_000  # placements the search may try; each costs the number of buffers
_SEARCHED = 300  # buffers; the search recurses once for each

Kept = TypeVar("Kept")  # a buffer, or where it was


@dataclass(frozen=True)
class Span:
    """One buffer to place: its bytes, and the first and last operation that touch it."""

    bytes: int
    first: int
    last: int

    def meets(self, other: Span) -> bool:
        """Whether both are alive at some operation."""
        return self.first <= other.last and other.first <= self.last


def lower_bound(spans: Sequence[Span]) -> int:
    """The largest sum of bytes alive at one operation."""
    return max((sum(s.bytes for s in spans if s.first <= t.first <= s.last) for t in spans), default=0)


def place(spans: Sequence[Span]) -> list[int]:
    """An offset for each span, such that spans alive together are disjoint and the largest end is small."""
    bound = lower_bound(spans)
    orders: list[Callable[[int], tuple[int, ...]]] = [
        lambda n: (-spans[n].bytes, spans[n].first),
        lambda n: (spans[n].first, -spans[n].bytes),
        lambda n: (spans[n].first - spans[n].last, -spans[n].bytes),
        lambda n: (-spans[n].bytes * (spans[n].last - spans[n].first + 1), n),
    ]
    plans = [_improve(spans, sorted(range(len(spans)), key=key), bound) for key in orders]
    best = min(plans, key=lambda offsets: _peak(spans, offsets))
    # Close to the bound is easier to reach than the bound itself, and good enough where that is too hard.
    for target in (bound, bound + bound // 64):
        if _peak(spans, best) > target and len(spans) <= _SEARCHED:
            best = _Search(spans, target).result or best
    return best


def _improve(spans: Sequence[Span], order: list[int], bound: int) -> list[int]:
    """First fit in `order`, then again and again with the span at the peak moved forward, while that may help."""
    best = offsets = _first_fit(spans, order)
    for attempt in range(min(_IMPROVEMENTS, _EFFORT // max(1, len(spans)) ** 2)):
        peak = _peak(spans, offsets)
        if peak == bound:
            return offsets
        tops = [n for n in order if offsets[n] + spans[n].bytes == peak]
        chosen = tops[attempt % len(tops)]
        # To the front, or, every third time, only half way: the front alone can cycle between two orders.
        at = 0 if attempt % 3 else order.index(chosen) // 2
        order = [n for n in order if n != chosen]
        order.insert(at, chosen)
        offsets = _first_fit(spans, order)
        best = min(best, offsets, key=lambda o: _peak(spans, o))
    return best


def _peak(spans: Sequence[Span], offsets: Sequence[int]) -> int:
    return max((o + s.bytes for o, s in zip(offsets, spans, strict=True)), default=0)


def _first_fit(spans: Sequence[Span], order: Sequence[int]) -> list[int]:
    offsets = [0] * len(spans)
    placed: list[int] = []  # by offset
    for n in order:
        at = 0
        for other in placed:
            if spans[n].meets(spans[other]):
                if offsets[other] - at >= spans[n].bytes:
                    break
                at = max(at, offsets[other] + spans[other].bytes)
        offsets[n] = at
        placed.append(n)
        placed.sort(key=offsets.__getitem__)
    return offsets


class _Search:
    """Depth first over placements by nondecreasing offset, none of whose ends may pass `target`.

    Time is cut where a span begins, for only there can the sum alive reach a maximum. `floor` is the height reached at
    each time; the next span goes onto the lowest stretch of it, or that stretch is given up to the height beside it.
    """

    def __init__(self, spans: Sequence[Span], target: int) -> None:
        self.spans, self.target, self.left = spans, target, _ALLOWANCE
        times = sorted({s.first for s in spans})
        self.cover = [[t for t, time in enumerate(times) if s.first <= time <= s.last] for s in spans]
        self.offsets = [0] * len(spans)
        rest = [sum(s.bytes for s, c in zip(spans, self.cover, strict=True) if t in c) for t in range(len(times))]
        found = self._place(frozenset(range(len(spans))), [0] * len(times), rest)
        self.result = self.offsets if found else None

    def _place(self, waiting: frozenset[int], floor: list[int], rest: list[int]) -> bool:
        if not waiting:
            return True
        self.left -= 1
        if self.left < 0 or any(f + r > self.target for f, r in zip(floor, rest, strict=True)):
            return False
        level = min(f for f, r in zip(floor, rest, strict=True) if r)
        start = next(t for t, f in enumerate(floor) if f == level and rest[t])
        end = start
        while end < len(floor) and floor[end] == level:
            end += 1
        inside = [n for n in waiting if self.cover[n][0] >= start and self.cover[n][-1] < end]
        tried = set()
        for n in sorted(inside, key=lambda n: (-len(self.cover[n]) * self.spans[n].bytes, n)):
            shape = (self.spans[n].bytes, self.cover[n][0], self.cover[n][-1])
            if shape in tried:
                continue
            tried.add(shape)
            self.offsets[n] = level
            higher, less = floor.copy(), rest.copy()
            for t in self.cover[n]:
                higher[t] += self.spans[n].bytes
                less[t] -= self.spans[n].bytes
            if self._place(waiting - {n}, higher, less):
                return True
        beside = [floor[t] for t in (start - 1, end) if 0 <= t < len(floor) and floor[t] > level]
        if not beside:
            return False
        raised = floor.copy()
        raised[start:end] = [min(beside)] * (end - start)
        return self._place(waiting, raised, rest)


def plan(program: Program) -> None:
    """Set every buffer's offset and the program's `context_bytes`, `cleared_bytes` and `lower_bound`.

    The experts of a layer never run together: their scratch shares one place behind the layer's workspace.
    """
    nested: list[tuple[Buffer, int, list[Buffer]]] = []
    least: dict[Buffer, int] = {}  # a workspace with the least scratch any planner could give it
    for op in program.ops:
        if op.code == "moe":
            work = op.work.place.buffer
            assert work is not None
            first, scratch, bound = work.floats * 4, 0, 0
            for at, count in {(e.first_op, e.ops) for e in program.experts if e.layer == op["layer"]}:
                buffers, size, lowest = _arrange(program.expert_ops[at : at + count], {})
                scratch, bound = max(scratch, size), max(bound, lowest)
                nested.append((work, first, buffers))
            work.floats += scratch // 4
            op["scratch"] = scratch // 4
            least[work] = first + bound
    _, size, bound = _arrange(program.ops, least)
    for work, first, buffers in nested:
        for buffer in buffers:
            buffer.offset += HEAD_BYTES + work.offset + first
    for buffer in liveness(program.ops):
        buffer.offset += HEAD_BYTES
    caches = {op.work.place.buffer for op in program.ops if "keeps_cache" in op.known.traits}
    kept = {buffer: buffer.floats * 4 for buffer in liveness(program.ops) if buffer.kept}
    places, program.cleared_bytes, program.context_bytes = place_kept(kept, caches, HEAD_BYTES + size)
    for buffer, offset in places.items():
        buffer.offset = offset
    program.lower_bound = HEAD_BYTES + bound + sum(kept.values())


def place_kept(
    sizes: Mapping[Kept, int], caches: Collection[Kept | None], first: int
) -> tuple[dict[Kept, int], int, int]:
    """The offset of all that is kept, `first` being the end of all else, and the ends of what is cleared and of it all.

    It lies in the order of the program, caches last: nothing needs to clear them.
    """
    places: dict[Kept, int] = {}
    cleared = end = first
    for key in sorted(sizes, key=caches.__contains__):
        places[key] = end
        end += sizes[key]
        cleared = cleared if key in caches else end
    return places, cleared, end


def _arrange(ops: Sequence[Op], least: Mapping[Buffer, int]) -> tuple[list[Buffer], int, int]:
    """Place the buffers of `ops`; returns them, the bytes they take, and the lower bound."""
    lives = {buffer: span for buffer, span in liveness(ops).items() if not buffer.kept}
    spans = [Span(align(b.floats * 4, ALIGN_BUFFER), first, last) for b, (first, last) in lives.items()]
    lowest = [Span(least.get(b, s.bytes), s.first, s.last) for b, s in zip(lives, spans, strict=True)]
    offsets = place(spans)
    for buffer, offset in zip(lives, offsets, strict=True):
        buffer.offset = offset
    return list(lives), _peak(spans, offsets), lower_bound(lowest)
