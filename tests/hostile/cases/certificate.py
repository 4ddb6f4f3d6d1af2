"""Certificate: golden rows that lie, and none."""

from __future__ import annotations

from tests.hostile.cases.table import NO_CERTIFICATE, U32, Count, of, table


def _flipped(path: str, bit: int = 0) -> Count:
    return lambda e: int(e[path]) ^ 1 << bit


ROWS = {"first": 0, "second": 1, "last": 7}
CASES = [
    *table(
        "top2_shared",
        *((f"certificate with another {what} in its {name} row", "SELFTEST",
           {f"golden[{n}].{field}": _flipped(f"golden[{n}].{field}", bit)})
          for what, field, bit in (("choice", "chosen[0]", 0), ("digest", "output_crc", 0), ("input", "input[0]", 24))
          for name, n in ROWS.items()),
        *((f"certificate of {n} choices", "HEADER", {"golden.choices": n}) for n in (0, 1 << 31, U32)),
        ("certificate of a choice less", "HEADER", {"golden.choices": of("golden.choices", -1)}),
        ("certificate of a choice more", "HEADER", {"golden.choices": of("golden.choices", 1)}),
    ),
    *table("top1", ("no certificate", "SELFTEST", NO_CERTIFICATE)),
]  # fmt: skip
