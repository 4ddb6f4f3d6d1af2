"""How to run on each target what `colibri.targets` compiles for it, and which kernels it must have."""

from __future__ import annotations

from dataclasses import dataclass

from colibri import targets

_SEMIHOST = ("-nographic", "-monitor", "none", "-serial", "none", "-semihosting-config", "enable=on,target=native")
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


def _bare(target: str, run: tuple[str, ...], flash: int, ram: int, *kernels: str) -> Machine:
    known = targets.TARGETS[target]
    sizes = {"__flash": flash, "__flash_size": 4 << 20, "__ram": ram, "__ram_size": 1 << 18, "__stack_size": 1 << 14}
    places = tuple(f"-Wl,--defsym={name}=0x{value:x}" for name, value in sizes.items())
    return Machine(target, (known.compiler, *known.flags, *_BARE, *places), (*run, *_SEMIHOST, "-kernel"),
                   (*kernels, "plain"))  # fmt: skip


def _arm(target: str, board: str, flash: int, ram: int, *kernels: str) -> Machine:
    return _bare(target, ("qemu-system-arm", "-M", board), flash, ram, *kernels)


def _riscv_vector(bits: int) -> Machine:
    cpu = f"rv64,v=true,vlen={bits},vext_spec=v1.0"
    return _linux("riscv64-v", f"riscv64-v{bits}", ("qemu-riscv64", "-cpu", cpu), "rvv")


MACHINES = [
    _linux("aarch64", "aarch64-dot", ("qemu-aarch64", "-cpu", "max"), "neon-dot", "neon"),
    _linux("aarch64", "cortex-a72", ("qemu-aarch64", "-cpu", "cortex-a72"), "neon"),
    _linux("riscv64", "riscv64", ("qemu-riscv64", "-cpu", "rv64")),
    _riscv_vector(128),
    _riscv_vector(256),
    _arm("cortex-m3", "mps2-an385", 0, 0x20000000),
    _arm("cortex-m4", "mps2-an386", 0, 0x20000000),
    _arm("cortex-m7", "mps2-an500", 0, 0x20000000),
    _arm("cortex-m55", "mps3-an547", 0x10000000, 0x30000000, "helium"),
    _bare("rv32imc", ("qemu-system-riscv32", "-M", "virt", "-bios", "none"), 0x80000000, 0x80400000),
    Machine("s390x", ("s390x-linux-gnu-gcc", "-static"), ("qemu-s390x",), big_endian=True),
]
