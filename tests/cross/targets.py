"""How to run on each target what `colibri.targets` compiles for it, and which kernels it must have."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from colibri import targets

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/firmware"))

import firmware

_BARE = ("--crt0=hosted", "--oslib=semihost")


@dataclass(frozen=True)
class Machine:
    """`compile` and `run` are commands; the latter gets the program's path. `kernels` in the order of preference."""

    name: str
    compile: tuple[str, ...]
    run: tuple[str, ...]
    kernels: tuple[str, ...] = ("plain",)
    big_endian: bool = False


def _linux(target: str, name: str, run: tuple[str, ...], *kernels: str) -> Machine:
    known = targets.TARGETS[target]
    return Machine(name, (known.compiler, *known.flags, "-static"), run, (*kernels, "plain"))


def _bare(target: str, *kernels: str) -> Machine:
    known, board = targets.TARGETS[target], firmware.BOARDS[target]
    sizes = {"__flash": known.flash, "__flash_size": 4 << 20, "__ram": known.ram, "__ram_size": 1 << 18,
             "__stack_size": 1 << 14}  # fmt: skip
    places = tuple(f"-Wl,--defsym={name}=0x{value:x}" for name, value in sizes.items())
    return Machine(target, (known.compiler, *known.flags, *_BARE, *places), board.command, (*kernels, "plain"))


def _riscv_vector(bits: int) -> Machine:
    cpu = f"rv64,v=true,vlen={bits},vext_spec=v1.0"
    return _linux("riscv64-v", f"riscv64-v{bits}", ("qemu-riscv64", "-cpu", cpu), "rvv")


MACHINES = [
    _linux("aarch64", "aarch64-dot", ("qemu-aarch64", "-cpu", "max"), "neon-dot", "neon"),
    _linux("aarch64", "cortex-a72", ("qemu-aarch64", "-cpu", "cortex-a72"), "neon"),
    _linux("riscv64", "riscv64", ("qemu-riscv64", "-cpu", "rv64")),
    _riscv_vector(128),
    _riscv_vector(256),
    _bare("cortex-m3"),
    _bare("cortex-m4"),
    _bare("cortex-m7"),
    _bare("cortex-m33"),
    _bare("cortex-m55", "helium"),
    _bare("rv32imc"),
    Machine("s390x", ("s390x-linux-gnu-gcc", "-static"), ("qemu-s390x",), big_endian=True),
]
