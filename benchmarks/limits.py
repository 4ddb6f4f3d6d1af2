"""The machine's limits, by limits.c: what every time in the results is compared with."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from adapters.base import compile_c
from environment import BUILD, ROOT, caches

_SAMPLES = 21


def measure(samples: int = _SAMPLES) -> dict[str, Any]:
    """`samples` of reading (GB/s) and arithmetic (10^9 multiply-accumulates a second), as limits.c prints them.

    `unmeasured` holds the reason where limits.c does not know this processor.
    """
    program = compile_c(BUILD / "limits", [ROOT / "benchmarks" / "limits.c"], ["-O3", "-march=native", "-pthread"], [])
    sizes = [str(caches().get(level, 0)) for level in ("L1", "L2", "L3")]
    done = subprocess.run([program, *sizes, str(samples)], capture_output=True, text=True, check=False)
    return {"unmeasured": done.stderr.strip()} if done.returncode else {"samples": json.loads(done.stdout)}
