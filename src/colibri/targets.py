"""The machines `colibri build` compiles for: compiler, flags, and what a Debian system has to install for them."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.errors import ColibriError


@dataclass(frozen=True)
class Target:
    """One machine. `tools` is what its compiler and archiver are called up to `gcc` and `ar`; `hosted` says whether it
    has an operating system, and so shared libraries and threads.
    """

    name: str
    about: str
    tools: str
    packages: str
    flags: tuple[str, ...] = ()
    hosted: bool = False
    other_compiler: str = ""

    @property
    def compiler(self) -> str:
        """The command of its C compiler."""
        return self.other_compiler or f"{self.tools}gcc"

    @property
    def archiver(self) -> str:
        """The command that makes static libraries for it."""
        return f"{self.tools}ar"


def _cortex_m(number: str, about: str, *flags: str) -> Target:
    packages = "gcc-arm-none-eabi picolibc-arm-none-eabi"
    flags = ("-mthumb", f"-mcpu=cortex-m{number}", *flags, "--specs=picolibc.specs")
    return Target(f"cortex-m{number}", about, "arm-none-eabi-", packages, flags)


_HARD = "-mfloat-abi=hard"
_RISCV = "gcc-riscv64-linux-gnu libc6-dev-riscv64-cross"
TARGETS = {
    target.name: target
    for target in (
        Target("aarch64", "64-bit Arm Linux: Raspberry Pi 3 to 5, gateways; dot product where the processor has it",
               "aarch64-linux-gnu-", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross", hosted=True),
        Target("riscv64", "64-bit RISC-V Linux without vectors", "riscv64-linux-gnu-", _RISCV, hosted=True),
        Target("riscv64-v", "64-bit RISC-V Linux with vectors (V 1.0) of any length", "riscv64-linux-gnu-",
               f"clang-19 lld-19 {_RISCV}", ("--target=riscv64-linux-gnu", "-march=rv64gcv", "-fuse-ld=lld-19"),
               hosted=True, other_compiler="clang-19"),
        _cortex_m("0plus", "no FPU, no DSP: RP2040 and the smallest"),
        _cortex_m("3", "no FPU, no DSP"),
        _cortex_m("4", "FPU and DSP: STM32F4, nRF52", "-mfpu=fpv4-sp-d16", _HARD),
        _cortex_m("7", "FPU and DSP: STM32H7, i.MX RT", "-mfpu=fpv5-sp-d16", _HARD),
        _cortex_m("33", "FPU and DSP: STM32U5, nRF53, RP2350", "-mfpu=fpv5-sp-d16", _HARD),
        _cortex_m("55", "FPU and Helium vectors", _HARD),
        Target("rv32imc", "32-bit RISC-V without FPU: ESP32-C3", "riscv64-unknown-elf-",
               "gcc-riscv64-unknown-elf picolibc-riscv64-unknown-elf",
               ("-march=rv32imc", "-mabi=ilp32", "-misa-spec=2.2", "-mcmodel=medany", "--specs=picolibc.specs")),
    )
}  # fmt: skip
"""By name, hosted ones first."""


def find(name: str) -> Target:
    """The target of that name; raises ColibriError with the known names."""
    if name not in TARGETS:
        raise ColibriError(f"there is no target {name!r}; known are {', '.join(TARGETS)}")
    return TARGETS[name]
