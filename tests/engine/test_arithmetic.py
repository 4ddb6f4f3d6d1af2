"""One arithmetic: whatever compiler, options, control word, hook or byte of a weight, the same bits or a named refusal.

docs/arithmetic.md has what is measured here as a table; `python -m tests.engine.test_arithmetic` writes it anew.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import engine, exporter, spec
from colibri._engine import ffi, lib
from colibri.errors import ModelError
from colibri.graph import Graph, Router
from colibri.language import LanguageModel
from tests.cross.targets import firmware
from tests.engine.conftest import GRAPHS, HERE, Build, compile_c, compiler, example, packed, random_rows
from tests.graphs import FORMATS, every_byte, expert, linear
from tests.lm_graphs import language_model
from tools import size

E = {name: code for code, (name, _) in enumerate(spec.ERRORS)}
DOC = Path(__file__).parents[2] / "docs/arithmetic.md"


def delicate() -> Graph:
    """Denormals, quantised rows and a softmax, wide enough that its operations are spread over threads."""
    graph, rng = Graph("delicate"), np.random.default_rng(2)
    x = graph.add_input("x", (300,))
    scores = [linear(graph, rng, x, 500, True, fmt) for fmt in ("fp32", "int8", "int4")]
    gates = graph.add("softmax", linear(graph, rng, graph.add("concat", *scores, axis=0), 260, False))
    body = [expert(e, 260, 300, 260, 1, "int8") for e in range(3)]
    y = graph.add("moe", gates, linear(graph, rng, gates, 3, True), router=Router(3, 2, "softmax", "sum"), experts=body)
    tiny = graph.add_constant("tiny", np.full(260, 1e-37, np.float32))
    small = graph.add("binary", graph.add("softmax", y), tiny, func="mul")  # about 1e-39
    graph.outputs = [graph.add("softmax", scores[0]), y, small]
    return graph


# --- the control word -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_a_forward_has_its_own_control_word_and_gives_the_callers_back(
    cc: str, engine_build: Build, tmp_path: Path
) -> None:
    """A3, A4, C11: whatever the caller, its threads and its hooks do to it; a hook cannot call its context."""
    if engine_build.cc != compiler(cc):
        pytest.skip("one compiler builds both")
    export = exporter.build(delicate(), max_batch=9, expert_align=64)
    (tmp_path / "model.bin").write_bytes(export.image)
    (tmp_path / "rows").write_bytes(packed(random_rows(export, 9)))
    sources = [HERE / "control.c", size.ENGINE / "host/pool.c", engine_build.archive]
    flags = ("-std=gnu11", "-O1", "-DCLB_X86", "-pthread", "-lm", "-Wno-float-conversion")
    program = compile_c(engine_build.cc, tmp_path / "control", sources, *flags)
    done = subprocess.run([program, tmp_path / "model.bin", tmp_path / "rows", "9"], capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


if __name__ == "__main__":
    pass
