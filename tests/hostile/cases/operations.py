"""Every operation: operands nowhere, no rows, sizes and functions beyond what there is, codes of no operation."""

from __future__ import annotations

from colibri.format import spec
from tests.hostile.cases.table import U16, U32, Hostile, place, table
from tests.hostile.editor import BASES, Editor

SPACES = (0, len(spec.SPACES), len(spec.SPACES) + 1, U32)
TOO_MANY = (0, spec.LIMIT + 1, U32)


def _base(code: str) -> str:
    """The first model with the operation."""
    return next(base for base in BASES if spec.OPCODES.index(code) in Editor(base).ops["code"])


def _of(operation: spec.Operation) -> list[Hostile]:
    code = operation.name
    # A delay may only store, or only recall; a loop has no operands.
    spaces = SPACES[1:] if code in ("delay", "loop") else SPACES
    operands = ("a", "b" if code == "cache" else "out")
    functions = (len(spec.ENUMS[operation.functions]), U16) if operation.functions else ()
    own = code != "moe"
    return table(
        lambda: _base(code),
        *((f"{code} {o} in space {n}", "PROGRAM", {f"here.{o}.space": n}) for o in operands for n in spaces),
        *((f"{code} with {n} rows", "PROGRAM", {"here.rows": n}) for n in TOO_MANY),
        *((f"{code} of sizes {n}", "PROGRAM", {"here.dims": n}) for n in TOO_MANY if own),
        *((f"{code} with function {n}", "PROGRAM", {"here.func": n}) for n in functions),
        *((f"{code} {w} beyond the tensors", "PROGRAM", {f"here.{w}": 1 << 20}) for w in ("w0", "w1") if own),
        *((f"{code} turned into operation {n}", "PROGRAM", {"here.code": n}) for n in (len(spec.OPCODES), U16)),
        here=place(code),
    )


CASES = [case for operation in spec.OPERATIONS for case in _of(operation)]
