"""Contexts driven straight through the C functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri._engine import ffi, lib
from colibri.runtime import engine
from tests.hostile.editor import image


def aligned(data: bytes) -> Any:
    memory = engine.aligned(max(1, len(data)), 64)
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    return memory


def pointer(memory: Any) -> Any:
    return ffi.from_buffer("uint8_t[]", memory)


@dataclass
class Session:
    """A context with its memory, driven straight through the C functions."""

    model: Any
    memory: Any
    ctx: Any

    @staticmethod
    def of(base: str) -> Session:
        model = aligned(image(base))
        memory = engine.aligned(int(lib.colibri_model_size(pointer(model))), 64)
        ctx = lib.colibri_init(pointer(memory), len(memory), pointer(model))
        assert ctx != ffi.NULL
        return Session(model, memory, ctx)
