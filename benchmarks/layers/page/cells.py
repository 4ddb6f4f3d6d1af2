"""Finding results: the cells of a peer, of a place, of Colibri and who competes with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.layers.bounds import WEIGHT_BYTES

EVEN = 1.05  # times closer than this are called even
ORDER = tuple(WEIGHT_BYTES)  # of the precisions
# What is compared with what: a name, the precisions, and whether the loop around the calls is in C.
_CLASSES = (
    ("fp32 in C", ("fp32",), True),
    ("fp32", ("fp32",), False),
    ("16 or 8 bits", ("fp16", "int8"), False),
    ("4 bits", ("int4",), False),
)
Cell = dict[str, Any]
Data = dict[str, Any]


def ours(cell: Cell) -> bool:
    """Whether it is Colibri's."""
    return str(cell["peer"]).startswith("colibri")


def in_c(cell: Cell) -> bool:
    """Whether the loop around the calls is in C."""
    return str(cell["peer"]).startswith(("colibri-c-", "plain-c"))


def cell(data: Data, peer: str, size: str, batch: int, threads: int = 1) -> Cell | None:
    """One result."""
    place = (peer, size, batch, threads)
    return next((c for c in data["cells"] if (c["peer"], c["size"], c["batch"], c["threads"]) == place), None)


def fastest(
    data: Data, prefix: str, size: str, batch: int, kinds: Sequence[str] = ORDER, threads: int = 1
) -> Cell | None:
    """The fastest peer whose name begins so."""
    place = (size, batch, threads)
    found = [c for c in data["cells"] if (c["size"], c["batch"], c["threads"]) == place
             and c["dtype"] in kinds and c["peer"].startswith(prefix)]  # fmt: skip
    return min(found, key=lambda c: float(c["us"]), default=None)


def places(data: Data) -> Iterable[tuple[str, int, int, list[Cell]]]:
    """Size, batch, threads, and the results there."""
    found: dict[tuple[str, int, int], list[Cell]] = {}
    for c in data["cells"]:
        found.setdefault((c["size"], c["batch"], c["threads"]), []).append(c)
    order = list(data["sizes"])
    for place in sorted(found, key=lambda p: (order.index(p[0]), p[2], p[1])):
        yield (*place, found[place])


def contests(data: Data) -> Iterable[tuple[str, int, int, str, Cell, Cell]]:
    """Size, batch, threads, label, Colibri's and the best other cell, for each precision and way of calling."""
    for size, batch, threads, cells in places(data):
        for label, dtypes, c_loop in _CLASSES:
            alike = [c for c in cells if c["dtype"] in dtypes and c_loop == in_c(c)]
            sides = [[c for c in alike if ours(c) == mine] for mine in (True, False)]
            if all(sides):
                mine, peer = (min(side, key=lambda c: float(c["us"])) for side in sides)
                yield size, batch, threads, label, mine, peer
