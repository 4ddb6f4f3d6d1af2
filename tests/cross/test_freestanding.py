"""What the engine brings for compilers without a C library, and how it compiles where nothing is built in."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from colibri import exporter
from colibri.build import targets
from tests.cross.test_targets import FLAGS
from tests.engine.conftest import compiler, example
from tools import size

LEVELS = ("-O0", "-Og", "-O1", "-O2", "-O3", "-Os", "-O3 -flto -ffat-lto-objects")
NAMES = ("memcpy", "memmove", "memset", "memcmp")
CORES = {
    "gcc for a Cortex-M7": ("arm-none-eabi-gcc", "-mthumb", "-mcpu=cortex-m7"),
    "gcc for a Cortex-M0+": ("arm-none-eabi-gcc", "-mthumb", "-mcpu=cortex-m0plus"),
    "gcc for RISC-V": ("riscv64-unknown-elf-gcc", "-march=rv32imc", "-mabi=ilp32", "-ffreestanding"),
    "clang for a Cortex-M7": ("clang-19", "--target=thumbv7em-none-eabi"),
    "clang for RISC-V": ("clang-19", "--target=riscv32-none-elf"),
}


def wanted(obj: Path) -> set[str]:
    """What an object calls that it may not hold: targets of its relocations for code."""
    text = subprocess.run(["llvm-objdump-19", "-r", str(obj)], capture_output=True, text=True, check=True).stdout
    code = re.findall(r"^RELOCATION RECORDS FOR \[\.text[^\n]*\n(.*?)(?:^\n|\Z)", text, re.M | re.S)
    return set(re.findall(r"R_\w+\s+(\w+)", "\n".join(code)))


@pytest.mark.parametrize("core", CORES)
def test_memory_functions_never_call_themselves(core: str, tmp_path: Path) -> None:
    """B8: a loop that copies is no call of memcpy, at any level of optimisation."""
    for tool in (CORES[core][0], "llvm-objdump-19"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    source, obj = size.ENGINE / "freestanding/memory.c", tmp_path / "memory.o"
    for level in LEVELS:
        if "clang" in core and "flto" in level:
            continue  # such an object holds no code
        command = [*CORES[core], *level.split(), "-std=c11", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([*command, f"-I{source.parent}", "-c", str(source), "-o", str(obj)], check=True)
        called = {name for name in wanted(obj) if name.startswith(("mem", "__aeabi_mem"))}
        assert not called, level


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_memory_functions_do_what_the_librarys_do(name: str, tmp_path: Path) -> None:
    source, library = size.ENGINE / "freestanding/memory.c", tmp_path / "memory.so"
    subprocess.run([compiler(name), "-O2", "-std=c11", "-shared", "-fPIC", "-Wl,-Bsymbolic", f"-I{source.parent}",
                    str(source), "-o", str(library)], check=True)  # fmt: skip
    own = ctypes.CDLL(str(library))
    for to, start, n in ((0, 0, 40), (0, 7, 20), (7, 0, 20), (3, 4, 30), (4, 3, 30), (5, 9, 0)):
        block = bytearray(range(64))
        expected = bytearray(block)
        expected[to : to + n] = block[start : start + n]
        buffer = (ctypes.c_char * 64).from_buffer(block)
        at = ctypes.addressof(buffer)
        own.memmove.restype = ctypes.c_void_p
        assert own.memmove(ctypes.c_void_p(at + to), ctypes.c_void_p(at + start), ctypes.c_size_t(n)) == at + to
        assert block == expected
        own.memset(ctypes.c_void_p(at + to), 0x1A5, ctypes.c_size_t(n))
        expected[to : to + n] = b"\xa5" * n
        assert block == expected
    place, other = (ctypes.create_string_buffer(text) for text in (b"colibri", b"colonia"))
    assert own.memcmp(place, other, ctypes.c_size_t(3)) == 0
    assert own.memcmp(place, other, ctypes.c_size_t(4)) < 0 < own.memcmp(other, place, ctypes.c_size_t(4))
    own.memcpy(place, other, ctypes.c_size_t(8))
    assert place.value == other.value


FREE = ("-ffreestanding", "-fno-builtin")
BUILDS = {
    "cortex-m0plus": (*FREE,),
    "cortex-m7": (*FREE, "-mno-unaligned-access"),
    "aarch64": FREE,
    "riscv64": FREE,
}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("model", ["quantized", "top2_shared", "steps"])
def test_a_copy_of_known_size_is_no_call_where_nothing_is_built_in(name: str, model: str, tmp_path: Path) -> None:
    """B5: no function calls memcpy or memset that does not where they are built in."""
    target = targets.find(name)
    for tool in (target.compiler, "llvm-objdump-19"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    exporter.write(example(model, max_batch=1), tmp_path)
    found = []
    for flags in ((), BUILDS[name]):
        obj = tmp_path / "model.o"
        subprocess.run([target.compiler, *target.flags, *FLAGS, "-DCOLIBRI_GENERATED", "-Wno-unused-function", *flags,
                        f"-I{tmp_path}", "-c", str(tmp_path / "model.c"), "-o", str(obj)], check=True)  # fmt: skip
        found.append(callers(obj))
    assert found[1] <= found[0]


def callers(obj: Path) -> set[tuple[str, str]]:
    """Functions of an object that call one of NAMES, and which."""
    text = subprocess.run(["llvm-objdump-19", "-dr", str(obj)], capture_output=True, text=True, check=True).stdout
    functions = re.findall(r"^[0-9a-f]+ <(\w+)[^\n]*>:\n(.*?)(?=^[0-9a-f]+ <|\Z)", text, re.M | re.S)
    return {
        (name, called) for name, code in functions for called in re.findall(rf"R_\w+\s+({'|'.join(NAMES)})\b", code)
    }
