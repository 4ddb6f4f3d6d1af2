"""Benchmarks: each folder stands alone, and imports that come late find what they name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))
MODULES = {file.stem for file in FILES} - {"executorch"}  # a package has that name too
SHARED = {"common", "limits"}


def imported(path: Path) -> Iterator[str]:
    """The modules of benchmarks that a file names, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "benchmarks")))
def test_a_benchmark_imports_itself_and_what_is_shared(path: Path) -> None:
    own = path.relative_to(ROOT / "benchmarks").parts[0]
    for name in imported(path):
        first, *rest = name.split(".")
        if first != "benchmarks":
            assert first not in MODULES, f"{name} is named without its folder"
            continue
        assert rest[0] in {own, *SHARED}
        named, holder = ROOT.joinpath("benchmarks", *rest), ROOT.joinpath("benchmarks", *rest[:-1])
        files = named.with_suffix(".py"), named, holder.with_suffix(".py"), holder / "__init__.py"
        assert any(file.exists() for file in files), f"{name} is not there"
