"""Builds of the engine and small exported models, shared by the engine's tests and the hostile ones."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import exporter
from colibri.emit import model_bin
from colibri.ir.graph import Graph, Router
from colibri.quantize import formats
from colibri.reference.certificate import certify
from tests.graphs import constant, expert, linear, recurrence
from tests.lm_graphs import encoder_decoder, language_model
from tools import size

HERE = Path(__file__).parent
C_FLAGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]


def find_clang() -> str | None:
    """The newest clang on the path, under whatever name."""
    return next((c for c in ("clang", *(f"clang-{n}" for n in range(25, 13, -1))) if shutil.which(c)), None)


def compiler(name: str) -> str:
    """The command of `gcc`, `clang` or `g++`; skips the test, by name, where it is not installed."""
    command = find_clang() if name == "clang" else shutil.which(name)
    if command is None:
        pytest.skip(f"{name} is not installed")
    return command


@dataclass(frozen=True)
class Build:
    """One build of the engine: libcolibri.a, libcolibri.so and their objects."""

    cc: str
    directory: Path

    @property
    def archive(self) -> Path:
        return self.directory / "libcolibri.a"

    @property
    def library(self) -> Path:
        return self.directory / "libcolibri.so"


def build_engine(cc: str, directory: Path) -> Build:
    """The engine with warnings as errors; gcc adds the stack figures. Fails with the compiler's words."""
    try:
        size.build(directory, cc, f"-Werror {size.STACK_FLAGS if 'gcc' in cc else ''}")
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{cc} does not build the engine without warnings:\n{error.stderr}")
    return Build(cc, directory)


@pytest.fixture(scope="session")
def gcc_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return build_engine(compiler("gcc"), tmp_path_factory.mktemp("gcc"))


