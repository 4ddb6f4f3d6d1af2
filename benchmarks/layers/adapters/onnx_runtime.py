"""onnxruntime on the CPU, from Python: the contrib operators, the loop in four precisions, and the dense form."""

from __future__ import annotations

from typing import Any

from benchmarks.layers.adapters.base import Adapter
from benchmarks.layers.sizes import Array, Size


def create(name: str, kind: str, dtype: str) -> Adapter:
    """The adapter for one graph."""
    return OnnxRuntime(name, kind=kind)


class OnnxRuntime(Adapter):
    """One session; all its graph optimisations are on, as by default."""

    sources = ("adapters/onnx_graphs.py",)

    def build(self, size: Size) -> None:
        from benchmarks.layers.adapters.onnx_graphs import quantize_loop, write

        folder, kind = self.folder(size), self.options["kind"]
        if kind == "dq8":
            source = folder / "source"
            source.mkdir(exist_ok=True)
            write(source / "loop.onnx", size, "loop")
            quantize_loop(source / "loop.onnx", folder / "model.onnx")
            for file in source.iterdir():
                file.unlink()
        else:
            write(folder / "model.onnx", size, kind)

    def imports(self) -> None:
        import onnxruntime  # noqa: F401

    def prepare(self, size: Size, threads: int) -> None:
        import onnxruntime

        self.size = size
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        path = self.folder(size) / "model.onnx"
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(self, x: Array) -> Any:
        return self._session.run(None, {"x": x})[0]
