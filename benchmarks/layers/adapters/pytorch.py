"""PyTorch: an eager loop over the chosen experts, grouped matrix products, torch.compile, and fbgemm dynamic int8."""

from __future__ import annotations

from typing import Any

from benchmarks.layers.adapters.base import Adapter
from benchmarks.layers.sizes import Array, Size


def create(name: str, kind: str, dtype: str) -> Adapter:
    """The adapter for one way of running it."""
    return PyTorch(name, kind=kind)


class PyTorch(Adapter):
    """Tensors in and out; `run` starts from and ends at NumPy, which shares the memory."""

    sources = ("adapters/pytorch.py", "adapters/torch_layer.py")

    def build(self, size: Size) -> None:
        if self.options["kind"] == "int8":
            import torch

            from benchmarks.layers.adapters.torch_layer import quantized

            torch.save(quantized(size), self.folder(size) / "model.pt")

    def imports(self) -> None:
        import benchmarks.layers.adapters.torch_layer  # noqa: F401

    def prepare(self, size: Size, threads: int) -> None:
        import torch

        from benchmarks.layers.adapters.torch_layer import Eager, Grouped, Unrolled, layer, tensors

        self.size, self._torch = size, torch
        torch.set_num_threads(threads)
        kind = self.options["kind"]
        if kind == "int8":
            self._module: Any = torch.load(self.folder(size) / "model.pt", weights_only=False)
        elif kind == "grouped":
            self._module = Grouped(**tensors(size), k=size.k)
        elif kind == "compile":
            torch._dynamo.config.capture_dynamic_output_shape_ops = True
            self._module = torch.compile(layer(size, Unrolled), dynamic=True)
        else:
            self._module = layer(size, Eager)

    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes or 4 * self.size.weights

    def run(self, x: Array) -> Any:
        with self._torch.inference_mode():
            return self._module(self._torch.from_numpy(x)).numpy()
