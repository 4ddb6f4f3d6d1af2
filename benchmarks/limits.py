"""The machine's limits, by limits.c: what every time in the results is compared with."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from adapters.base import compile_c
from environment import BUILD, ROOT, caches

_SAMPLES = 21


def measure() -> dict[str, Any]:
    """Read bandwidth in GB/s by level, and 10^9 multiply-accumulates a second, each by number of threads.

    `unmeasured` holds the reason where limits.c does not know this processor.
    """
    program = compile_c(BUILD / "limits", [ROOT / "benchmarks" / "limits.c"], ["-O3", "-march=native", "-pthread"], [])
    sizes = [str(caches().get(level, 0)) for level in ("L1", "L2", "L3")]
    done = subprocess.run([program, *sizes, str(_SAMPLES)], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"unmeasured": done.stderr.strip()}
    samples = json.loads(done.stdout)
    best = {(s["name"], str(s["threads"])): s["best"] for s in samples}

    def by_threads(*names: str) -> dict[str, float]:
        return {t: max(best[n, t] for n in names) for t in ("1", "2") if (names[0], t) in best}

    return {
        "read_gbs": {
            **{level: rates for level in ("L1", "L2", "L3") if (rates := by_threads(level))},
            "DRAM": by_threads("DRAM", "DRAM streams"),
        },
        "fp32_fused_gmacs": by_threads("fp32 fused"),
        "fp32_separate_gmacs": by_threads("fp32 multiply add"),
        "int8_gmacs": by_threads("int8"),
        "int8_paired_gmacs": by_threads("int8 paired"),
        "samples": samples,
    }
