"""Every public header, and every model.h, is C11 to C23 and C++11 to C++23, and links with both languages."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from colibri import exporter
from colibri.build import toolchain
from tests.engine.conftest import Build, compiler, example
from tools import size

WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
HEADERS = sorted(path.name for path in (size.ENGINE / "include").glob("*.h"))
STANDARDS = {
    "gcc": ("c11", "c17", "c2x"), "clang": ("c11", "c17", "c23"),
    "g++": ("c++11", "c++14", "c++17", "c++20", "c++23"), "clang++": ("c++11", "c++14", "c++17", "c++20", "c++23"),
}  # fmt: skip
CASES = [(name, standard) for name, standards in STANDARDS.items() for standard in standards]
# What a program of either language does with them.
PROGRAM = """\
#include "colibri_inspect.h"
#include "colibri_ring.h"
#include "colibri_lm.h"
#include "colibri_tokenizer.h"
#include "colibri_host.h"
#include "alpha/model.h"
#include "beta/model.h"

#if defined(__cplusplus)
#define ALIGNED alignas(64)
#else
#define ALIGNED _Alignas(64)
#endif

ALIGNED static uint8_t one[ALPHA_MODEL_CONTEXT_BYTES], other[BETA_MODEL_CONTEXT_BYTES];
static float x[ALPHA_MODEL_INPUT_SIZE + BETA_MODEL_INPUT_SIZE], y[ALPHA_MODEL_OUTPUT_SIZE + BETA_MODEL_OUTPUT_SIZE];
static colibri_ring_slot slots[4];

int main(void)
{
    colibri_context_t *a = alpha_init(one, sizeof one, alpha_model), *b = beta_init(other, sizeof other, beta_model);
    if (a == 0 || b == 0 || !ALPHA_MODEL_FITS(a) || !BETA_MODEL_FITS(b)) {
        return 1;
    }
    alpha_forward(a, x, y, 1);
    beta_forward(b, x, y, 1);
    colibri_scan_t scan = {0, 0, 0, 0, 0};
    if (a->status || b->status || alpha_selftest(a, y) || beta_selftest(b, y) || alpha_check_flash(&scan, UINT32_MAX)) {
        return 2;
    }
    colibri_ring_t ring;
    colibri_ring_init(&ring, slots, 4);
    if (!colibri_ring_push(&ring, x) || !colibri_ring_push(&ring, y)) {
        return 3;
    }
    void *const first = colibri_ring_pop(&ring), *const second = colibri_ring_pop(&ring);
    if (first != x || second != y || colibri_ring_pop(&ring) != 0) {
        return 4;
    }
    return colibri_version()[0] == 0; /* a function of the library */
}
"""


def command(name: str) -> str:
    """The compiler's command; clang's for C++ has its version where clang's has."""
    return compiler("clang").replace("clang", "clang++") if name == "clang++" else compiler(name)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with prefixes, one without, and the objects of the two."""
    folder: Path = tmp_path_factory.mktemp("models")
    for prefix, name in (("alpha", "top1"), ("beta", "quantized"), ("colibri", "dense")):
        exporter.write(example(name), folder / prefix, exporter.Style(prefix=prefix))
        if prefix != "colibri":
            subprocess.run([compiler("gcc"), "-std=gnu11", "-O1", "-DCOLIBRI_GENERATED", *toolchain.source_flags(),
                            f"-I{folder / prefix}", "-c", str(folder / prefix / "model.c"), "-o",
                            str(folder / f"{prefix}.o")], check=True)  # fmt: skip
    return folder


@pytest.mark.parametrize(("name", "standard"), CASES, ids=[" ".join(case) for case in CASES])
def test_headers_compile_in_every_standard(name: str, standard: str, models: Path, tmp_path: Path) -> None:
    """B3: each by itself and all together, without a warning."""
    language = "c++" if "++" in name else "c"
    alone = [f'#include "{header}"\n' for header in (*HEADERS, "colibri/model.h", "alpha/model.h")]
    flags = [f"-x{language}", f"-std={standard}", *WARNINGS, f"-I{size.ENGINE / 'include'}", f"-I{models}"]
    for text in (*(alone if standard.endswith("17") else ()), "".join(alone), PROGRAM):
        done = subprocess.run([command(name), *flags, "-fsyntax-only", "-"], input=text + "int unused_by_itself;\n",
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stderr}"


@pytest.mark.parametrize("name", STANDARDS)
def test_a_program_of_every_language_links_and_runs(name: str, models: Path, gcc_build: Build, tmp_path: Path) -> None:
    """B3: functions under a prefix have C's names in C++ too."""
    language = "c++" if "++" in name else "c"
    source, program = tmp_path / f"program.{language}", tmp_path / "program"
    source.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run([command(name), f"-std={STANDARDS[name][0]}", *WARNINGS, f"-I{size.ENGINE / 'include'}",
                           f"-I{models}", str(source), str(models / "alpha.o"), str(models / "beta.o"),
                           str(gcc_build.archive), "-lm", "-o", str(program)], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert subprocess.run([program], check=False).returncode == 0


@pytest.mark.parametrize("name", ["alpha", "beta", "colibri"])
def test_a_model_h_of_another_export_does_not_compile(name: str, models: Path, tmp_path: Path) -> None:
    """C9: model.c knows the model.h that its sizes are in."""
    text = (models / name / "model.h").read_text(encoding="utf-8")
    (tmp_path / "model.h").write_text(text.replace("_DIGEST 0x", "_DIGEST 0x1"), encoding="utf-8")
    (tmp_path / "model.c").write_bytes((models / name / "model.c").read_bytes())
    for flags in ((), ("-DCOLIBRI_GENERATED",)):
        done = subprocess.run([compiler("gcc"), "-std=gnu11", *flags, *toolchain.source_flags(), f"-I{tmp_path}",
                               "-fsyntax-only", str(tmp_path / "model.c")], capture_output=True, text=True,
                              check=False)  # fmt: skip
        assert done.returncode != 0 and "of different exports" in done.stderr
