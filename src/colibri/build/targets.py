"""The machines `colibri build` compiles for: compilers, flags, and what a system has to install for them."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.errors import ColibriError


@dataclass(frozen=True)
class Target:
    """One machine. `tools` is what its Debian compiler and archiver are called up to `gcc` and `ar`.

    `zig` are the flags with which `zig cc`, from the Python package ziglang, compiles for it, and `zig_make` what else
    the engine's Makefile has to know then. `system` is linux (shared libraries and threads), bare or wasm.
    """

    name: str
    about: str
    tools: str
    packages: str
    flags: tuple[str, ...] = ()
    zig: tuple[str, ...] = ()
    zig_make: tuple[str, ...] = ()
    system: str = "bare"
    other_compiler: str = ""
    other_archiver: str = ""
    flash: int = 0  # addresses of a bare machine's memories, by default those of the board it is emulated with
    ram: int = 0x20000000

    @property
    def compiler(self) -> str:
        """The command of its Debian C compiler."""
        return self.other_compiler or f"{self.tools}gcc"

    @property
    def archiver(self) -> str:
        """The command that makes static libraries for it."""
        return self.other_archiver or f"{self.tools}ar"

    @property
    def hosted(self) -> bool:
        """Whether it has an operating system, and so shared libraries and threads."""
        return self.system == "linux"


def _cortex_m(
    number: str, about: str, zig: str, *flags: str, extension: str = "", flash: int = 0, ram: int = 0x20000000
) -> Target:
    packages = "gcc-arm-none-eabi picolibc-arm-none-eabi"
    flags = ("-mthumb", f"-mcpu=cortex-m{number}{extension}", *flags, "--specs=picolibc.specs")
    kind = "eabihf" if "+" in zig else "eabi"
    return Target(f"cortex-m{number}", about, "arm-none-eabi-", packages, flags,
                  ("-target", f"thumb-freestanding-{kind}", f"-mcpu={zig}", *_BARE), flash=flash, ram=ram)  # fmt: skip


# zig takes a machine without a system for one without memcpy and sqrtf, and calls what are single instructions.
_BARE = ("-fhosted", "-fno-unwind-tables", "-fno-asynchronous-unwind-tables")
_HARD = "-mfloat-abi=hard"
_RISCV = "gcc-riscv64-linux-gnu libc6-dev-riscv64-cross"
TARGETS = {
    target.name: target
    for target in (
        Target("aarch64", "64-bit Arm Linux: Raspberry Pi 3 to 5, gateways; dot product where the processor has it",
               "aarch64-linux-gnu-", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross", system="linux",
               zig=("-target", "aarch64-linux-gnu"), zig_make=("DOT=-mcpu=generic+v8_2a+dotprod",)),
        Target("riscv64", "64-bit RISC-V Linux without vectors", "riscv64-linux-gnu-", _RISCV, system="linux",
               zig=("-target", "riscv64-linux-gnu", "-mcpu=baseline_rv64")),
        Target("riscv64-v", "64-bit RISC-V Linux with vectors (V 1.0) of any length", "riscv64-linux-gnu-",
               f"clang-19 lld-19 {_RISCV}", ("--target=riscv64-linux-gnu", "-march=rv64gcv", "-fuse-ld=lld-19"),
               ("-target", "riscv64-linux-gnu", "-mcpu=baseline_rv64+v"), system="linux", other_compiler="clang-19"),
        _cortex_m("0plus", "no FPU, no DSP: RP2040 and the smallest", "cortex_m0plus"),
        _cortex_m("3", "no FPU, no DSP", "cortex_m3"),
        _cortex_m("4", "FPU and DSP: STM32F4, nRF52", "cortex_m4+vfp4d16sp", "-mfpu=fpv4-sp-d16", _HARD),
        _cortex_m("7", "FPU and DSP: STM32H7, i.MX RT", "cortex_m7+fp_armv8d16sp", "-mfpu=fpv5-sp-d16", _HARD),
        _cortex_m("33", "FPU and DSP: STM32U5, nRF53, RP2350", "cortex_m33+fp_armv8d16sp+dsp", "-mfpu=fpv5-sp-d16",
                  _HARD, flash=0x10000000, ram=0x38000000),
        _cortex_m("55", "FPU and Helium vectors", "cortex_m55-mve_fp+mve+fp_armv8d16", _HARD, extension="+nomve.fp",
                  flash=0x10000000, ram=0x30000000),
        Target("rv32imc", "32-bit RISC-V without FPU: ESP32-C3", "riscv64-unknown-elf-",
               "gcc-riscv64-unknown-elf picolibc-riscv64-unknown-elf",
               ("-march=rv32imc", "-mabi=ilp32", "-misa-spec=2.2", "-mcmodel=medany", "--specs=picolibc.specs"),
               ("-target", "riscv32-freestanding-none", "-mcpu=generic_rv32+m+c", *_BARE),
               flash=0x80000000, ram=0x80400000),
        Target("wasm32", "WebAssembly with 128-bit vectors: one module without imports", "", "clang-19 lld-19 llvm-19",
               ("--target=wasm32", "-nostdlib", "-mbulk-memory", "-msimd128"),
               ("-target", "wasm32-freestanding", "-mcpu=generic+bulk_memory+simd128", "-fhosted"), system="wasm",
               other_compiler="clang-19", other_archiver="llvm-ar-19"),
    )
}  # fmt: skip
"""By name, hosted ones first."""


def find(name: str) -> Target:
    """The target of that name; raises ColibriError with the known names."""
    if name not in TARGETS:
        raise ColibriError(f"there is no target {name!r}; known are {', '.join(TARGETS)}")
    return TARGETS[name]
