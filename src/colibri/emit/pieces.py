"""Pieces of a file's weights that are computed one at a time and need no more than one weight in memory.

A piece is consecutive tensors of one section, or rows of one large matrix; the pieces of a section follow each other
without a gap, so that their checksums give the section's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from colibri.emit.model_bin import Arrangement
from colibri.errors import ExportError
from colibri.format.layouts import block_bytes, store
from colibri.format.spec import LANES, align
from colibri.ir.weights import Deferred, Loaded, kind_of, loaded, take_rows
from colibri.lowering.program import Part, Program, Section

_PIECE = 1 << 23  # elements of a piece, about: 32 MB as float32
_BLOCK = 1 << 21  # elements laid out at once
_APART = 3  # tensors from a matrix to its outliers at most, for both to be made of one quantised weight


@dataclass(frozen=True, eq=False)
class Piece:
    """Bytes of the file, `offset` … `offset + size`: rows `start` … `stop` of its only part, or whole tensors."""

    where: str  # in front of a tensor's name: the expert it is of
    section: int  # an expert's number; -1: the shared weights
    offset: int
    size: int
    parts: tuple[Part, ...]
    start: int = 0
    stop: int = 0  # 0: not cut by rows

    @property
    def name(self) -> str:
        """For people: what it holds."""
        rows = f"[{self.start}:{self.stop}]" if self.stop else ""
        more = f" … {self.parts[-1].name}" if len(self.parts) > 1 else ""
        return f"{self.where}{self.parts[0].name}{more}{rows}"

    def data(self) -> Iterator[bytes]:
        """Its bytes from the first on, a block at a time; raises ExportError with the name of what cannot be read."""
        held: dict[int, Loaded] = {}  # what a further tensor of the piece is made of
        at = 0
        for n, part in enumerate(self.parts):
            key = id(part.value)
            found = held.pop(key) if key in held else self._read(part)
            if any(other.value is part.value for other in self.parts[n + 1 :]):
                held[key] = found
            for block in _blocks(found, part.tensor.layout):
                at += len(block)
                yield block
            del found
            last = n + 1 == len(self.parts)
            end = self.size if last else self.parts[n + 1].tensor.offset - self.parts[0].tensor.offset
            if end > at:
                yield bytes(end - at)
                at = end

    def _read(self, part: Part) -> Loaded:
        try:
            return take_rows(part.value, self.start, self.stop) if self.stop else loaded(part.value)
        except ExportError as error:
            raise ExportError(f"{self.where}{part.name}: {error}") from None
        except MemoryError:
            raise ExportError(f"{self.where}{part.name}: not enough memory: use fewer workers") from None
        except Exception as error:
            raise ExportError(f"{self.where}{part.name} cannot be read: {type(error).__name__}: {error}") from error


def cut(program: Program, at: Arrangement) -> list[Piece]:
    """All weights of a program as pieces, in the order they lie in the file."""
    pieces = list(_section(program.shared, -1, at.meta_bytes, ""))
    for n, (expert, place) in enumerate(zip(program.experts, at.places, strict=True)):
        pieces += _section(expert.section, n, place, f"layer {expert.layer} expert {expert.index}: ")
    return pieces


def _section(section: Section, number: int, place: int, where: str) -> Iterator[Piece]:
    group: list[Part] = []
    for n, part in enumerate(section.parts):
        end = section.parts[n + 1].tensor.offset if n + 1 < len(section.parts) else section.size
        if not group and _by_rows(part):
            yield from _rows(part, number, place, end, where)
            continue
        group.append(part)
        nearby = {id(other.value) for other in section.parts[n + 1 : n + 1 + _APART]}
        following = section.parts[n + 1 : n + 2]
        full = sum(prod(p.value.shape) for p in group) >= _PIECE or any(map(_by_rows, following))
        if not following or (full and not any(id(p.value) in nearby for p in group)):
            first = group[0].tensor.offset
            yield Piece(where, number, place + first, end - first, tuple(group))
            group = []


def _by_rows(part: Part) -> bool:
    """Whether a matrix is large, and its rows can be had alone."""
    value = part.value
    cuttable = not isinstance(value, Deferred) or value.rows is not None
    large = prod(value.shape) > 2 * _PIECE
    return large and cuttable and _in_blocks(part.tensor.layout) and kind_of(value)[1] < 0


def _rows(part: Part, number: int, place: int, end: int, where: str) -> Iterator[Piece]:
    tensor = part.tensor
    step = align(max(1, _PIECE // tensor.cols), LANES)
    block = block_bytes(tensor.layout, tensor.cols)
    for start in range(0, tensor.rows, step):
        stop = min(start + step, tensor.rows)
        first = tensor.offset + start // LANES * block
        last = end if stop == tensor.rows else tensor.offset + stop // LANES * block
        yield Piece(where, number, place + first, last - first, (part,), start, stop)


def _in_blocks(layout: str) -> bool:
    return layout not in ("flat", "outliers")


def _blocks(value: Loaded, layout: str) -> Iterator[bytes]:
    """`store(value, layout)` a few rows at a time."""
    if not _in_blocks(layout):
        yield store(value, layout)
        return
    rows, cols = value.shape
    step = align(max(1, _BLOCK // cols), LANES)
    for start in range(0, rows, step):
        yield store(take_rows(value, start, min(start + step, rows)), layout)
