"""Ports: the shapes of inputs and outputs."""

from __future__ import annotations

from tests.hostile.cases.table import NO_CERTIFICATE, U32, of, table, values

CASES = [
    *values(
        "top2_shared",
        ("ports.rank", "HEADER", 0, 7, U32),
        ("ports.dims", "HEADER", 0, 1 << 16, 1 << 31),
        ("ports.floats", "HEADER", 0, U32),
    ),
    *table(
        "top2_shared",
        ("two ports of one model too long", "HEADER", {"ports[1].floats": of("ports[1].floats", 1)}),
    ),
    *table(
        "text",
        # colibri_lm_evaluate, which hands over one number a token, must not be fooled.
        ("tokens of two numbers", "OK", {
            "header.input_floats": 2, **NO_CERTIFICATE, "ports.floats": 2, "ports.dims[0]": 2,
            "embed.a.sample_stride": 2}),
    ),
]  # fmt: skip
