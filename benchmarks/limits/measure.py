"""The machine's limits, by limits.c: what every time in the results is compared with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.common.compiling import compile_c
from benchmarks.common.environment import BUILD, caches

_SAMPLES = 21


def measure(samples: int = _SAMPLES) -> dict[str, Any]:
    """`samples` of reading (GB/s) and arithmetic (10^9 multiply-accumulates a second), as limits.c prints them.

    `unmeasured` holds the reason where limits.c does not know this processor.
    """
    source = Path(__file__).with_name("limits.c")
    program = compile_c(BUILD / "limits", [source], ["-O3", "-march=native", "-pthread"], [])
    sizes = [str(caches().get(level, 0)) for level in ("L1", "L2", "L3")]
    done = subprocess.run([program, *sizes, str(samples)], capture_output=True, text=True, check=False)
    return {"unmeasured": done.stderr.strip()} if done.returncode else {"samples": json.loads(done.stdout)}
