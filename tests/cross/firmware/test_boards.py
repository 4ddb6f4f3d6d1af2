"""The smart-meter firmware on emulated boards: this machine's answers, and sizes and instructions that do not grow.

After a change that is meant, `python -m tests.cross.firmware.test_boards` writes boards.json and the table in
examples/firmware/README.md anew.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from colibri.build import elf, targets, toolchain
from colibri.format import spec
from tests.cross.targets import firmware

EXAMPLE = Path(firmware.__file__).parent
TABLE = Path(__file__).with_name("boards.json")
GROWTH = 1.02
DTYPES = ("fp32", "int8")
# What compilers of small systems are often given: nothing built in, and no unaligned loads.
FREESTANDING = ("-ffreestanding", "-fno-builtin", "-mno-unaligned-access")
ON_CORTEX_M7 = {f"cortex-m7 {dtype} freestanding": dtype for dtype in DTYPES}
DEBIAN = toolchain.Toolchain.debian


def need(name: str) -> None:
    """Skip the test, by name, where the target's compiler or emulator is not installed."""
    for tool in (targets.TARGETS[name].compiler, firmware.BOARDS[name].emulator[0]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", firmware.BOARDS)
def test_firmware_answers_as_this_machine_does_and_does_not_grow(name: str, dtype: str, tmp_path: Path) -> None:
    need(name)
    known = json.loads(TABLE.read_text(encoding="utf-8"))[f"{name} {dtype}"]
    found = asdict(firmware.measure(dtype, firmware.BOARDS[name], tmp_path))
    for what, value in found.items():
        assert value <= GROWTH * known[what], f"{what}: {value}, {known[what]} before"


@pytest.mark.parametrize("key", ON_CORTEX_M7)
def test_a_freestanding_build_takes_no_more_than_it_did(key: str, tmp_path: Path) -> None:
    """B5: a copy of four bytes is no call."""
    need("cortex-m7")
    known = json.loads(TABLE.read_text(encoding="utf-8"))
    found = firmware.measure(ON_CORTEX_M7[key], firmware.BOARDS["cortex-m7"], tmp_path, flags=FREESTANDING)
    for what, value in asdict(found).items():
        assert value <= GROWTH * known[key][what], f"{what}: {value}, {known[key][what]} before"
    hosted = known[key.removesuffix(" freestanding")]
    assert known[key]["instructions"] <= 1.08 * hosted["instructions"]


@pytest.mark.parametrize("name", ["cortex-m4", "cortex-m7"])
def test_forecasts_interrupted_by_forecasts_keep_every_bit(name: str, tmp_path: Path) -> None:
    need(name)
    made, rows = firmware.export("int8")
    image, _ = firmware.link(made, rows, firmware.BOARDS[name], tmp_path, "reentrancy.c", DEBIAN)
    assert "reentrant" in firmware.run(image, firmware.BOARDS[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["cortex-m4", "cortex-m7", "cortex-m55"])
def test_a_forecast_takes_the_same_work_whatever_its_input(name: str, dtype: str, tmp_path: Path) -> None:
    need(name)
    by_expert = firmware.latency(dtype, firmware.BOARDS[name], tmp_path)
    assert len(by_expert) == 3 and all(least > 0 for least, _ in by_expert)  # every route was taken
    assert all(most < 1.005 * least for least, most in by_expert), by_expert
    worst = max(most for _, most in by_expert)
    known = json.loads(TABLE.read_text(encoding="utf-8"))[f"{name} {dtype}"]["instructions"]
    assert worst <= GROWTH * known, "the table's costliest forecast is not the costliest there is"


def test_experts_copied_to_ram_give_the_same_bits(tmp_path: Path) -> None:
    board = firmware.BOARDS["cortex-m7"]
    need("cortex-m7")
    made, rows = firmware.export("int8")
    image, _ = firmware.link(made, rows, board, tmp_path, kind=DEBIAN, fast=[0, 2])
    weights = [expert.section.size for expert in made.program.experts]
    assert weights[0] + weights[2] <= elf.read(image).bytes_of(".fast") < sum(weights)
    assert {"expert_0", "expert_1", "expert_2"} == set(re.findall(r"expert_\d", (tmp_path / "experts.ld").read_text()))
    assert f"digest {firmware.expected_digest(made, rows):#010x}" in firmware.run(image, board)


def test_a_row_that_is_not_aligned_is_refused_by_name(tmp_path: Path) -> None:
    """B8: a core may fault where it loads several floats at once."""
    need("cortex-m7")
    made, rows = firmware.export("fp32")
    program = str(Path(__file__).with_name("unaligned.c"))
    image, _ = firmware.link(made, rows[:1], firmware.BOARDS["cortex-m7"], tmp_path, program, DEBIAN)
    printed = re.findall(r"^(\w+) 0x(\w{8})$", firmware.run(image, firmware.BOARDS["cortex-m7"]), re.M)
    refused = spec.error_code("MISALIGNED")
    expected = {"input": refused, "output": refused, "aligned": 0}
    assert len(printed) == 6 and all(int(value, 16) == expected[name] for name, value in printed), printed


def test_the_documented_table_is_the_measured_one() -> None:
    assert documented(json.loads(TABLE.read_text(encoding="utf-8"))) in (EXAMPLE / "README.md").read_text("utf-8")


def documented(table: dict[str, dict[str, int]]) -> str:
    """The table as examples/firmware/README.md has it."""
    columns = ("flash", "model", "selftest", "ram", "stack", "instructions")
    lines = ["| core | weights | flash | of it the model | of it the self-test | RAM | stack | instructions |",
             "|---|---|" + "---:|" * len(columns)]  # fmt: skip
    for key, figures in table.items():
        lines.append("| " + " | ".join([*key.split(" ", 1), *(f"{figures[name]:,}" for name in columns)]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    import tempfile

    rows = {}
    for board in firmware.BOARDS:
        for kind in DTYPES:
            with tempfile.TemporaryDirectory() as place:
                rows[f"{board} {kind}"] = asdict(firmware.measure(kind, firmware.BOARDS[board], Path(place)))
    for key, kind in ON_CORTEX_M7.items():
        with tempfile.TemporaryDirectory() as place:
            measured = firmware.measure(kind, firmware.BOARDS["cortex-m7"], Path(place), flags=FREESTANDING)
            rows[key] = asdict(measured)
    TABLE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    readme = EXAMPLE / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(re.sub(r"\| core .*?(?=\n\n)", documented(rows), text, flags=re.S), encoding="utf-8")
    print(documented(rows))
