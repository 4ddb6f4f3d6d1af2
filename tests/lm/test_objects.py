"""What the tokenizer's library is made of: no heap, no system call, no mutable data, little stack, few lines."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from colibri.build.callgraph import FLAGS
from tests.engine.conftest import C_FLAGS, compiler
from tools import size

USED = {"memcpy", "memmove", "memset", "memcmp"}  # what engine/freestanding declares


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("lm")
    size.build(folder, compiler("gcc"), " ".join(FLAGS), target="libcolibri_lm.a")
    return sorted(folder.glob("*.o"))


def test_it_needs_nothing_of_anyone(objects: list[Path]) -> None:
    assert {o.name for o in objects} == {name for name in size.TOKENIZER if name.endswith(".o")}
    wanted, given = set(), set()
    for obj in objects:
        for line in size.run("nm", obj).splitlines():
            (wanted if line.split()[-2] == "U" else given).add(line.split()[-1])
    assert wanted - given <= USED


def test_it_has_no_mutable_data(objects: list[Path]) -> None:
    for obj in objects:
        found = size.sections(obj)
        assert (found["data"], found["bss"]) == (0, 0), obj.name


def test_every_function_has_a_small_stack_of_known_size(objects: list[Path]) -> None:
    text = "".join(o.with_suffix(".su").read_text() for o in objects)
    frames = [(int(n), kind) for n, kind in re.findall(r"\t(\d+)\t(\S+)$", text, re.M)]
    assert len(frames) > 20
    assert {kind for _, kind in frames} <= {"static", "dynamic,bounded"}
    assert max(n for n, _ in frames) < 1024


def test_its_header_stands_alone_in_c11_and_cpp() -> None:
    include = '#include "colibri_tokenizer.h"\n'
    for language, standard in (("c", "-std=c11"), ("c++", "-std=c++11")):
        command = [compiler("gcc"), standard, *C_FLAGS, f"-I{size.ENGINE / 'include'}", "-fsyntax-only", "-x", language]
        subprocess.run([*command, "-"], input=include * 2, text=True, check=True)


def test_it_stays_small() -> None:
    assert 0 < sum(size.tokenizer_lines().values()) < 1350
