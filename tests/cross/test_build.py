"""`colibri build --target` with each of its compilers: it gives this machine's bits, and reports what is true."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from colibri import exporter
from colibri.build import elf, targets, toolchain
from colibri.build import firmware as project
from colibri.errors import ColibriError
from colibri.format import spec
from colibri.runtime import engine
from tests.cross.targets import firmware
from tests.cross.test_raspberry_pi import EXAMPLES
from tests.engine.conftest import GRAPHS, example

DEBIAN, ZIG = toolchain.Toolchain.debian, toolchain.Toolchain.zig


def need(*tools: str, zig: bool = False) -> None:
    """Skip the test, by name, where something it takes is not installed."""
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if zig and importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed")


@pytest.fixture(scope="module")
def meter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, bytes]:
    """The smart meter in int8: its export, rows, and this machine's outputs for them."""
    made, rows = firmware.export("int8")
    folder = tmp_path_factory.mktemp("meter")
    exporter.write(made, folder)
    outputs = engine.load(made.image)(rows)
    assert isinstance(outputs, np.ndarray)
    return folder, rows, outputs.tobytes()


def forecasts_on_linux(name: str, emulator: list[str], meter: tuple[Path, np.ndarray, bytes], folder: Path) -> bytes:
    """Outputs of the Raspberry Pi's program with the library that zig builds for a target."""
    export, rows, _ = meter
    built = toolchain.build(export, folder, target=name, toolchain=ZIG)
    tools = toolchain.choose(targets.find(name), ZIG)
    program, source = folder / "forecast", EXAMPLES / "raspberry_pi/forecast.c"
    command = [*tools.cc, "-std=gnu11", "-O2", f"-I{folder / 'include'}", str(source), "-o", str(program), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([*emulator, program, built.shared_library, export / "model.bin"],
                          input=rows.astype("<f4").tobytes(), capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return np.array(done.stdout.split(), np.float32).tobytes()


def test_zigs_library_gives_equal_bits_on_aarch64(meter: tuple[Path, np.ndarray, bytes], tmp_path: Path) -> None:
    need("qemu-aarch64", "aarch64-linux-gnu-gcc", zig=True)  # the emulator loads the cross compiler's C library
    for cpu in ("cortex-a72", "max"):  # without dot product, and with it
        emulator = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", cpu]
        assert forecasts_on_linux("aarch64", emulator, meter, tmp_path) == meter[2], cpu


@pytest.mark.slow
@pytest.mark.parametrize("name", ["riscv64", "riscv64-v"])
def test_zigs_library_gives_equal_bits_on_riscv(
    name: str, meter: tuple[Path, np.ndarray, bytes], tmp_path: Path
) -> None:
    need("qemu-riscv64", "riscv64-linux-gnu-gcc", zig=True)
    emulator = ["qemu-riscv64", "-L", "/usr/riscv64-linux-gnu", "-cpu", "rv64,v=true,vlen=128,vext_spec=v1.0"]
    assert forecasts_on_linux(name, emulator, meter, tmp_path) == meter[2]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in firmware.BOARDS if name != "cortex-m7"]


@pytest.mark.parametrize("name", ["cortex-m7", *SLOW])
def test_zigs_firmware_answers_as_this_machine_does(name: str, tmp_path: Path) -> None:
    need(firmware.BOARDS[name].emulator[0], zig=True)
    figures = firmware.measure("int8", firmware.BOARDS[name], tmp_path, ZIG)  # ends the process where a bit differs
    assert 0 < figures.selftest < 1000


@pytest.mark.parametrize("kind", [DEBIAN, ZIG], ids=lambda kind: kind.value)
def test_the_webassembly_module_runs_any_model(
    kind: toolchain.Toolchain, meter: tuple[Path, np.ndarray, bytes], tmp_path: Path
) -> None:
    wasmtime = pytest.importorskip("wasmtime")
    known = targets.find("wasm32")
    need(*((known.compiler, known.archiver, "wasm-ld-19") if kind is DEBIAN else ()), zig=kind is ZIG)
    export, rows, wanted = meter
    built = toolchain.build(export, tmp_path, target="wasm32", toolchain=kind)
    assert built.model_object is None and built.text_bytes > 0 and built.stack is None
    store = wasmtime.Store()
    module = wasmtime.Module.from_file(store.engine, str(built.shared_library))
    assert [i.name for i in module.imports] == []
    exports = wasmtime.Instance(store, module, []).exports(store)
    memory, image = exports["memory"], (export / "model.bin").read_bytes()
    at = -(-exports["__heap_base"].value(store) // 64) * 64
    header = np.frombuffer(image[: spec.HEADER.bytes], spec.HEADER.dtype)[0]
    sizes = (len(image), int(header["context_bytes"]), rows[0].nbytes, 4 * int(header["output_floats"]))
    model, context, x, y, end = (at + sum(-(-used // 64) * 64 for used in sizes[:n]) for n in range(len(sizes) + 1))
    memory.grow(store, max(0, -(-(end - memory.data_len(store)) // 65536)))
    memory.write(store, image, model)
    ctx = exports["colibri_init"](store, context, sizes[1], model)
    assert ctx == context and exports["colibri_selftest"](store, ctx, y) == 0
    outputs = []
    for row in rows:
        memory.write(store, row.astype("<f4").tobytes(), x)
        exports["colibri_forward"](store, ctx, x, y, 1)
        outputs.append(bytes(memory.read(store, y, y + sizes[3])))
    assert b"".join(outputs) == wanted


def test_a_build_does_not_keep_another_compilers_objects(meter: tuple[Path, np.ndarray, bytes], tmp_path: Path) -> None:
    need("arm-none-eabi-gcc", zig=True)
    first = toolchain.build(meter[0], tmp_path, target="cortex-m7", toolchain=DEBIAN)
    other = toolchain.build(meter[0], tmp_path, target="cortex-m7", toolchain=ZIG)
    again = toolchain.build(meter[0], tmp_path, target="cortex-m7", toolchain=DEBIAN)
    assert first.stack is not None and other.stack is None
    assert first == again and first.text_bytes != other.text_bytes


@pytest.mark.parametrize("name", [n for n, t in targets.TARGETS.items() if t.system == "bare"])
def test_a_bare_machines_report_is_what_a_linker_keeps(
    name: str, meter: tuple[Path, np.ndarray, bytes], tmp_path: Path
) -> None:
    need(targets.TARGETS[name].compiler)
    built = toolchain.build(meter[0], tmp_path, target=name, toolchain=DEBIAN)
    assert built.stack is not None and built.selftest_bytes is not None
    assert 0 < built.stack["colibri_init"] < built.stack["colibri_forward"] < built.stack["colibri_selftest"]
    assert 0 < built.selftest_bytes < 600
    kept = elf.read(tmp_path / "probe.elf")
    assert {"colibri_init", "colibri_forward", "main"} <= kept.functions.keys()
    assert "colibri_selftest" not in kept.functions and "clb_validate" not in kept.functions


PROJECTS = [*((name, DEBIAN) for name in firmware.BOARDS), ("cortex-m7", ZIG)]
EXPERTS_APART = exporter.Style(prefix="meter", expert_sections=True)


@pytest.mark.parametrize(("name", "kind"), PROJECTS, ids=[f"{name}-{kind.value}" for name, kind in PROJECTS])
def test_a_firmware_project_builds_anywhere_with_make_and_passes_its_selftest(
    name: str, kind: toolchain.Toolchain, meter: tuple[Path, np.ndarray, bytes], tmp_path: Path
) -> None:
    known, board = targets.find(name), firmware.BOARDS[name]
    need(board.emulator[0], *((known.compiler,) if kind is DEBIAN else ()), zig=kind is ZIG)
    written, built = project.write(meter[0], name, tmp_path / "written", kind)
    folder = written.rename(tmp_path / "moved")
    for path in folder.rglob("*"):
        if path.is_file():
            assert not re.search(r"/(usr|work|home|tmp|root)/|site-packages", path.read_text(encoding="utf-8")), path
    python = [f"CC={sys.executable} -m ziglang cc"] if kind is ZIG else []
    made = subprocess.run(["make", "-s", *python], cwd=folder, capture_output=True, text=True, check=False)
    assert made.returncode == 0 and "warning" not in made.stderr, made.stderr
    printed = dict(re.findall(r"^(\w+) (0x[0-9a-f]{8})$", firmware.run(folder / "firmware.elf", board), re.M))
    assert int(printed["selftest"], 16) == 0
    if built.stack is not None:
        assert 0 < int(printed["stack"], 16) <= built.stack["colibri_forward"] + firmware.LIBRARY_STACK
    names = {path.name for path in (folder / "engine").rglob("*.c")}
    assert "context.c" in names and not names & {"forward.c", "file.c", "avx2.c", "avx512.c", "cpu.c"}


def test_a_firmware_project_keeps_the_models_own_names(tmp_path: Path) -> None:
    board = firmware.BOARDS["cortex-m7"]
    need(board.emulator[0], "arm-none-eabi-gcc")
    made, _ = firmware.export("int8")
    exporter.write(made, tmp_path / "export", EXPERTS_APART)
    folder, built = project.write(tmp_path / "export", "cortex-m7", tmp_path / "firmware", DEBIAN)
    assert built.stack is not None and "meter_forward" in built.stack
    subprocess.run(["make", "-s"], cwd=folder, capture_output=True, check=True)
    assert "selftest 0x00000000" in firmware.run(folder / "firmware.elf", board)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_stack_of_every_kind_of_program_is_known(name: str, tmp_path: Path) -> None:
    need("arm-none-eabi-gcc")
    made = example(name)
    exporter.write(made, tmp_path)
    built = toolchain.build(tmp_path, target="cortex-m7", toolchain=DEBIAN)
    assert built.stack is not None and 0 < built.stack["colibri_init"] < built.stack["colibri_forward"]
    stated = re.search(r"MODEL_FLASH_BYTES (\d+)u", (tmp_path / "model.h").read_text(encoding="utf-8"))
    assert stated is not None and built.model_bytes == int(stated[1]) <= len(made.image)
    assert built.flash_bytes == built.text_bytes + built.rodata_bytes + built.model_bytes


def test_a_firmware_project_is_for_a_machine_without_a_system(
    meter: tuple[Path, np.ndarray, bytes], tmp_path: Path
) -> None:
    with pytest.raises(ColibriError, match="no machine for firmware; those are cortex-m0plus, "):
        project.write(meter[0], "aarch64", tmp_path)


def test_a_target_without_a_compiler_names_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for target in targets.TARGETS.values():
        with pytest.raises(ColibriError, match=f"{target.name}.*apt-get install {target.packages}.*ziglang"):
            toolchain.choose(target)
        with pytest.raises(ColibriError, match="pip install ziglang"):
            toolchain.choose(target, ZIG)
        with pytest.raises(ColibriError, match=f"{target.compiler} is not installed.*{target.packages}"):
            toolchain.choose(target, DEBIAN)


def test_zig_takes_over_where_debians_compiler_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    need(zig=True)
    found = shutil.which
    target = targets.find("cortex-m7")
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == target.compiler else found(tool))
    assert "ziglang" in toolchain.choose(target).cc
    with pytest.raises(ColibriError, match="pass --target"):
        toolchain.choose(None, ZIG)
