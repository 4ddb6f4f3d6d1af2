"""Misuse of the C functions: wrong batches, null pointers, memory that is too small or not aligned."""

from __future__ import annotations

import numpy as np
import pytest

from colibri._engine import ffi, lib
from colibri.format import spec
from colibri.runtime import engine
from tests.hostile.contexts import Session, aligned, pointer
from tests.hostile.driver import E
from tests.hostile.editor import BATCH, image


@pytest.mark.parametrize(
    ("batch", "code"),
    [(0, "BATCH"), (-1, "BATCH"), (-(1 << 31), "BATCH"), (BATCH + 1, "BATCH"), ((1 << 31) - 1, "BATCH"), (BATCH, "OK")],
)
def test_forward_refuses_a_batch_it_cannot_run(batch: int, code: str) -> None:
    s = Session.of("dense")
    x, y = np.ones((BATCH, 9), np.float32), np.full((BATCH, 3), -7.0, np.float32)
    before = bytes(s.memory[128:])
    lib.colibri_forward(s.ctx, ffi.from_buffer("float[]", x), ffi.from_buffer("float[]", y), batch)
    assert s.ctx.status == E[code]
    assert (y == -7.0).all() == (code != "OK")
    assert (bytes(s.memory[128:]) == before) == (code != "OK")
    lib.colibri_forward(s.ctx, ffi.from_buffer("float[]", x), ffi.from_buffer("float[]", y), 1)
    assert s.ctx.status == E["OK"], "a context goes on after misuse"


@pytest.mark.parametrize(("has_input", "has_output"), [(False, True), (True, False), (False, False)])
def test_forward_refuses_null_and_leaves_the_output(has_input: bool, has_output: bool) -> None:
    s = Session.of("dense")
    x, y = np.ones((BATCH, 9), np.float32), np.full((BATCH, 3), -7.0, np.float32)
    lib.colibri_forward(
        s.ctx,
        ffi.from_buffer("float[]", x) if has_input else ffi.NULL,
        ffi.from_buffer("float[]", y) if has_output else ffi.NULL,
        1,
    )
    assert s.ctx.status == E["NULL"]
    assert (y == -7.0).all()


def test_null_and_freed_contexts_do_nothing() -> None:
    s = Session.of("dense")
    x, y = np.ones((BATCH, 9), np.float32), np.full((BATCH, 3), -7.0, np.float32)
    scratch = ffi.from_buffer("float[]", y)
    lib.colibri_free(ffi.NULL)
    lib.colibri_forward(ffi.NULL, ffi.from_buffer("float[]", x), scratch, 1)
    assert lib.colibri_selftest(ffi.NULL, scratch) == E["NULL"]
    assert lib.colibri_selftest(s.ctx, ffi.NULL) == E["NULL"]
    lib.colibri_free(s.ctx)
    before = bytes(s.memory)
    lib.colibri_forward(s.ctx, ffi.from_buffer("float[]", x), scratch, 1)
    lib.colibri_forward(s.ctx, ffi.NULL, ffi.NULL, 99)
    lib.colibri_free(s.ctx)
    assert lib.colibri_selftest(s.ctx, scratch) == E["NULL"]
    assert bytes(s.memory) == before
    assert (y == -7.0).all()


@pytest.mark.parametrize(
    ("shift", "size", "code"),
    [
        (0, 0, "OK"),
        (0, -1, "MEMORY"),
        (0, None, "MEMORY"),
        (1, 0, "MISALIGNED"),
        (4, 0, "MISALIGNED"),
        (32, 0, "MISALIGNED"),
        (None, 0, "NULL"),
    ],
)
def test_init_names_what_is_wrong_with_the_memory(shift: int | None, size: int | None, code: str) -> None:
    model = aligned(image("top1"))
    need = int(lib.colibri_model_size(pointer(model)))
    block = engine.aligned(need + 64, 64)
    block[:] = 0x5A
    at = ffi.NULL if shift is None else pointer(block) + shift
    given = 0 if size is None else need + size
    assert lib.colibri_diagnose(at, given, pointer(model)) == E[code]
    ctx = lib.colibri_init(at, given, pointer(model))
    assert (ctx == ffi.NULL) == (code != "OK")
    assert (block == 0x5A).all() == (code != "OK"), "a refused block is left untouched"


@pytest.mark.parametrize(
    ("shift", "code"), [(1, "MISALIGNED"), (8, "MISALIGNED"), (32, "MISALIGNED"), (None, "NULL"), (0, "OK")]
)
def test_every_function_names_what_is_wrong_with_the_model_pointer(shift: int | None, code: str) -> None:
    data = image("top1")
    room = aligned(data + bytes(64))
    if shift:
        room[shift : shift + len(data)] = np.frombuffer(data, np.uint8)
    at = ffi.NULL if shift is None else pointer(room) + shift
    memory = engine.aligned(1 << 16, 64)
    assert lib.colibri_check(at, len(data), lib.COLIBRI_CHECK_WEIGHTS) == E[code]
    assert lib.colibri_check(at, len(data), lib.COLIBRI_CHECK_STRUCTURE) == E[code]
    assert lib.colibri_diagnose(pointer(memory), len(memory), at) == E[code]
    assert (lib.colibri_init(pointer(memory), len(memory), at) == ffi.NULL) == (code != "OK")
    assert (lib.colibri_model_size(at) == 0) == (code != "OK")
    assert lib.colibri_get_num_experts(at) == (4 if code == "OK" else -E[code])


@pytest.mark.parametrize("code", [*range(len(spec.ERRORS)), -1, len(spec.ERRORS), 1 << 30, -(1 << 31), (1 << 31) - 1])
def test_error_texts_are_the_tables_and_never_missing(code: int) -> None:
    name, text = (ffi.string(f(code)).decode() for f in (lib.colibri_error_name, lib.colibri_error_text))
    if 0 <= code < len(spec.ERRORS):
        assert f"{name}: {text}" == spec.error_text(code)
    else:
        assert name == "COLIBRI_ERR_UNKNOWN" and text
