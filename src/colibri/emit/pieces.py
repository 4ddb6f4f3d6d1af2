"""Cuts a file's weights into pieces that are computed one at a time, and need no more than one weight in memory.

A piece is consecutive tensors of one section, or rows of one large matrix; the pieces of a section follow each other
without a gap, so that their checksums give the section's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from colibri.emit.model_bin import Arrangement
from colibri.layouts import block_bytes, store
from colibri.program import Program, Section, Tensor
from colibri.spec import LANES, align
from colibri.weights import Deferred, Loaded, Weight, kind_of, loaded, take_rows

_PIECE = 1 << 23  # elements of a piece, about: 32 MB as float32
_BLOCK = 1 << 21  # elements laid out at once
_APART = 3  # tensors from a matrix to its residual at most, for both to be made of one quantised weight


@dataclass(frozen=True, eq=False)
class Piece:
    """Bytes of the file, `offset` … `offset + size`: rows `start` … `stop` of its only part, or whole tensors."""

    name: str
    section: int  # an expert's number; -1: the shared weights
    offset: int
    size: int
    parts: tuple[tuple[Tensor, Weight], ...]
    start: int = 0
    stop: int = 0  # 0: not cut by rows

    def data(self) -> Iterator[bytes]:
        """Its bytes from the first on, a block at a time."""
        held: dict[int, Loaded] = {}  # what a further tensor of the piece is made of
        at = 0
        for n, (tensor, value) in enumerate(self.parts):
            rest = [id(other) for _, other in self.parts[n + 1 :]]
            if self.stop:
                found = take_rows(value, self.start, self.stop)
            else:
                found = held.pop(id(value)) if id(value) in held else loaded(value)
            if id(value) in rest:
                held[id(value)] = found
            for block in _blocks(found, tensor.layout):
                at += len(block)
                yield block
            del found
            end = self.size if n + 1 == len(self.parts) else self.parts[n + 1][0].offset - self.parts[0][0].offset
            if end > at:
                yield bytes(end - at)
                at = end


def cut(program: Program, at: Arrangement) -> list[Piece]:
    """All weights of a program as pieces, in the order they lie in the file."""
    pieces = list(_section(program.shared, -1, at.meta_bytes, ""))
    for n, (expert, place) in enumerate(zip(program.experts, at.places, strict=True)):
        pieces += _section(expert.section, n, place, f"layer {expert.layer} expert {expert.index}: ")
    return pieces


def _section(section: Section, number: int, place: int, stem: str) -> Iterator[Piece]:
    group: list[tuple[Tensor, Weight]] = []
    for n, (tensor, value) in enumerate(section.parts):
        end = section.parts[n + 1][0].offset if n + 1 < len(section.parts) else section.size
        if not group and _by_rows(tensor, value):
            yield from _rows(tensor, value, number, place, end, stem)
            continue
        group.append((tensor, value))
        nearby = {id(other) for _, other in section.parts[n + 1 : n + 1 + _APART]}
        following = section.parts[n + 1 : n + 2]
        full = sum(prod(v.shape) for _, v in group) >= _PIECE or any(_by_rows(*pair) for pair in following)
        if not following or (full and not any(id(v) in nearby for _, v in group)):
            first = group[0][0]
            name = stem + (first.name if len(group) == 1 else f"{first.name} … {tensor.name}")
            yield Piece(name, number, place + first.offset, end - first.offset, tuple(group))
            group = []


def _by_rows(tensor: Tensor, value: Weight) -> bool:
    """Whether a matrix is large, and its rows can be had alone."""
    cuttable = not isinstance(value, Deferred) or value.rows is not None
    return cuttable and _in_blocks(tensor.layout) and kind_of(value)[1] < 0 and prod(value.shape) > 2 * _PIECE


def _rows(tensor: Tensor, value: Weight, number: int, place: int, end: int, stem: str) -> Iterator[Piece]:
    step = align(max(1, _PIECE // tensor.cols), LANES)
    block = block_bytes(tensor.layout, tensor.cols)
    for start in range(0, tensor.rows, step):
        stop = min(start + step, tensor.rows)
        first = tensor.offset + start // LANES * block
        last = end if stop == tensor.rows else tensor.offset + stop // LANES * block
        name = f"{stem}{tensor.name}[{start}:{stop}]"
        yield Piece(name, number, place + first, last - first, ((tensor, value),), start, stop)


def _in_blocks(layout: str) -> bool:
    return layout not in ("flat", "residual")


def _blocks(value: Loaded, layout: str) -> Iterator[bytes]:
    """`store(value, layout)` a few rows at a time."""
    if not _in_blocks(layout):
        yield store(value, layout)
        return
    rows, cols = value.shape
    step = align(max(1, _BLOCK // cols), LANES)
    for start in range(0, rows, step):
        yield store(take_rows(value, start, min(start + step, rows)), layout)
