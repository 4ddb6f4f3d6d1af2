"""Arithmetic mode of this thread: another library may make it flush denormals, or round otherwise than to nearest.

The engine sets and restores the processor's control word by itself (engine/src/core/arithmetic.h); here the same is
done for what NumPy computes of a model. Threads and processes that are started meanwhile inherit it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from colibri._engine import lib
from colibri.errors import ModelError
from colibri.format import spec


@contextmanager
def standard() -> Iterator[None]:
    """Compute with IEEE 754 defaults, independent of the thread's control word; also a decorator.

    Raises ModelError where this machine cannot.
    """
    found = lib.arithmetic_standard()
    try:
        if not lib.arithmetic_sound():
            error = spec.error_code("ARITHMETIC")
            raise ModelError(spec.error_text(error), error)
        yield
    finally:
        lib.arithmetic_restore(found)
