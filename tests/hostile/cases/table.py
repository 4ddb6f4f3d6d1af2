"""The form of the tables: named changes of a valid model, and the errors that may refuse each.

A row says its name, its error and the fields to set, by their paths (see `Editor`). A value may be a function of the
model as changed so far. Two errors are joined by `or`; OK among them: running the model is harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.hostile.editor import HEADER, Editor

U16, U32, U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1
Fields = dict[str, Any]  # path: number, name, or function of the editor
Row = tuple[str, str, Fields]
Count = Callable[[Editor], int]


@dataclass(frozen=True)
class Hostile:
    """One case. `here` finds the operation it is about.

    `cost` counts multiply-accumulates: the header owns up to what the change adds to them.
    """

    name: str
    base: str
    errors: tuple[str, ...]
    fields: Fields
    here: Count | None = None
    cost: Count | None = None

    def edited(self) -> Editor:
        """The changed model; its checksums do not fit."""
        edit = Editor(self.base)
        before = self.cost(edit) if self.cost else 0
        edit.here = self.here(edit) if self.here else None
        edit.update(self.fields)
        if self.cost:
            edit["header.worst_macs"] += self.cost(edit) - before
        return edit


def table(base: str, *rows: Row, here: Count | None = None, cost: Count | None = None) -> list[Hostile]:
    """Cases on one base."""
    return [Hostile(name, base, tuple(error.split(" or ")), fields, here, cost) for name, error, fields in rows]


def values(base: str, *rows: tuple[Any, ...]) -> list[Hostile]:
    """Cases of one field each: its path, the error, and the values that cause it."""
    single = ((path, error, value) for path, error, *each in rows for value in each)
    return table(base, *((f"{path.replace('.', ' ')} {v}", error, {path: v}) for path, error, v in single))


def place(code: str, more: int = 0) -> Count:
    """The number of the first operation `code`, and `more`."""
    return lambda edit: edit.find(code) + more


def of(path: str, more: int = 0) -> Count:
    """The value of a field, and `more`."""
    return lambda edit: int(edit[path]) + more


# Nobody else accounts for the certificate's bytes, so the information text does.
NO_CERTIFICATE: Fields = {
    "header.golden_rows": 0, "header.info_offset": HEADER, "header.info_bytes": of("header.meta_bytes", -HEADER)
}  # fmt: skip
