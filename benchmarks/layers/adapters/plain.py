"""plain.c, the loops one would write by hand, through ctypes and through its own C loop."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from benchmarks.common.compiling import compile_c
from benchmarks.common.environment import BUILD
from benchmarks.layers.adapters.base import LAYERS, Adapter, Driven
from benchmarks.layers.sizes import Array, Size, weights

_FLAGS = ["-O3", "-march=native", "-ffast-math"]
_HEAD = 16  # int32 before the weights


def create(name: str, kind: str, dtype: str) -> Adapter:
    """The adapter for one way of calling."""
    return FromC(name) if kind == "c" else FromPython(name)


class _Plain(Adapter):
    def folder(self, size: Size) -> Path:
        path = size.path / "plain"
        path.mkdir(parents=True, exist_ok=True)
        return path

    sources = ("adapters/plain.py",)

    def build(self, size: Size) -> None:
        head = np.zeros(_HEAD, np.int32)
        head[:4] = size.d, size.ff, size.experts, size.k
        with (self.folder(size) / "weights.bin").open("wb") as file:
            head.tofile(file)
            for array in weights(size).values():
                for block in array:
                    np.ascontiguousarray(block).tofile(file)


class FromC(_Plain, Driven):
    """plain.c in the loop of driver.c."""

    def program(self) -> Path:
        return compile_c(BUILD / "driver-plain", [LAYERS / "driver.c", LAYERS / "plain.c"], _FLAGS, ["-lm"])

    def model(self, size: Size) -> Path:
        return self.folder(size) / "weights.bin"


class FromPython(_Plain):
    """plain.c as a shared library."""

    def prepare(self, size: Size, threads: int) -> None:
        self.size = size
        source = LAYERS / "plain.c"
        library = compile_c(BUILD / "libplain.so", [source], [*_FLAGS, "-shared", "-fPIC"], ["-lm"])
        self._library = ctypes.CDLL(str(library))
        self._library.backend_forward.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        if self._library.backend_open(str(self.folder(size) / "weights.bin").encode(), threads):
            raise RuntimeError("plain.c could not map its weights")

    def run(self, x: Array) -> Array:
        y = np.empty_like(x)
        self._library.backend_forward(x.ctypes.data, y.ctypes.data, len(x))
        return y
