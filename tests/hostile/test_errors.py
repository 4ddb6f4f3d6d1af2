"""Every error code has been seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from colibri._engine import ffi, lib
from colibri.errors import ModelError
from colibri.format import spec
from colibri.runtime import engine
from tests.hostile.cases import CASES
from tests.hostile.contexts import Session, aligned, pointer
from tests.hostile.editor import BATCH, flipped_weight, image, sealed


def check_of(data: bytes) -> int:
    memory = aligned(data)
    return int(lib.colibri_check(pointer(memory), len(data), lib.COLIBRI_CHECK_WEIGHTS))


def refusal(name: str) -> int:
    return check_of(sealed(CASES[name].edited().image))


def selftest_of_a_lie() -> int:
    try:
        engine.load(sealed(CASES["certificate with another digest in its first row"].edited().image)).selftest()
    except ModelError as error:
        return int(error.code or 0)
    return 0


def status_of_forward(s: Session, batch: int = 1) -> int:
    x, y = np.ones((BATCH, 10), np.float32), np.ones((BATCH, 3), np.float32)
    lib.colibri_forward(s.ctx, ffi.from_buffer("float[]", x), ffi.from_buffer("float[]", y), batch)
    return int(s.ctx.status)


def status_of_batch(batch: int) -> int:
    return status_of_forward(Session.of("dense"), batch)


def status_of_another_size() -> int:
    s = Session.of("dense")
    s.ctx.input_size += 1
    return status_of_forward(s)


def status_of_a_running_context() -> int:
    s = Session.of("dense")
    s.ctx.busy = 1
    return status_of_forward(s)


def selftest_amid_a_text() -> int:
    s = Session.of("text")
    s.ctx.position = 1
    return int(lib.colibri_selftest(s.ctx, ffi.new("float[]", int(s.ctx.output_size))))


def diagnosis(shift: int, size: int) -> int:
    model, memory = aligned(image("top1")), engine.aligned(1 << 16, 64)
    return int(lib.colibri_diagnose(pointer(memory) + shift, size, pointer(model)))


OPTIONAL_TESTS = [Path(__file__).resolve().parents[1] / layer for layer in ("host", "lm", "text")]
PROVOKED: dict[str, Callable[[], int]] = {
    "OK": lambda: check_of(image("top1")),
    "NULL": lambda: int(lib.colibri_check(ffi.NULL, 0, lib.COLIBRI_CHECK_STRUCTURE)),
    "MISALIGNED": lambda: diagnosis(32, 1 << 15),
    "MAGIC": lambda: check_of(b"X" * 512),
    "VERSION": lambda: check_of(image("top1")[:8] + b"\xff" + image("top1")[9:]),
    "TRUNCATED": lambda: check_of(image("top1")[:-1]),
    "HEADER": lambda: refusal("header inputs 0"),
    "CHECKSUM": lambda: check_of(flipped_weight(image("top1"))),
    "PROGRAM": lambda: refusal("workspace unaligned"),
    "TENSOR": lambda: refusal("header shared_bytes 0"),
    "ROUTING": lambda: refusal("header layers_offset at the experts"),
    "EXPERT": lambda: refusal("expert off its alignment"),
    "MEMORY": lambda: diagnosis(0, 128),
    "TOO_LARGE": lambda: refusal("header total_bytes 18446744073709551615"),
    "BATCH": lambda: status_of_batch(0),
    "SELFTEST": selftest_of_a_lie,
    "ORDER": lambda: refusal("copy shifted onto itself"),
    "DAMAGED": status_of_another_size,
    "BUSY": status_of_a_running_context,
    "UNFINISHED": selftest_amid_a_text,
}
# One needs a big-endian machine, the other a build that computes otherwise: tests/engine/test_arithmetic.py.
NOT_HERE = {"BIG_ENDIAN", "ARITHMETIC"}


@pytest.mark.parametrize("name", [name for name, _ in spec.ERRORS if name not in NOT_HERE])
def test_every_error_can_be_provoked(name: str) -> None:
    if name in PROVOKED:
        assert spec.ERRORS[PROVOKED[name]()][0] == name
    else:  # of the host layer or the tokenizer, which have libraries and tests of their own
        tests = [path for folder in OPTIONAL_TESTS for path in folder.glob("test_*.py")]
        provoked = "".join(path.read_text(encoding="utf-8") for path in tests)
        assert re.search(rf'== \(*"{name}"|, "{name}"|"OK", "{name}"|!= COLIBRI_ERR_{name}\b', provoked), (
            f"no test provokes COLIBRI_ERR_{name}: add the way to PROVOKED, or a test to tests/host, lm or text"
        )
