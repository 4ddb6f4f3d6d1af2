"""The C tokenizer through ctypes, in a shared library built for the tests."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from colibri.format import spec
from colibri.runtime import engine
from tools import size

TEMPLATE, SPECIAL, SKIP_SPECIAL, CONTINUE = 1, 2, 4, 8


def load(folder: Path) -> ctypes.CDLL:
    """libcolibri_lm.a, which needs nothing else, as a shared library."""
    archive = size.build(folder / "lm", "gcc", target="libcolibri_lm.a") / "libcolibri_lm.a"
    library = folder / "liblm.so"
    whole = ["-Wl,--whole-archive", archive, "-Wl,--no-whole-archive", "-Wl,--no-undefined"]
    subprocess.run(["gcc", "-shared", "-o", library, *whole], check=True)
    return ctypes.CDLL(str(library))


def name(error: int) -> str:
    return spec.ERRORS[error][0]


class CTokenizer:
    """An open tokenizer.bin."""

    def __init__(self, library: ctypes.CDLL, image: bytes) -> None:
        self.library = library
        library.colibri_tokenizer_scratch.restype = ctypes.c_size_t
        library.colibri_utf8_complete.restype = ctypes.c_size_t
        self.memory = engine.aligned(len(image), 64)
        self.memory[:] = np.frombuffer(image, np.uint8)
        self.handle = (ctypes.c_uint64 * 48)()
        self.error = name(self.open(self.memory.ctypes.data, len(image)))
        self.scratch = np.empty(0, np.uint8)

    def open(self, at: int, size: int) -> int:
        return int(self.library.colibri_tokenizer_open(self.handle, ctypes.c_void_p(at), ctypes.c_size_t(size)))

    def call(self, text: bytes, options: int, room: int, scratch: int | None = None) -> tuple[str, list[int], int]:
        """The error, the ids and the count of one call of colibri_tokenizer_encode."""
        need = int(self.library.colibri_tokenizer_scratch(self.handle, ctypes.c_size_t(len(text))))
        need = need if scratch is None else scratch
        if len(self.scratch) < need:
            self.scratch = np.empty(need, np.uint8)
        ids, count = np.empty(room, np.int32), ctypes.c_size_t()
        at, memory = ids.ctypes.data if room else None, ctypes.c_void_p(self.scratch.ctypes.data)
        error = self.library.colibri_tokenizer_encode(
            self.handle, text, ctypes.c_size_t(len(text)), options, ctypes.c_void_p(at), ctypes.c_size_t(room),
            ctypes.byref(count), memory, ctypes.c_size_t(need),
        )  # fmt: skip
        return name(error), ids[: min(room, count.value)].tolist(), count.value

    def encode(self, text: str | bytes, options: int = 0) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        error, ids, count = self.call(data, options, len(data) + 16)
        if error == "OUTPUT":
            error, ids, count = self.call(data, options, count)
        assert (error, len(ids)) == ("OK", count), (error, text)
        return ids

    def decode(self, ids: Sequence[int], options: int = 0) -> bytes:
        error, out, count = self.call_decode(ids, options, 16 * len(ids) + 64)
        if error == "OUTPUT":
            error, out, _ = self.call_decode(ids, options, count)
        assert error == "OK", error
        return out

    def call_decode(self, ids: Sequence[int], options: int, room: int) -> tuple[str, bytes, int]:
        array, count = np.array(ids, np.int32), ctypes.c_size_t()
        out = ctypes.create_string_buffer(room) if room else None
        error = self.library.colibri_tokenizer_decode(
            self.handle, array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(len(ids)), options, out,
            ctypes.c_size_t(room), ctypes.byref(count),
        )  # fmt: skip
        return name(error), out.raw[: min(room, count.value)] if out is not None else b"", count.value

    def complete(self, data: bytes) -> int:
        return int(self.library.colibri_utf8_complete(data, ctypes.c_size_t(len(data))))


def edited(tokenizer: bytes, **changes: Any) -> bytes:
    """A tokenizer.json with other values for top-level keys."""
    return json.dumps(json.loads(tokenizer) | changes).encode()
