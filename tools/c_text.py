"""Pieces of C for the writers of generated headers: comments, rows with their meanings, and the committed format."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100  # columns, as .clang-format has it


def comment(text: str, indent: str = "") -> list[str]:
    """A comment of as few lines as it needs."""
    return textwrap.wrap(f"/* {text} */", WIDTH, initial_indent=indent, subsequent_indent=f"{indent} * ")


def aligned(rows: Sequence[str], meanings: Sequence[str], indent: str = "    ") -> list[str]:
    """Rows, each with what it means: behind all of them, or before each where one would be too long."""
    width = max(map(len, rows)) + 1
    if all(width + len(f"/* {meaning} */") <= WIDTH for meaning in meanings):
        return [f"{row:<{width}}/* {meaning} */" for row, meaning in zip(rows, meanings, strict=True)]
    return [line for row, meaning in zip(rows, meanings, strict=True) for line in [*comment(meaning, indent), row]]


def macro(head: str, rows: Sequence[str]) -> list[str]:
    """A macro of some rows."""
    lines = [f"#define {head}", *(f"    {row}" for row in rows)]
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def formatted(text: str, path: Path) -> str:
    """C as the committed .clang-format has it; raises where clang-format is not installed (`pip install '.[test]'`)."""
    command = [str(Path(sys.executable).with_name("clang-format")), f"--assume-filename={path}"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
