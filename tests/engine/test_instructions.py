"""Instruction counts of two fixed inferences: a slower engine fails here before anyone measures seconds.

Counted by callgrind with the plain kernels (which kernels a machine prefers must not change the count) and with AVX2
where there is one; it does not know AVX-512. After a change that is meant, `python -m tests.engine.test_instructions`
writes the table anew.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from colibri import exporter
from colibri.ir.graph import Graph, Router
from colibri.runtime import engine
from tests.engine.conftest import compile_c, compiler
from tests.graphs import FORMATS, expert, linear
from tools import size

TABLE = Path(__file__).with_name("instructions.json")
GROWTH = 1.03
CASES = [(name, fmt) for name in ("tiny", "small") for fmt in ("fp32", "fp16", "int8", "int4")]

DRIVER = r"""
#include "core/internal.h"
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    FILE *file = fopen(argv[1], "rb");
    fseek(file, 0, SEEK_END);
    const size_t bytes = (size_t)ftell(file);
    rewind(file);
    uint8_t *model = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (fread(model, 1, bytes, file) != bytes || argc != 4) {
        return 2;
    }
    const size_t need = colibri_model_size(model);
    colibri_context_t *ctx = colibri_init(aligned_alloc(64, (need + 63) / 64 * 64), need, model);
    if (argv[2][0] == 'p') {
        clb_use_kernels(ctx, &clb_kernels_plain);
    }
    float *x = malloc(ctx->input_size * sizeof *x), *y = malloc(ctx->output_size * sizeof *y);
    for (uint32_t i = 0; i < ctx->input_size; ++i) {
        x[i] = (float)((int)(i * 37 % 101) - 50) / 40.0f;
    }
    for (int n = atoi(argv[3]); n > 0; --n) {
        colibri_forward(ctx, x, y, 1);
    }
    return ctx->status;
}
"""


def model(name: str, fmt: str) -> bytes:
    """The MoE layer of the benchmark's sizes: softmax top-2, gated experts."""
    d, hidden, experts = {"tiny": (32, 64, 3), "small": (256, 512, 8)}[name]
    graph = Graph(name)
    x = graph.add_input("x", (d,))
    rng = np.random.default_rng(1)
    body = [expert(e, d, hidden, d, 1, fmt) for e in range(experts)]
    graph.outputs = [
        graph.add("moe", x, linear(graph, rng, x, experts, False), router=Router(experts, 2), experts=body)
    ]
    return exporter.build(graph).image


def count(folder: Path, binary: Path, image: bytes, kernels: str) -> int:
    """Instructions of one colibri_forward: the difference of eleven and one."""
    path = folder / "model.bin"
    path.write_bytes(image)

    def total(calls: int) -> int:
        command = [compiler("valgrind"), "--tool=callgrind", f"--callgrind-out-file={folder / 'out'}", binary, path]
        done = subprocess.run([*command, kernels, str(calls)], capture_output=True, text=True, check=True)
        found = re.search(r"Collected : (\d+)", done.stderr)
        assert found, done.stderr
        return int(found[1])

    return (total(11) - total(1)) // 10


def measure(folder: Path, kernels: str) -> dict[str, int]:
    built = size.build(folder / "engine", "gcc", target="libcolibri.a")
    source = folder / "driver.c"
    source.write_text(DRIVER, encoding="utf-8")
    binary = compile_c(compiler("gcc"), folder / "driver", [source, built / "libcolibri.a"], "-std=c11", "-O2")
    return {f"{name} {fmt} {kernels}": count(folder, binary, model(name, fmt), kernels) for name, fmt in CASES}


def available() -> list[str]:
    return [name for name in ("avx2", "plain") if name in engine.KERNELS]


@pytest.mark.parametrize("kernels", ["plain", "avx2"])
def test_instruction_counts_do_not_grow(kernels: str, tmp_path: Path) -> None:
    if kernels not in available():
        pytest.skip(f"this machine has no {kernels}")
    known = json.loads(TABLE.read_text(encoding="utf-8"))
    for case, now in measure(tmp_path, kernels).items():
        assert now <= GROWTH * known[case], f"{case}: {now} instructions, {known[case]} before"


def test_the_formats_counted_exist() -> None:
    assert {fmt for _, fmt in CASES} <= set(FORMATS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        rows: dict[str, int] = {}
        for which in available():
            (sub := Path(place) / which).mkdir()
            rows |= measure(sub, which)
    TABLE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(TABLE.read_text(encoding="utf-8"))
    sys.exit(0)
