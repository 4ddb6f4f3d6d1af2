"""The C engine from Python: load a model, call it on NumPy arrays, verify it."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from itertools import count, takewhile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from colibri._engine import caller, ffi, lib
from colibri.errors import ModelError
from colibri.format import spec
from colibri.format.package import Package, Port, aligned, open_package, parse
from colibri.ir.graph import Array

KERNELS = tuple(ffi.string(name).decode() for name in takewhile(bool, map(lib.kernels_name, count())))
"""Instruction sets this machine can run, the best first."""

_VERIFIED = 1 << 28  # bytes of a file up to which its checksums are verified unasked


class Model:
    """A loaded model; calling it maps NumPy arrays (batch, *shape) float32 to NumPy arrays (batch, *shape) float32.

    Safe to call from several threads at once: each call runs in a context of its own, without the interpreter lock.
    """

    def __init__(
        self, package: Package, verify: bool | None = None, kernels: str | None = None, threads: int = 1
    ) -> None:
        self.package = package
        self._pool = _Pool(threads) if threads != 1 else None
        self.kernels = kernels or KERNELS[0]
        if self.kernels not in KERNELS:
            raise ModelError(f"this machine has no {self.kernels!r} kernels, only {', '.join(KERNELS)}")
        # An array, never a memoryview: cffi crashes when the garbage collector meets the latter in a cycle.
        self._model = ffi.from_buffer("uint8_t[]", package.data)
        error = lib.colibri_check(self._model, len(package.data), lib.COLIBRI_CHECK_STRUCTURE)
        if error:
            raise ModelError(f"{package.path}: {spec.error_text(error)}", error)
        if verify or (verify is None and len(package.data) <= _VERIFIED):
            package.check_weights()
        self._contexts: list[tuple[int, Any, Any]] = []
        self._goes_on = False  # whether a call begins where the one before it ended
        self._max_batch = int(package.header["max_batch"])
        self._input_size = sum(prod(p.shape) for p in package.inputs)
        self._output_size = sum(prod(p.shape) for p in package.outputs)
        moe = spec.named_all(package.ops[: int(package.header["main_ops"])], "moe")
        # Operations that read a source text: the rows of such a model are each their own, and run alone.
        self._encoder_ops = int(package.header["encoder_ops"])
        # tokens a row, k, experts
        self._layers = [(int(op["rows"]), *map(int, package.layers[op["layer"]][["k", "experts"]])) for op in moe]
        # What an application does again and again runs in C: see _engine_call.c.
        alone = len(package.inputs) == len(package.outputs) == 1 and not package.header["context_tokens"]
        limit = self._max_batch if alone and package.mapped is None else 0
        self._call = caller(self._contexts, limit, package.inputs[0].shape, package.outputs[0].shape,
                            np.ndarray, np.empty, np.dtype(np.float32))  # fmt: skip

    @property
    def threads(self) -> int:
        """Threads one call may use."""
        return 1 if self._pool is None else self._pool.threads

    @property
    def inputs(self) -> list[Port]:
        """Names and per-row shapes of the inputs."""
        return self.package.inputs

    @property
    def outputs(self) -> list[Port]:
        """Names and per-row shapes of the outputs."""
        return self.package.outputs

    @property
    def max_batch(self) -> int:
        """Rows the engine runs at once; longer batches are run in pieces, with the same bits."""
        return self._max_batch

    @property
    def context_bytes(self) -> int:
        """Exact bytes of memory one context takes, as the engine reports it."""
        return int(lib.colibri_model_size(self._model))

    @property
    def num_experts(self) -> int:
        """Experts in all layers together, as the engine reports it."""
        return int(lib.colibri_get_num_experts(self._model))

    def __call__(self, *inputs: Any) -> Any:
        """Outputs for `inputs`: one array, or a tuple where the model has several outputs.

        Raises ModelError where a shape does not fit.
        """
        output = self._call(*inputs)
        if output is not None:
            return output
        outputs = self._split(self._run(self._pack(inputs)))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def routes(self, *inputs: Any) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
        """The experts chosen, one array (batch, tokens, k) int32 for each MoE layer, best first.

        Experts have their numbers in the original model, also where pruning has taken others out of the router.
        """
        return [choices for choices, _ in self._record(inputs, logits=False)]

    def router_logits(self, *inputs: Any) -> list[tuple[np.ndarray[Any, np.dtype[np.int32]], Array]]:
        """For each MoE layer the experts chosen, as `routes` gives them, and the logits (batch, tokens, experts)."""
        return self._record(inputs, logits=True)

    def _record(self, inputs: tuple[Any, ...], logits: bool) -> list[tuple[np.ndarray[Any, np.dtype[np.int32]], Array]]:
        pieces: list[Recorded] = []
        self._run(self._pack(inputs), pieces, logits)
        return self._by_layer(pieces, logits)

    def _by_layer(
        self, pieces: list[Recorded], logits: bool, begin: int = 0
    ) -> list[tuple[np.ndarray[Any, np.dtype[np.int32]], Array]]:
        """What was recorded in pieces of a batch, layer by layer from `begin` on, with the original model's numbers."""
        layers: list[tuple[np.ndarray[Any, np.dtype[np.int32]], Array]] = []
        choice_at = logit_at = 0
        for tokens, k, experts in self._layers[begin:]:
            width, logit_width = tokens * k, tokens * experts if logits else 0
            chosen = [p.choices[p.rows * choice_at :][: p.rows * width].reshape(p.rows, tokens, k) for p in pieces]
            shape = (tokens, experts if logits else 0)
            scores = [p.logits[p.rows * logit_at :][: p.rows * logit_width].reshape(p.rows, *shape) for p in pieces]
            choices, numbers = np.concatenate(chosen), self.package.numbers(begin + len(layers))
            layers.append((np.where(choices < 0, choices, numbers[choices]), np.concatenate(scores)))
            choice_at, logit_at = choice_at + width, logit_at + logit_width
        return layers

    def selftest(self) -> None:
        """Recompute the parity certificate with the engine; raises ModelError where a bit differs."""
        context = self._context()
        output = np.empty(self._output_size, np.float32)
        context[1].position = context[1].source = 0  # a text in use has its own context
        error = lib.colibri_selftest(context[1], ffi.from_buffer("float[]", output))
        self._contexts.append(context)
        self.package.check_unchanged()
        if error:
            raise ModelError(f"{self.package.path}: {spec.error_text(error)}", error)

    def _context(self) -> tuple[int, Any, Any]:
        """An unused context: its address, itself, and the memory that must live as long.

        Given back by appending it to the list.
        """
        try:
            return self._contexts.pop()
        except IndexError:
            size = self.context_bytes
            memory = self._memory(size)
            pointer = ffi.from_buffer("uint8_t[]", memory)
            context = lib.colibri_init(pointer, size, self._model)
            if context == ffi.NULL:
                error = lib.colibri_diagnose(pointer, size, self._model)
                raise ModelError(f"{self.package.path}: {spec.error_text(error)}", error) from None
            lib.use_kernels(context, KERNELS.index(self.kernels))
            if self._pool is not None:
                lib.use_pool(context, self._pool.memory)
            return int(ffi.cast("uintptr_t", context)), context, pointer

    def _memory(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A block for a context; raises ModelError where this machine has not as much."""
        try:
            there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            if int(self.package.header["cleared_bytes"]) <= there:
                return aligned(size, spec.ALIGN_CONTEXT)
        except MemoryError:
            pass
        raise ModelError(f"{self.package.path}: a context takes {size:,} bytes, more than this machine has: export "
                         "with a smaller max_batch or context", spec.error_code("MEMORY")) from None  # fmt: skip

    def _pack(self, inputs: tuple[Any, ...]) -> Array:
        ports = self.inputs
        if len(inputs) != len(ports):
            raise ModelError(f"{self.package.path} takes {len(ports)} inputs ({', '.join(p.name for p in ports)}), "
                             f"not {len(inputs)}")  # fmt: skip
        arrays = [np.asarray(x) for x in inputs]
        for port, x in zip(ports, arrays, strict=True):
            if x.dtype.kind not in "fiub":
                raise ModelError(f"input {port.name!r} holds {x.dtype}, not numbers: convert it to float32")
            if x.ndim != len(port.shape) + 1 or x.shape[1:] != port.shape or len(x) != len(arrays[0]):
                raise ModelError(f"input {port.name!r} has shape {x.shape}, but the model takes (batch, "
                                 f"{', '.join(map(str, port.shape))}), the same batch for every input")  # fmt: skip
        if len(arrays[0]) == 0:
            raise ModelError("the batch is empty: pass at least one row")
        if len(arrays) == 1:
            return np.require(arrays[0], np.float32, ["C", "ALIGNED"])
        return np.concatenate([x.reshape(len(x), -1) for x in arrays], axis=1, dtype=np.float32)

    def _run(self, rows: Array, recorded: list[Recorded] | None = None, logits: bool = False) -> Array:
        batch, step = len(rows), 1 if self._encoder_ops else self.max_batch
        out = np.empty((batch, self._output_size), np.float32)
        x, y = ffi.from_buffer("float[]", rows), ffi.from_buffer("float[]", out)
        context = self._context()
        context[1].position *= self._goes_on  # rows of a language model are one text
        try:
            for first in range(0, batch, step):
                count = min(step, batch - first)
                at = x + first * self._input_size, y + first * self._output_size
                context[1].source = 0
                if recorded is None:
                    lib.forward_rows(context[1], *at, count)
                else:
                    recorded.append(self._recording(context[1], *at, count, logits))
                if context[1].status:
                    raise ModelError(f"{self.package.path}: {spec.error_text(context[1].status)}", context[1].status)
            self.package.check_unchanged()
        finally:
            self._contexts.append(context)
        return out

    def _recording(self, context: Any, x: Any, y: Any, count: int, logits: bool) -> Recorded:
        """A forward of `count` rows with the choices it made."""
        choices = np.empty(count * sum(tokens * k for tokens, k, _ in self._layers), np.int32)
        floats = sum(tokens * experts for tokens, _, experts in self._layers) if logits else 0
        keys = np.empty(count * floats, np.float32)
        lib.forward_recording(context, x, y, count, ffi.from_buffer("int32_t[]", choices),
                              ffi.from_buffer("float[]", keys) if logits else ffi.NULL)  # fmt: skip
        return Recorded(count, choices, keys)

    def _split(self, out: Array) -> list[Array]:
        parts, at = [], 0
        for port in self.outputs:
            size = prod(port.shape)
            part = out if size == self._output_size else np.ascontiguousarray(out[:, at : at + size])
            parts.append(part.reshape(len(out), *port.shape))
            at += size
        return parts


@dataclass(frozen=True)
class Recorded:
    """What one forward of `rows` rows left: the layers' choices one after another, and their logits where asked."""

    rows: int
    choices: np.ndarray[Any, np.dtype[np.int32]]
    logits: Array


class _Pool:
    """Worker threads of one model; while one call uses them, others run on their own thread alone."""

    def __init__(self, threads: int) -> None:
        self.memory = ffi.new("colibri_pool_t *")
        self.threads = int(lib.colibri_pool_start(self.memory, threads))
        self._end = weakref.finalize(self, lib.colibri_pool_stop, self.memory)


def opened(path: str | Path | bytes, most_work: int | None = None) -> Package:
    """A model.bin, the directory of an export, or a model's bytes as a package.

    Raises ModelError, also where a row may take more than `most_work` elementary steps.
    """
    if not isinstance(path, bytes):
        package = open_package(path)
    elif len(path) < spec.HEADER.bytes:
        raise ModelError(f"{len(path)} bytes are fewer than a model's header", spec.error_code("TRUNCATED"))
    else:
        memory = aligned(len(path), spec.ALIGN_MODEL)
        memory[:] = np.frombuffer(path, np.uint8)
        package = parse(memory, "model")
    work = int(package.header["worst_work"])
    if most_work is not None and work > most_work:
        raise ModelError(f"{package.path}: a row takes up to {work:,} steps, more than the {most_work:,} allowed")
    return package


def load(
    path: str | Path | bytes,
    verify: bool | None = None,
    kernels: str | None = None,
    threads: int = 1,
    most_work: int | None = None,
) -> Model:
    """Load a model.bin, the directory of an export, or a model's bytes.

    Its structure is always proven, and what runs is a copy that no file backs; only the weights of files above 64 MB
    are mapped. A call raises ModelError where such a file is changed meanwhile: replace model files by renaming.
    `verify` checks the weights' checksums too, which reads the whole file; None: files up to 256 MB. `kernels` names
    the instruction set to use instead of the best, one of `KERNELS`. `threads` may share the work of one call; 0 means
    one a processor. The bits are the same whatever is chosen. `most_work` limits the elementary steps a row may take,
    for files from elsewhere: see `worst_work` in docs/format.md. Raises ModelError for what is not a sound model.
    """
    return Model(opened(path, most_work), verify, kernels, threads)
