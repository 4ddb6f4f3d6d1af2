"""Pieces of the pages: tables, and quantities as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_MILLISECOND = 1000.0


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def time(us: float, like: str = "") -> str:
    """`us` with three digits; in the unit of `like`, which is then left away."""
    milli = "ms" in like if like else us >= _MILLISECOND
    value = us / _MILLISECOND if milli else us
    text = f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return text if like else f"{text} {'ms' if milli else 'µs'}"


def size_of(count: float) -> str:
    """A number of bytes."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if abs(count) >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"


def percent(share: float) -> str:
    """A share of one."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def write_between(page: Path, name: str, text: str) -> None:
    """Put a table between its marks in a page."""
    begin, end = f"<!-- measured: {name} -->", f"<!-- end of {name} -->"
    old = page.read_text(encoding="utf-8")
    assert begin in old and end in old, f"{page.name} lacks {begin} … {end}"
    new = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: f"{begin}\n{text}\n{end}", old, flags=re.S)
    page.write_text(new, encoding="utf-8")
