"""Decides where every buffer lies in the context, so that buffers alive at the same time never overlap.

The lower bound is the largest sum of buffers alive at once: no planner can do better. Placing buffers in a fixed order,
each into the lowest gap that fits, usually reaches it when the order is right, so several orders are tried and the best
is then improved by moving the buffer at the peak to the front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from colibri.program import Buffer, Op, Program, liveness
from colibri.spec import ALIGN_BUFFER, HEAD_BYTES, align

_IMPROVEMENTS = 400  # attempts; each costs the square of the number of buffers


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
    best, best_order, best_peak = [0] * len(spans), list(range(len(spans))), -1
    for key in orders:
        order = sorted(range(len(spans)), key=key)
        offsets = _first_fit(spans, order)
        peak = _peak(spans, offsets)
        if best_peak < 0 or peak < best_peak:
            best, best_order, best_peak = offsets, order, peak
    order, offsets, peak = best_order, best, best_peak
    for attempt in range(_IMPROVEMENTS):
        if best_peak == bound:
            break
        tops = [n for n in range(len(spans)) if offsets[n] + spans[n].bytes == peak]
        chosen = tops[attempt % len(tops)]
        # Moved to the front, or half way there, in turn: the front alone can cycle between two orders.
        at = 0 if attempt % 3 else order.index(chosen) // 2
        order = [n for n in order if n != chosen]
        order.insert(at, chosen)
        offsets = _first_fit(spans, order)
        peak = _peak(spans, offsets)
        if peak < best_peak:
            best, best_peak = offsets, peak
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


def plan(program: Program) -> None:
    """Set every buffer's offset and the program's `context_bytes` and `lower_bound`."""
    nested = []
    for op in program.ops:
        if op.code == "moe":
            work = op.work.place.buffer
            assert work is not None
            first, scratch = work.floats * 4, 0
            for at, count in {(e.first_op, e.ops) for e in program.experts if e.layer == op.layer}:
                buffers, size, _ = _arrange(program.expert_ops[at : at + count])
                scratch = max(scratch, size)
                nested.append((work, first, buffers))
            work.floats += scratch // 4
    _, size, bound = _arrange(program.ops)
    for work, first, buffers in nested:
        for buffer in buffers:
            buffer.offset += HEAD_BYTES + work.offset + first
    for buffer in liveness(program.ops):
        buffer.offset += HEAD_BYTES
    program.context_bytes, program.lower_bound = HEAD_BYTES + size, HEAD_BYTES + bound


def _arrange(ops: Sequence[Op]) -> tuple[list[Buffer], int, int]:
    lives = liveness(ops)
    spans = [Span(align(b.floats * 4, ALIGN_BUFFER), first, last) for b, (first, last) in lives.items()]
    for buffer, offset in zip(lives, place(spans), strict=True):
        buffer.offset = offset
    return (
        list(lives),
        max((b.offset + s.bytes for b, s in zip(lives, spans, strict=True)), default=0),
        lower_bound(spans),
    )
