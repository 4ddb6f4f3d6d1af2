"""The peers by name, known without importing any of their libraries."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from benchmarks.layers.bounds import WEIGHT_BYTES
from benchmarks.layers.sizes import Size

if TYPE_CHECKING:
    from benchmarks.layers.adapters.base import Adapter


@dataclass(frozen=True)
class Entry:
    """One peer: its class, the precision of its weights, what it must have installed, and when it is left out."""

    name: str
    module: str
    kind: str
    dtype: str
    needs: str = ""  # a key of environment.PEERS; "" for none
    threads: tuple[int, ...] = (1, 2)
    dense: bool = False  # computes every expert for every row
    copies: float = 1.0  # resident bytes over the weights' own, for grouping what fits in memory together
    part: bool = False  # not the layer, but a part that another figure needs
    left_out: dict[str, str] = field(default_factory=dict)  # size -> reason

    @property
    def ours(self) -> bool:
        """Whether it is Colibri itself."""
        return self.name.startswith("colibri")

    def resident(self, size: Size) -> float:
        """Estimated bytes in memory."""
        return 2.5e8 + self.copies * size.weights * WEIGHT_BYTES.get(self.dtype, 0.0)

    def create(self) -> Adapter:
        """The adapter; imports its module."""
        return importlib.import_module(f"{__name__}.{self.module}").create(self.name, self.kind, self.dtype)  # type: ignore[no-any-return]


_ONNX: dict[str, Any] = {"module": "onnx_runtime", "needs": "onnxruntime"}
_TORCH: dict[str, Any] = {"module": "pytorch", "needs": "torch", "copies": 1.5}
_MANY = "compiling 64 expert branches takes many minutes"
_DENSE = "it computes all experts for every row: four times the work or more, and minutes a cell"
_LARGE = "its float32 weights take 5.6 GB and more: onnxruntime's operator and loop stand for the others here"
_DENSE_OUT = {"olmoe": _DENSE, "mixtral": _DENSE}
_PEERS = [
    Entry("plain-c", "plain", "c", "fp32", threads=(1,), left_out={"mixtral": _LARGE}),
    Entry("plain-python", "plain", "python", "fp32", threads=(1,), left_out={"mixtral": _LARGE}),
    Entry("ort-moe", kind="moe", dtype="fp32", **_ONNX),
    Entry("ort-loop", kind="loop", dtype="fp32", **_ONNX),
    Entry("ort-dense", kind="dense", dtype="fp32", dense=True, left_out=_DENSE_OUT, **_ONNX),
    Entry("ort-qmoe8", kind="qmoe8", dtype="int8", **_ONNX),
    Entry("ort-loop-dq8", kind="dq8", dtype="int8", **_ONNX,
          left_out={"mixtral": "quantize_dynamic needs the float32 model in memory several times"}),
    Entry("ort-loop-n8", kind="n8", dtype="int8", **_ONNX),
    Entry("ort-qmoe4", kind="qmoe4", dtype="int4", **_ONNX),
    Entry("ort-loop-n4", kind="n4", dtype="int4", **_ONNX),
    Entry("torch-eager", kind="eager", dtype="fp32", left_out={"mixtral": _LARGE}, **_TORCH),
    Entry("torch-grouped", kind="grouped", dtype="fp32", left_out={"mixtral": _LARGE}, **_TORCH),
    Entry("torch-compile", kind="compile", dtype="fp32", left_out={"olmoe": _MANY, "mixtral": _LARGE}, **_TORCH),
    Entry("torch-int8", kind="int8", dtype="int8", **_TORCH),
    Entry("executorch-dense", "executorch", "dense", "fp32", needs="executorch", dense=True, copies=2.5,
          left_out=_DENSE_OUT),
    Entry("ort-empty", kind="empty", dtype="fp32", part=True, **_ONNX),
    Entry("colibri-c-router", "colibri_engine", "c", "router", part=True),
]  # fmt: skip


@cache
def entries() -> dict[str, Entry]:
    """Every peer by name; Colibri in each dtype its exporter offers, from C and from Python."""
    from colibri.quantize.choose import DTYPES

    ours = [
        Entry(f"colibri-{way}-{dtype}", "colibri_engine", way, dtype, copies=0.5)  # both ways map one file
        for dtype in DTYPES
        if dtype in WEIGHT_BYTES  # "mixed" weights have no bound of their own
        for way in ("c", "python")
    ]
    outliers = Entry("colibri-c-int8-e", "colibri_engine", "c+e", "int8", copies=0.5)
    return {entry.name: entry for entry in [*ours, outliers, *_PEERS]}


def why_not(entry: Entry, size: Size, threads: int, absent: dict[str, str]) -> str | None:
    """The reason this peer is not measured here, or None."""
    if entry.needs in absent:
        return f"{entry.needs} is not installed: {absent[entry.needs]}"
    if threads not in entry.threads:
        return f"runs with {entry.threads[0]} thread only"
    return entry.left_out.get(size.name)
