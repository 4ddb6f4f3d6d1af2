"""B2: a model that was damaged in flash is found by the firmware's own check, wherever the bit is."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from colibri import exporter
from colibri.build import elf, toolchain
from colibri.emit import c_source
from colibri.format import spec
from colibri.format.package import parse
from tests.cross.firmware.test_boards import need
from tests.cross.targets import firmware
from tests.cross.test_targets import FLAGS
from tests.engine.conftest import compiler, example

SOURCE = Path(__file__).with_name("check_flash.c")
MODELS = {"dense": 1, "top1": 1, "quantized": 211, "text_int8": 211}  # and each how manieth bit is flipped


def arrays(obj: Path, folder: Path, step: int) -> int:
    """Write parts.h, what the model's object has in flash for the model; returns its bytes."""
    text = subprocess.run(["nm", "-S", str(obj)], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\w+ (\w+) R (colibri_model\w*)$", text, re.M)
    assert elf.read(obj).bytes_of(".rodata.model") == sum(int(size, 16) for size, _ in found)
    lines = [f"extern const uint8_t {name}[];" for _, name in found]
    table = ", ".join(f"{{{name}, 0x{size}}}" for size, name in found)
    lines += [f"static const struct {{ const uint8_t *at; uint32_t bytes; }} arrays[] = {{{table}}};"]
    (folder / "parts.h").write_text("\n".join([*lines, f"enum {{ STEP = {step} }};", ""]), encoding="utf-8")
    return sum(int(size, 16) for size, _ in found)


@pytest.mark.parametrize("apart", [False, True], ids=["one block", "sections"])
@pytest.mark.parametrize("model", MODELS)
def test_every_flipped_bit_is_found(model: str, apart: bool, tmp_path: Path) -> None:
    gcc, obj, program = compiler("gcc"), tmp_path / "model.o", tmp_path / "program"
    exporter.write(example(model, max_batch=1), tmp_path, exporter.Style(expert_sections=apart))
    flags = [*FLAGS, "-DCOLIBRI_GENERATED", "-Wno-unused-function", f"-I{tmp_path}"]
    subprocess.run([gcc, *flags, "-c", str(tmp_path / "model.c"), "-o", str(obj)], check=True)
    size = arrays(obj, tmp_path, MODELS[model])
    subprocess.run([gcc, *flags, str(SOURCE), str(obj), "-lm", "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    flipped = re.search(r"flipped (0x\w+)", done.stdout)
    assert flipped is not None and int(flipped[1], 16) >= size * 8 // MODELS[model]


@pytest.mark.parametrize("name", ["cortex-m7"])
def test_a_device_finds_flipped_bits_at_the_stated_cost(name: str, tmp_path: Path) -> None:
    need(name)
    board = firmware.BOARDS[name]
    made, rows = firmware.export("int8")
    built = toolchain.build(exporter.write(made, tmp_path).parent, tmp_path / "build", target=name)
    assert built.model_object is not None and built.check_bytes is not None and 0 < built.check_bytes < 500
    size = arrays(built.model_object, tmp_path, 9973)
    image, _ = firmware.link(made, rows[:1], board, tmp_path, str(SOURCE), toolchain.Toolchain.debian)
    printed = dict(re.findall(r"^(\w+) (0x\w{8})$", firmware.run(image, board), re.M))
    assert int(printed["flipped"], 16) >= size * 8 // 9973
    assert int(printed["instructions"], 16) == pytest.approx(c_source.CHECK_COST * size, rel=0.05)


@pytest.mark.parametrize(("model", "folded"), [("dense", True), ("soft", True), ("top1", False), ("text_int8", False)])
def test_folded_firmware_carries_no_records(model: str, folded: bool, tmp_path: Path) -> None:
    """B6: what its code does not read; a text keeps them, since colibri_lm_rewind reads them."""
    made = example(model, max_batch=1)
    exporter.write(made, tmp_path)
    head = parse(np.frombuffer(made.image, np.uint8), model).header
    golden = int(head["golden_rows"]) * int(head["golden_bytes"])
    before = spec.HEADER.bytes + spec.align(golden, spec.ALIGN_MODEL) if folded else int(head["meta_bytes"])
    weights = sum(spec.align(expert.section.size, spec.ALIGN_MODEL) for expert in made.program.experts)
    stated = re.search(r"MODEL_FLASH_BYTES (\d+)u", (tmp_path / "model.h").read_text(encoding="utf-8"))
    assert stated is not None and int(stated[1]) == before + int(head["shared_bytes"]) + weights


def test_a_firmware_without_the_check_does_not_carry_it(tmp_path: Path) -> None:
    need("cortex-m7")
    exporter.write(example("top1"), tmp_path)
    toolchain.build(tmp_path, tmp_path / "build", target="cortex-m7")
    assert "colibri_check_flash" not in elf.read(tmp_path / "build/probe.elf").functions
    assert "colibri_check_flash" in elf.read(tmp_path / "build/probe_check.elf").functions
