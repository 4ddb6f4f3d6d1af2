"""Differences between two model files: which experts, what else, and how many pages of the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from colibri.format import spec
from colibri.format.package import Bytes, Package

PAGE = 4096  # bytes: what a system maps
_CHUNK = 1 << 14  # pages compared at once


@dataclass(frozen=True)
class ExpertChange:
    """One expert that differs, by its number in the original model; `before` or `after` is 0 where it has no weights.

    `change` is "weights", "added", "removed", or "moved" where the same weights stand elsewhere in the file.
    """

    layer: int
    expert: int
    change: str
    before: int
    after: int


@dataclass(frozen=True)
class Difference:
    """What two model files have not in common."""

    experts: list[ExpertChange]
    router: bool  # a routing descriptor, or the matrix and bias whose product the logits are
    program: bool  # operations, sizes, inputs or outputs
    shared: bool  # weights outside the experts, the routers' apart
    certificate: bool  # golden rows
    information: bool  # name, producer, how often calibration chose each expert
    pages: int  # of 4,096 bytes that differ, those that only one file has included
    pages_of: int  # of the longer file
    bytes_before: int
    bytes_after: int

    @property
    def same(self) -> bool:
        """Whether the files are equal byte for byte."""
        return self.pages == 0

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        return {"same": self.same, **asdict(self)}

    def __str__(self) -> str:
        if self.same:
            return "the files are the same"
        lines = [
            f"layer {e.layer}, expert {e.expert}: {e.change}, {e.before:,} bytes before, {e.after:,} after"
            for e in self.experts
        ] or ["no expert changed"]
        for name in ("router", "program", "shared", "certificate", "information"):
            what = "shared weights" if name == "shared" else name
            lines.append(f"{what}: {'changed' if getattr(self, name) else 'the same'}")
        lines.append(f"{self.pages:,} of {self.pages_of:,} pages of {PAGE:,} bytes differ")
        lines.append(f"file: {self.bytes_before:,} bytes before, {self.bytes_after:,} after")
        return "\n".join(lines)


def compare(old: Package, new: Package) -> Difference:
    """What changed from `old` to `new`; both are read whole."""
    routers = _routers(old), _routers(new)
    return Difference(
        experts=_experts(old, new),
        router=_layers(old) != _layers(new)
        or not _equal([_weights(old, n) for n in routers[0]], [_weights(new, n) for n in routers[1]]),
        program=_program(old) != _program(new),
        shared=not _equal(_shared(old, routers[0]), _shared(new, routers[1])),
        certificate=_golden(old) != _golden(new),
        information=old.info != new.info or _shares(old) != _shares(new),
        pages=_pages(old.data, new.data),
        pages_of=-(-max(len(old.data), len(new.data)) // PAGE),
        bytes_before=len(old.data),
        bytes_after=len(new.data),
    )


def _experts(old: Package, new: Package) -> list[ExpertChange]:
    before, after = _by_number(old), _by_number(new)
    changes = []
    for key in sorted(before.keys() | after.keys()):
        a, b = before.get(key), after.get(key)
        sizes = tuple(0 if e is None else int(e["bytes"]) for e in (a, b))
        held = [[] if e is None else [_at(p, e)] for p, e in ((old, a), (new, b))]
        change = ""
        if (a is None or a["ops"] == 0) != (b is None or b["ops"] == 0):
            change = "added" if a is None or a["ops"] == 0 else "removed"
        elif not _equal(held[0], held[1]):
            change = "weights"
        elif a is not None and b is not None and a["ops"] and a["offset"] != b["offset"]:
            change = "moved"
        if change:
            changes.append(ExpertChange(*key, change, *sizes))
    return changes


def _by_number(package: Package) -> dict[tuple[int, int], Any]:
    return {(int(e["layer"]), int(e["index"])): e for e in package.experts}


def _at(package: Package, record: Any) -> Bytes:
    at = int(record["offset"])
    return package.data[at : at + int(record["bytes"])]


def _equal(a: Sequence[Bytes], b: Sequence[Bytes]) -> bool:
    return len(a) == len(b) and all(map(np.array_equal, a, b))


def _routers(package: Package) -> list[int]:
    """The shared tensors of the products that write what a layer's router reads."""
    found: list[int] = []
    main = package.ops[: int(package.header["main_ops"])]
    for n, op in enumerate(main):
        if op["code"] == spec.OPCODES.index("moe"):
            writers = [m for m in range(n) if _place(main[m]["out"]) == _place(op["b"])]
            if writers and spec.OPERATIONS[main[writers[-1]]["code"]].walk == "product":
                product = spec.named(main[writers[-1]])
                found += [int(product[name]) for name in ("matrix", "bias") if product[name] != spec.NONE]
    return found


def _place(operand: Any) -> tuple[int, int]:
    return int(operand["space"]), int(operand["offset"])


def _weights(package: Package, tensor: int) -> Bytes:
    return _at(package, package.tensors[tensor])


def _shared(package: Package, routers: list[int]) -> list[Bytes]:
    shared = spec.SCOPES.index("shared")
    return [_weights(package, n) for n, t in enumerate(package.tensors) if t["scope"] == shared and n not in routers]


def _layers(package: Package) -> bytes:
    return package.layers.tobytes() + package.experts["index"].tobytes()


def _program(package: Package) -> list[Any]:
    """Operations, tensors without their place in the file, and the header's sizes."""
    tensors = package.tensors.copy()
    tensors["offset"][tensors["scope"] == spec.SCOPES.index("shared")] -= package.header["meta_bytes"]
    runs = [package.experts[name].tobytes() for name in ("layer", "index", "first_op", "ops")]
    sizes = [int(package.header[name]) for name in ("max_batch", "context_bytes", "main_ops")]
    return [package.ops.tobytes(), tensors.tobytes(), runs, sizes, package.inputs, package.outputs]


def _golden(package: Package) -> bytes:
    h = package.header
    at = int(h["golden_offset"])
    return package.data[at : at + int(h["golden_rows"]) * int(h["golden_bytes"])].tobytes()


def _shares(package: Package) -> list[float]:
    return [float(f) for f in package.experts["frequency"]]


def _pages(a: Bytes, b: Bytes) -> int:
    """Pages that differ; a page that ends early differs from one that does not."""
    both = min(len(a), len(b)) // PAGE * PAGE
    different = 0
    for at in range(0, both, _CHUNK * PAGE):
        part = slice(at, min(at + _CHUNK * PAGE, both))
        different += int((a[part] != b[part]).reshape(-1, PAGE).any(axis=1).sum())
    rest = -(-max(len(a), len(b)) // PAGE) - both // PAGE
    if rest and len(a) == len(b):
        rest = int((a[both:] != b[both:]).any())
    return different + rest
