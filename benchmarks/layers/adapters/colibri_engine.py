"""Colibri from Python (`colibri.load`) and from C (driver.c on libcolibri.a with model.bin mapped)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from benchmarks.common.compiling import compile_c
from benchmarks.common.environment import BUILD, ENGINE, ROOT
from benchmarks.layers.adapters.base import LAYERS, Adapter, Driven
from benchmarks.layers.sizes import BATCHES, Array, Size, inputs, weights

_APART = ("frontends", "api", "cli", "engine", "toolchain", "c_source")  # parts of the package that no model.bin shows
_CHECKED_ROWS, _CHECKED_MACS = 64, 1 << 28  # rows the exporter calibrates on and certifies: exact is not fast


def create(name: str, kind: str, dtype: str) -> Adapter:
    """The adapter for one way of calling; `c+e` is C with outliers E of the usual share, whether they pay or not."""
    way, _, extra = kind.partition("+")
    return (FromC if way == "c" else FromPython)(name, dtype=dtype, outliers=extra == "e")


class _Exported(Adapter):
    """Shares one model.bin a dtype between both ways of calling."""

    sources = ("adapters/colibri_engine.py",)

    def folder(self, size: Size) -> Path:
        path = size.path / f"colibri-{self.options['dtype']}{'-e' if self.options['outliers'] else ''}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def fingerprint(self) -> str:
        files = sorted(f for f in (ROOT / "src/colibri").rglob("*.py") if not set(_APART) & {f.stem, f.parent.name})
        return super().fingerprint() + hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()

    def build(self, size: Size) -> None:
        from colibri.exporter import Quantization, build
        from colibri.quantize.formats import SHARE

        count = max(4, min(_CHECKED_ROWS, _CHECKED_MACS // (size.k * size.expert_weights)))
        rows = inputs(size, 32).reshape(-1, size.d)[:count]
        dtype = self.options["dtype"]
        graph = router_graph(size) if dtype == "router" else layer_graph(size)
        share = SHARE if self.options["outliers"] else None
        how = Quantization("fp32" if dtype == "router" else dtype, outlier_share=share)
        export = build(graph, quantization=how, max_batch=max(BATCHES), calibration=[rows])
        (self.folder(size) / "model.bin").write_bytes(export.image)


class FromPython(_Exported):
    """`colibri.load("model.bin")`, called on NumPy arrays."""

    def imports(self) -> None:
        import colibri  # noqa: F401

    def prepare(self, size: Size, threads: int) -> None:
        import colibri

        self.size = size
        self._model = colibri.load(self.folder(size) / "model.bin", threads=threads)

    def run(self, x: Array) -> Any:
        return self._model(x)


class FromC(_Exported, Driven):
    """The same file through driver.c."""

    def program(self) -> Path:
        sources = [LAYERS / name for name in ("driver.c", "driver_colibri.c")]
        libraries = [str(ENGINE / name) for name in ("libcolibri_host.a", "libcolibri.a")]
        flags = ["-O2", f"-I{ROOT / 'engine/include'}"]
        return compile_c(BUILD / "driver-colibri", sources, flags, [*libraries, "-lm", "-pthread"])

    def model(self, size: Size) -> Path:
        return self.folder(size) / "model.bin"


def layer_graph(size: Size) -> Any:
    """The layer as Colibri's own graph: one `linear` for the logits, one `moe` with gated experts."""
    from colibri.ir.graph import Graph, Router

    w = weights(size)
    graph = Graph(size.name)
    x = graph.add_input("x", (size.d,))
    logits = graph.add("linear", x, graph.add_constant("router", w["router"]))
    experts = []
    for e in range(size.experts):
        expert = Graph(f"expert{e}")
        token = expert.add_input("token", (size.d,))
        gate, up, down = (expert.add_constant(name, w[name][e]) for name in ("gate", "up", "down"))
        gated = expert.add("unary", expert.add("linear", token, gate), func="silu")
        hidden = expert.add("binary", gated, expert.add("linear", token, up), func="mul")
        expert.outputs = [expert.add("linear", hidden, down)]
        experts.append(expert)
    router = Router(size.experts, size.k, score="softmax", normalize="sum")
    graph.outputs = [graph.add("moe", x, logits, router=router, experts=experts)]
    return graph


def router_graph(size: Size) -> Any:
    """The logits alone."""
    from colibri.ir.graph import Graph

    graph = Graph(f"{size.name}-router")
    x = graph.add_input("x", (size.d,))
    graph.outputs = [graph.add("linear", x, graph.add_constant("router", weights(size)["router"]))]
    return graph
