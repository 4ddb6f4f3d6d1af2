"""ExecuTorch: the dense form of the layer (every expert, masked), delegated to XNNPACK, batch size left open."""

from __future__ import annotations

from typing import Any

from benchmarks.layers.adapters.base import Adapter
from benchmarks.layers.sizes import BATCHES, Array, Size


def create(name: str, kind: str, dtype: str) -> Adapter:
    """The adapter."""
    return ExecuTorch(name)


class ExecuTorch(Adapter):
    """Exported ahead of time; the runtime takes and gives PyTorch tensors."""

    sources = ("adapters/executorch.py", "adapters/torch_layer.py")

    def build(self, size: Size) -> None:
        import torch
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        from benchmarks.layers.adapters.torch_layer import Dense, layer

        batch = torch.export.Dim("batch", min=1, max=max(BATCHES))
        exported = torch.export.export(
            layer(size, Dense).eval(), (torch.randn(4, size.d),), dynamic_shapes=({0: batch},)
        )
        program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
        with (self.folder(size) / "model.pte").open("wb") as file:
            program.write_to_file(file)

    def imports(self) -> None:
        import executorch.runtime  # noqa: F401

    def prepare(self, size: Size, threads: int) -> None:
        import torch
        from executorch.extension.pybindings import portable_lib
        from executorch.runtime import Runtime

        self.size, self._torch = size, torch
        portable_lib._unsafe_reset_threadpool(threads)
        self._program = Runtime.get().load_program(self.folder(size) / "model.pte")
        self._method = self._program.load_method("forward")

    def run(self, x: Array) -> Any:
        return self._method.execute([self._torch.from_numpy(x)])[0].numpy()
