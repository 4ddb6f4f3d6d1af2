"""What pointers through rings save against copying activations to the experts and back.

    python -m benchmarks.ring [--write]

Cachegrind (valgrind) counts the data references and the misses of a simulated cache of 32 KB and 8 MB; the time is this
machine's. `--write` puts the table into docs/memory.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common.environment import ROOT
from benchmarks.common.tables import write_between

SHAPES = [(1, 256), (1, 2048), (16, 256), (16, 2048), (128, 256), (128, 2048)]
K = 2
CACHES = ("--D1=32768,8,64", "--LL=8388608,16,64")


def counts(binary: Path, kind: str, tokens: int, width: int) -> tuple[int, int]:
    """Data references and first-level misses of a round."""
    found = []
    for rounds in (2, 12):  # the difference leaves out the start
        command = ["valgrind", "--tool=cachegrind", "--cache-sim=yes", "--cachegrind-out-file=/dev/null", *CACHES,
                   binary, kind, str(tokens), str(width), str(rounds)]  # fmt: skip
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        found.append([int(re.search(rf"{name}:\s+([\d,]+)", text)[1].replace(",", ""))  # type: ignore[index]
                      for name in (r"D +refs", r"D1 +misses")])  # fmt: skip
    return (found[1][0] - found[0][0]) // 10, max(0, found[1][1] - found[0][1]) // 10


def nanoseconds(binary: Path, kind: str, tokens: int, width: int) -> float:
    """The least of nine: what else runs on the machine only adds."""
    rounds = str(max(20, 20_000_000 // (tokens * width * K)))
    command = [binary, kind, str(tokens), str(width), rounds]
    return min(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(9))


def table() -> str:
    """One line a shape."""
    lines = [
        "| tokens | width | bytes copied: copies / pointers | data references | first-level misses | time |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "ring"
        source = Path(__file__).with_name("ring.c")
        subprocess.run(["cc", "-O2", "-std=c11", f"-I{ROOT / 'engine/include'}", source, "-o", binary], check=True)
        for tokens, width in SHAPES:
            copies, pointers = (counts(binary, kind, tokens, width) for kind in ("copies", "pointers"))
            times = [nanoseconds(binary, kind, tokens, width) for kind in ("copies", "pointers", "work")]
            copied, passed = 2 * tokens * K * width * 4, tokens * K * (8 + 16)
            lines.append(
                f"| {tokens} | {width} | {copied:,} / {passed:,} | {copies[0]:,} / {pointers[0]:,} "
                f"| {copies[1]:,} / {pointers[1]:,} | {times[0] / 1e3:.2f} / {times[1] / 1e3:.2f} µs "
                f"(work alone {times[2] / 1e3:.2f}) |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    text = table()
    print(text)
    if "--write" in sys.argv[1:]:
        write_between(ROOT / "docs" / "memory.md", "ring", text)
