"""Which functions a forecast's instructions are in: the emulator's log of every instruction, sorted by symbol."""

from __future__ import annotations

import bisect
import collections
import re
import subprocess
from pathlib import Path


def by_function(image: Path, command: tuple[str, ...], nm: str) -> dict[str, int]:
    """Instructions of the mean forecast by the function they are in, inlined ones being their caller's; most first.

    The image is the harness's; `command` is the emulator's up to the image. Every instruction leaves a line in a log,
    so the image should have few rows.
    """
    log = image.with_suffix(".log")
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", version)
    single = (
        ["-singlestep"] if found and (int(found[1]), int(found[2])) < (8, 1) else ["-accel", "tcg,one-insn-per-tb=on"]
    )
    subprocess.run([*command, str(image), *single, "-d", "exec,nochain", "-D", str(log)], check=True, timeout=300,
                   capture_output=True, stdin=subprocess.DEVNULL)  # fmt: skip
    listed = subprocess.run([nm, str(image)], capture_output=True, text=True, check=True).stdout
    functions = sorted((int(at, 16) & ~1, name) for at, name in re.findall(r"^(\w+) [tTwW] ([^$\s]+)$", listed, re.M))
    starts = [at for at, _ in functions]
    where = {name: at for at, name in functions}
    counted: collections.Counter[str] = collections.Counter()
    forecasts, inside = 0, False
    with log.open(encoding="utf-8") as lines:
        for line in lines:
            at = re.match(r"Trace \d+: \S+ \[\w+/(\w+)/", line)
            if at is None:
                continue
            pc = int(at[1], 16)
            if pc == where["peer_forecast"]:
                inside, forecasts = True, forecasts + 1
            elif pc == where["board_clock"]:  # the harness reads it before and after
                inside = False
            if inside:
                counted[functions[bisect.bisect_right(starts, pc) - 1][1]] += 1
    log.unlink()
    if not forecasts:
        raise SystemExit(f"{command[0]} did not log what {image} executes")
    return {name: round(n / forecasts) for name, n in counted.most_common()}
