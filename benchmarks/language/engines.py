"""Colibri and its peer behind the same few calls: append tokens, start over, how much memory it should take.

Both give the logits of the last token to Python; what a call costs there is microseconds of milliseconds.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

_CHUNK = 512  # tokens the peer takes at once, its default
_AROUND = 1 << 16  # bytes the kernel maps around a page that is touched


class Colibri:
    """`colibri.load` as it comes, but for the checksums, which a file of this size is not checked for anyway."""

    name = "colibri"

    def imports(self) -> None:
        """Import the library."""
        import colibri

        self._colibri = colibri

    def load(self, path: Path, threads: int, context: int, cache: str) -> None:
        """Map the model; the file says how long its context is and how it is kept."""
        self._model: Any = self._colibri.load(path, verify=False, threads=threads)

    @property
    def vocabulary(self) -> int:
        """Of the model."""
        return int(self._model.vocabulary)

    @property
    def kernels(self) -> str:
        """The instructions it uses."""
        return str(self._model.kernels)

    def reset(self) -> None:
        """Start a new text."""
        self._model.reset()

    def append(self, ids: list[int]) -> Any:
        """The logits that follow the last of the tokens."""
        return self._model.evaluate(ids)

    def active_bytes(self) -> int:
        """Of weights that a token reads, by the file's header."""
        return int(self._model.package.header["worst_bytes"])

    def should_take(self, ids: list[int]) -> dict[str, int]:
        """Bytes of weights that the text `ids` touches, and of the context.

        Experts never chosen and rows never looked up are not touched; of a row, 64 KB are mapped around it.
        """
        package, touched = self._model.package, 0
        rows = [[n] for n in ids]
        for layer, chosen in zip(package.layers, self._model.routes(rows), strict=True):
            first = int(layer["first_expert"])
            sizes = {int(e["index"]): int(e["bytes"]) for e in package.experts[first : first + int(layer["experts"])]}
            touched += sum(sizes[int(n)] for n in {*chosen.ravel().tolist()} if n >= 0)
        experts_of_a_token = sum(int(layer["k"]) * int(package.experts[int(layer["first_expert"])]["bytes"])
                                 for layer in package.layers)  # fmt: skip
        shared = self.active_bytes() - experts_of_a_token  # as far as every token reads it
        table = int(package.header["shared_bytes"]) - shared
        row = table / self.vocabulary
        looked_up = min(table, len({int(n * row) // _AROUND for n in ids}) * _AROUND)
        return {"weights": touched + shared + looked_up, "context": int(self._model.context_bytes)}


class LlamaCpp:
    """llama.cpp by its C interface, its defaults but for the number of threads and the context."""

    name = "llama.cpp"
    kernels = "its own choice"

    def imports(self) -> None:
        """Import the library."""
        from llama_cpp import llama_cpp

        self._c = llama_cpp
        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        self._silent = silent

    def load(self, path: Path, threads: int, context: int, cache: str) -> None:
        """Load the model; weights are mapped, or copied in another order where it has faster kernels for that."""
        c = self._c
        c.llama_backend_init()
        self._loaded = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
        if not self._loaded:
            raise RuntimeError(f"llama.cpp cannot load {path.name}")
        options = c.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_threads, options.n_threads_batch = context, _CHUNK, threads, threads
        options.n_ubatch = _CHUNK
        kinds = {"fp32": c.GGML_TYPE_F32, "fp16": c.GGML_TYPE_F16, "int8": c.GGML_TYPE_Q8_0}
        options.type_k = options.type_v = kinds[cache]
        self._context = c.llama_init_from_model(self._loaded, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context for {path.name}")
        self._memory = c.llama_get_memory(self._context)
        self._size = int(c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._loaded)))

    @property
    def vocabulary(self) -> int:
        """Of the model."""
        return self._size

    def reset(self) -> None:
        """Start a new text."""
        self._c.llama_memory_clear(self._memory, False)

    def append(self, ids: list[int]) -> Any:
        """The logits that follow the last of the tokens."""
        for first in range(0, len(ids), _CHUNK):
            part = ids[first : first + _CHUNK]
            tokens = (ctypes.c_int32 * len(part))(*part)
            if self._c.llama_decode(self._context, self._c.llama_batch_get_one(tokens, len(part))):
                raise RuntimeError("llama_decode failed")
        return self._c.llama_get_logits_ith(self._context, -1)

    def all_logits(self, ids: list[int]) -> Any:
        """The logits (n, vocabulary) that follow each of the tokens, of a text from its beginning."""
        import numpy as np

        self.reset()
        found = []
        batch = self._c.llama_batch_init(_CHUNK, 0, 1)
        for first in range(0, len(ids), _CHUNK):
            part = ids[first : first + _CHUNK]
            batch.n_tokens = len(part)
            for n, token in enumerate(part):
                batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, first + n, 1
                batch.seq_id[n][0], batch.logits[n] = 0, 1
            if self._c.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            rows = self._c.llama_get_logits(self._context)
            found.append(np.ctypeslib.as_array(rows, (len(part) * self._size,)).reshape(len(part), -1).copy())
        self._c.llama_batch_free(batch)
        return np.concatenate(found)

    def free(self) -> None:
        """Give everything back."""
        self._c.llama_free(self._context)
        self._c.llama_model_free(self._loaded)


ENGINES: dict[str, type[Colibri] | type[LlamaCpp]] = {e.name: e for e in (Colibri, LlamaCpp)}