@pytest.fixture(scope="session", params=["gcc", "clang"])
def engine_build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The engine as gcc and as clang build it."""
    if request.param == "gcc":
        build: Build = request.getfixturevalue("gcc_build")
        return build
    return build_engine(compiler("clang"), tmp_path_factory.mktemp("clang"))


def compile_c(cc: str, output: Path, sources: Sequence[Path], *flags: str) -> Path:
    """Compile and link C without warnings against the engine's headers."""
    includes = [f"-I{size.ENGINE / 'include'}", f"-I{size.ENGINE / 'src'}"]
    command = [cc, *C_FLAGS, *includes, *map(str, sources), *flags, "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return output


# --- models -----------------------------------------------------------------------------------------------------------

MAX_BATCH = 5


def _dense(graph: Graph, rng: np.random.Generator) -> list[str]:
    x = graph.add_input("x", (9,))
    h = linear(graph, rng, x, 20, True, activation="relu")
    return [graph.add("softmax", linear(graph, rng, h, 3, False))]


def _moe(
    graph: Graph, rng: np.random.Generator, x: str, router: Router, kind: int, seed: int, fmt: str = "fp32"
) -> str:
    d = graph.shapes[x][-1]
    body = [expert(seed + e, d, 10, d, kind, fmt) for e in range(router.experts)]
    return graph.add("moe", x, linear(graph, rng, x, router.experts, True), router=router, experts=body)


def _top1(graph: Graph, rng: np.random.Generator) -> list[str]:
    x = graph.add_input("x", (3, 6))  # three tokens a sample
    return [_moe(graph, rng, x, Router(4, 1, "softmax", "none"), 0, 10)]


def _top2_shared(graph: Graph, rng: np.random.Generator) -> list[str]:
    x = graph.add_input("x", (2, 8))
    routed = _moe(graph, rng, x, Router(5, 2, "sigmoid", "sum", 2.5), 1, 20)
    shared = linear(graph, rng, linear(graph, rng, x, 12, False, activation="tanh"), 8, False)
    return [graph.add("binary", graph.add("binary", routed, shared, func="add"), x, func="add")]


def _soft(graph: Graph, rng: np.random.Generator) -> list[str]:
    x = graph.add_input("x", (7,))
    return [_moe(graph, rng, x, Router(3, 3, "softmax", "none"), 2, 30)]


def _deep(graph: Graph, rng: np.random.Generator) -> list[str]:
    x = graph.add_input("x", (2, 5))
    for layer, router in enumerate([Router(3, 1, "logit", "one"), Router(4, 2, "logit", "softmax"), Router(2, 1)]):
        h = graph.add("layernorm", x, constant(graph, rng, graph.fresh("g"), 5), eps=1e-5)
        x = graph.add("binary", x, _moe(graph, rng, h, router, layer % 3, 40 + 10 * layer), func="add")
    return [graph.add("reduce", x, func="mean", axis=0)]


def _quantized(graph: Graph, rng: np.random.Generator) -> list[str]:
    x = graph.add_input("x", (2, 40))
    h = linear(graph, rng, x, 150, True, "fp16", activation="relu")
    h = linear(graph, rng, h, 12, True, "int8 weight-only")
    y = _moe(graph, rng, h, Router(3, 2, "softmax", "sum"), 0, 70, "int8")
    z = _moe(graph, rng, y, Router(2, 1), 1, 80, "int4")
    return [linear(graph, rng, z, 9, False, "int8 with outliers"), linear(graph, rng, z, 5, True, "int4 with outliers")]


def _modern(graph: Graph, rng: np.random.Generator) -> list[str]:
    """All that a routing descriptor can say: bias and groups, capacity, weighted inputs, sparse mixer."""
    x = graph.add_input("x", (4, 8))
    bias, own = tuple(rng.standard_normal(8)), tuple(rng.random(8))
    for n, router in enumerate([
        Router(8, 3, "sigmoid", "sum", 2.5, bias, 4, 2, "top2", 1e-20), Router(8, 2, groups=2, group_rule="max"),
        Router(6, 2, "sqrt_softplus", "clamped", epsilon=0.5, capacity=2), Router(5, 1, "sigmoid", apply="input"),
        Router(7, 2, "sparse_mixer", epsilon=0.05), Router(8, 2, "softmax", "sum", expert_scale=own),
        Router(3, 1, "softmax", capacity=1),
    ]):  # fmt: skip
        x = graph.add("binary", x, _moe(graph, rng, x, router, n % 3, 100 + 10 * n), func="add")
    return [x]


def _steps(graph: Graph, rng: np.random.Generator) -> list[str]:
    """What works along a sample: embedding, windows, recurrences both ways and in experts, products of values."""
    ids, x = graph.add_input("ids", (6, 1)), graph.add_input("x", (6, 5))
    table = graph.add_constant("table", rng.standard_normal((9, 5)))
    x = graph.add("binary", x, graph.add("embed", ids, table), func="add")
    padded = graph.add("concat", constant(graph, rng, "pad", 2, 5), x, axis=0)
    windows = graph.add("reshape", graph.add("window", padded, axis=0, size=3, step=1, dilation=1), shape=(6, 15))
    h = linear(graph, rng, windows, 10, True, "int8", activation="relu")
    forward, backward = (recurrence(graph, rng, h, 10, "int8", reverse) for reverse in (False, True))
    scores = graph.add("matmul", forward, graph.add("transpose", backward, perm=(1, 0)))
    seen = graph.add("matmul", graph.add("softmax", scores), h)
    y = _moe(graph, rng, seen, Router(3, 2), 4, 90)
    whole = graph.add("reshape", y, shape=(60,))
    return [_moe(graph, rng, whole, Router(2, 1), 4, 95), y]


def _many_ports(graph: Graph, rng: np.random.Generator) -> list[str]:
    a, b = graph.add_input("a", (4,)), graph.add_input("b", (3, 4))
    both = graph.add(
        "binary", a, graph.add("transpose", graph.add("transpose", b, perm=(1, 0)), perm=(1, 0)), func="mul"
    )
    routed = _moe(graph, rng, both, Router(3, 2, "softmax", "sum"), 0, 70)
    turned = graph.add("transpose", routed, perm=(1, 0))
    return [graph.add("unary", turned, func="gelu"), graph.add("reduce", b, func="max", axis=0), a]


GRAPHS = {"dense": _dense, "top1": _top1, "top2_shared": _top2_shared, "soft": _soft, "deep": _deep,
          "many_ports": _many_ports, "quantized": _quantized, "modern": _modern, "steps": _steps}  # fmt: skip

# Language models whose contexts are longer than a page of the cache; of two of them, matrices and table are quantised.
_TEXT = {"context": 80, "vocab": 24, "layers": 1}
# encoder-decoders
EXCHANGES: dict[str, dict[str, Any]] = {
    "exchange": {"capacity": 3},
    "exchange_int8": {"cache": "int8", "encode": functools.partial(formats.int8, share=0), "width": 20},
}
TEXTS: dict[str, dict[str, Any]] = {
    "text": {"delay": 2},
    "text_window": {"cache": "fp16", "window": 20, "sinks": True, "softcap": 1.5, "heads": 6, "value": 5},
    "text_latent": {"cache": "int8", "kv": 1, "heads": 9, "key": 12, "value": 10},
    "text_int8": {"cache": "int8", "encode": functools.partial(formats.int8, share=0), "delay": 70, "width": 20},
    "text_delta": {"delta": True, "heads": 4, "key": 6, "value": 5},
    "text_int4": {
        "cache": "fp16",
        "encode": functools.partial(formats.int4, share=0),
        "width": 32,
        "key": 16,
        "value": 16,
    },
}


@functools.cache
def example(
    name: str, expert_align: int = 4096, max_batch: int = MAX_BATCH, golden_rows: int | None = None
) -> exporter.Export:
    """One of the small models, exported; `golden_rows` is how many its certificate has, if not the usual."""
    if name in TEXTS:
        graph = language_model(**{**_TEXT, **TEXTS[name]})
    elif name in EXCHANGES:
        graph = encoder_decoder(**{**_TEXT, **EXCHANGES[name]})
    else:
        graph = Graph(name)
        graph.outputs = GRAPHS[name](graph, np.random.default_rng(7))
    export = exporter.build(graph, max_batch=max_batch, expert_align=expert_align)
    if golden_rows is None:
        return export
    certificate = certify(export.graph, random_rows(export, golden_rows), golden_rows)
    image = model_bin.write(export.program, certificate.golden, certificate.frequencies, expert_align=expert_align)
    return replace(export, certificate=certificate, image=image)


@pytest.fixture(params=[*GRAPHS, *TEXTS])
def model(request: pytest.FixtureRequest) -> exporter.Export:
    """Each small model in turn."""
    return example(request.param)


def random_rows(export: exporter.Export, batch: int, seed: int = 3) -> list[np.ndarray]:
    """Input arrays (batch, *shape) float32, one an input; of a language model ids."""
    rng = np.random.default_rng(seed)
    if export.graph.context:
        return [rng.integers(0, _TEXT["vocab"], (batch, 1)).astype(np.float32)]
    return [rng.standard_normal((batch, *export.graph.shapes[i]), np.float32) * 2 for i in export.graph.inputs]


def packed(arrays: Sequence[np.ndarray]) -> bytes:
    """Arrays (batch, *shape) as the engine takes and gives them: rows, each the ports one after another."""
    rows = [np.ascontiguousarray(x, "<f4").reshape(len(x), -1) for x in arrays]
    return np.concatenate(rows, axis=1).tobytes()
