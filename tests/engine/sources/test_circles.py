"""C files stand in one direction: none calls or includes another that leads back to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.engine.conftest import Build, compiler
from tools import size


def circles(needs: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Groups of names that all lead to one another."""

    def reach(start: str) -> set[str]:
        found: set[str] = set()
        new = {start}
        while new:
            new = {used for name in new for used in needs.get(name, ())} - found
            found |= new
        return found

    reached = {name: reach(name) for name in needs}
    return {frozenset(other for other in reached[name] if name in reached.get(other, ()))
            for name in needs if name in reached[name]}  # fmt: skip


def calls(objects: list[Path]) -> dict[str, set[str]]:
    """Which object needs a symbol of which others."""
    defined: dict[str, str] = {}
    wanted: dict[str, set[str]] = {path.stem: set() for path in objects}
    for path in objects:
        for kind, name in re.findall(r"^[0-9a-f ]*\s(\w) (\S+)$", size.run("nm", path), re.M):
            if kind in "Uw":
                wanted[path.stem].add(name)
            elif kind.isupper():
                defined[name] = path.stem
    return {stem: {defined[name] for name in names if name in defined} - {stem} for stem, names in wanted.items()}


def includes(files: list[Path]) -> dict[str, set[str]]:
    """Which file includes which others, by name."""
    return {p.name: set(re.findall(r'^#include "(?:[\w.]+/)*([\w.]+)"', p.read_text(encoding="utf-8"), re.M))
            for p in files}  # fmt: skip


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == {frozenset("bc"), frozenset("d")}
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()


def test_the_tokenizers_files_call_in_one_direction(tmp_path: Path) -> None:
    """8.3: what proves, what knows characters, what cuts, what merges, what encodes."""
    size.build(tmp_path, compiler("gcc"), target="libcolibri_lm.a")
    needs = calls(sorted(tmp_path.glob("tokenizer*.o")))
    assert needs["tokenizer_encode"] == {"tokenizer_merge", "tokenizer_split", "tokenizer_text"}
    assert circles(needs) == set()


def test_the_engines_files_call_in_one_direction(gcc_build: Build) -> None:
    """8.3: checksums, parsing, rows, sums and sizes of layouts are below all that needs them."""
    needs = calls(size.objects(gcc_build.directory))
    assert needs["context"] & {"forward", "file"} and needs["order"]  # symbols were read
    assert circles(needs) == set()


@pytest.mark.parametrize("folders", [("lm", "include"), ("src", "include"), ("host", "include")])
def test_no_files_include_each_other_in_a_circle(folders: tuple[str, ...]) -> None:
    files = [p for folder in folders for p in (size.ENGINE / folder).rglob("*.[ch]")]
    needs = includes(files)
    assert len(needs) == len(files)  # names are unique
    assert circles(needs) == set()
