"""The reader of object files against binutils."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from colibri.build import elf

SOURCE = """
int a = 1; int b[4]; static const int c[] = {1, 2};
extern int other(const int *); static int __attribute__((noinline)) own(int x) { return x * a + b[x]; }
int first(int x) { return own(x) + other(c); }
"""


@pytest.mark.parametrize("flags", [["gcc"], ["gcc", "-ffunction-sections"], ["arm-none-eabi-gcc", "-mthumb"]])
def test_sections_and_symbols_are_those_of_binutils(flags: list[str], tmp_path: Path) -> None:
    for tool in (flags[0], "size", "nm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    source, obj = tmp_path / "x.c", tmp_path / "x.o"
    source.write_text(SOURCE, encoding="utf-8")
    subprocess.run([*flags, "-O1", "-c", source, "-o", obj], check=True)
    found = elf.read(obj)
    sizes = subprocess.run(["size", "-A", obj], check=True, capture_output=True, text=True).stdout
    for name, size in re.findall(r"^(\.\S+)\s+(\d+)\s", sizes, re.M):
        assert found.sections[name] == int(size), name
    assert (found.bytes_of(".data"), found.bytes_of(".bss")) == (4, 16)
    assert found.bytes_of(".text") >= sum(found.functions.values()) > 0
    symbols = subprocess.run(["nm", "-g", obj], check=True, capture_output=True, text=True).stdout.splitlines()
    assert found.undefined == {line.split()[-1] for line in symbols if " U " in line} == {"other"}
    assert found.defined == {line.split()[-1] for line in symbols if " U " not in line} == {"a", "b", "first"}
    assert found.functions.keys() == {"own", "first"}


def test_what_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"!<arch>\n")
    with pytest.raises(ValueError, match="no little-endian ELF"):
        elf.read(tmp_path / "x")
