"""How to run on each target what `colibri.build.targets` compiles for it, and which kernels it must have."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.build import targets

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/firmware"))

import firmware

_BARE = ("--crt0=hosted", "--oslib=semihost")


@dataclass(frozen=True)
class Machine:
    """`compile` and `run` are commands; the latter gets the program's path. `kernels` in the order of preference.

    `vectors` are the files of engine/src/simd compiled again with flags of their own, under `defines`.
    """

    name: str
    compile: tuple[str, ...]
    run: tuple[str, ...]
    kernels: tuple[str, ...] = ("plain",)
    defines: tuple[str, ...] = ()
    vectors: tuple[tuple[str, tuple[str, ...]], ...] = ()
    bare: bool = False
    code_bytes: int = 4 << 20  # that code and models may take: the linker refuses more
    big_endian: bool = False


def _linux(target: str, name: str, run: tuple[str, ...], *kernels: str, **more: Any) -> Machine:
    known = targets.TARGETS[target]
    return Machine(name, (known.compiler, *known.flags, "-static"), run, (*kernels, "plain"), **more)


def _aarch64(cpu: str, name: str, *kernels: str) -> Machine:
    dot = (("v128.c", ("-march=armv8.2-a+dotprod",)),)
    return _linux("aarch64", name, ("qemu-aarch64", "-cpu", cpu), *kernels, defines=("-DCLB_NEON_DOT",), vectors=dot)


def _x86(cpu: str, name: str, *kernels: str) -> Machine:
    """A processor the emulator knows; it has no AVX-512, whose kernels are tested where the tests' own machine has."""
    vectors = (("avx2.c", ("-mavx2", "-mf16c")),
               ("avx512.c", ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")))  # fmt: skip
    return Machine(name, ("gcc", "-static"), ("qemu-x86_64", "-cpu", cpu), (*kernels, "plain"), ("-DCLB_X86",), vectors)


def _bare(target: str, kernels: str, code_bytes: int = 4 << 20) -> Machine:
    known, board = targets.TARGETS[target], firmware.BOARDS[target]
    sizes = {"__flash": known.flash, "__flash_size": code_bytes, "__ram": known.ram, "__ram_size": 1 << 18,
             "__stack_size": 1 << 14}  # fmt: skip
    places = tuple(f"-Wl,--defsym={name}=0x{value:x}" for name, value in sizes.items())
    return Machine(
        target, (known.compiler, *known.flags, *_BARE, *places), board.command, (kernels,), (), (), True, code_bytes
    )


def _riscv_vector(bits: int) -> Machine:
    cpu = f"rv64,v=true,vlen={bits},vext_spec=v1.0"
    return _linux("riscv64-v", f"riscv64-v{bits}", ("qemu-riscv64", "-cpu", cpu), "rvv")


MACHINES = [
    _x86("Nehalem", "x86-64-sse2"),
    _x86("max", "x86-64-avx2", "avx2"),
    _aarch64("max", "aarch64-dot", "neon-dot", "neon"),
    _aarch64("cortex-a72", "cortex-a72", "neon"),
    _linux("riscv64", "riscv64", ("qemu-riscv64", "-cpu", "rv64")),
    _riscv_vector(128),
    _riscv_vector(256),
    _bare("cortex-m3", "plain"),
    _bare("cortex-m4", "dsp"),
    _bare("cortex-m7", "dsp"),
    _bare("cortex-m33", "dsp"),
    _bare("cortex-m55", "helium", code_bytes=512 << 10),
    _bare("rv32imc", "plain"),
    Machine("s390x", ("s390x-linux-gnu-gcc", "-static"), ("qemu-s390x",), big_endian=True),
]
