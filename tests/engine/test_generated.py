"""model.c with its program as code gives the generic engine's bits, and carries only what the model uses."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from colibri import exporter
from colibri.build import toolchain
from colibri.runtime import engine
from colibri.runtime.language import LanguageModel
from tests.engine.conftest import (
    EXCHANGES,
    GRAPHS,
    HERE,
    MAX_BATCH,
    TEXTS,
    Build,
    compile_c,
    compiler,
    example,
    packed,
    random_rows,
)

TEXT = 78  # tokens: over a page of the cache


def link(export: exporter.Export, folder: Path, archive: Path, *flags: str) -> Path:
    """A program of the generated code and the archive."""
    exporter.write(export, folder)
    sources = [HERE / "generated.c", folder / "model.c", archive]
    flags = ("-std=gnu11", "-O2", "-DCOLIBRI_GENERATED", f"-I{folder}", *toolchain.source_flags(), *flags)
    return compile_c(compiler("gcc"), folder / "program", sources, *flags, "-Wl,--gc-sections", "-Wno-unused-function")


@pytest.mark.parametrize("vectors", ["", "-mavx2 -mf16c"])
@pytest.mark.parametrize("name", GRAPHS)
def test_generated_code_gives_the_generic_engines_bits(
    name: str, vectors: str, gcc_build: Build, tmp_path: Path
) -> None:
    if vectors and "avx2" not in engine.KERNELS:
        pytest.skip("this machine has no avx2")
    export = example(name)
    program = link(export, tmp_path, gcc_build.archive, *vectors.split())
    rows = random_rows(export, MAX_BATCH)
    done = subprocess.run([program, str(MAX_BATCH)], input=packed(rows), capture_output=True, check=False)
    assert done.returncode == 0
    want = engine.load(export.image)(*rows)
    assert done.stdout == packed(list(want) if isinstance(want, tuple) else [want])


@pytest.mark.parametrize("vectors", ["", "-mavx2 -mf16c"])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("max_batch", [1, 3, 40])
def test_generated_code_reads_a_text_as_the_generic_engine_does(
    name: str, max_batch: int, vectors: str, gcc_build: Build, tmp_path: Path
) -> None:
    if vectors and "avx2" not in engine.KERNELS:
        pytest.skip("this machine has no avx2")
    export = example(name, max_batch=max_batch)
    program = link(export, tmp_path, gcc_build.archive, *vectors.split())
    (rows,) = random_rows(export, TEXT)
    want = LanguageModel(engine.opened(export.image)).logits(rows[:, 0].astype(int))
    ends = [min(first + max_batch, TEXT) - 1 for first in range(0, TEXT, max_batch)]
    for tail, wanted in (("0", want), ("1", want[ends])):
        done = subprocess.run([program, str(TEXT), tail], input=packed([rows]), capture_output=True, check=False)
        assert done.returncode == 0
        assert done.stdout == packed([wanted])


@pytest.mark.parametrize("name", EXCHANGES)
def test_generated_code_reads_a_source_text_as_the_generic_engine_does(
    name: str, gcc_build: Build, tmp_path: Path
) -> None:
    export = example(name, max_batch=40)
    program = link(export, tmp_path, gcc_build.archive)
    (rows,) = random_rows(export, 40 + TEXT)
    lm = LanguageModel(engine.opened(export.image))
    lm.read(rows[:40, 0].astype(int))
    want = packed([lm.logits(rows[40:, 0].astype(int))])
    done = subprocess.run([program, str(40 + TEXT)], input=packed([rows]), capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stdout[-len(want) :] == want  # the first batch is read, and gives nothing


def symbols(program: Path) -> set[str]:
    lines = subprocess.run(["nm", program], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1].split(".")[0] for line in lines}  # a copy for some constants is called name.constprop.0


def test_only_what_the_model_uses_is_linked(gcc_build: Build, tmp_path: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    found = symbols(link(example("top1"), tmp_path, gcc_build.archive))
    assert {"colibri_forward", "product_f32"} <= found
    unused = {"clb_validate", "clb_softmax", "clb_norm", "clb_reduce", "product_q_i8", "product_q_i4", "quantize",
              "outliers", "product_f16", "clb_kernels_avx2", "clb_kernels_at", "attend",
              "clb_attention"}  # fmt: skip
    assert not found & unused
