"""What routing a token costs beyond the product that made its logits, for 8 to 512 experts.

    python -m benchmarks.routing

Needs a C compiler and make. The least of many rounds of 256 tokens each: a neighbour's noise only adds.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from benchmarks.common.environment import ROOT

ENGINE = ROOT / "engine"
KINDS = {"s": "softmax over all, renormalised", "l": "softmax of the chosen", "g": "sigmoid, bias, 4 groups"}
EXPERTS = (8, 16, 32, 64, 128, 256, 512)


def main() -> None:
    """Print a table of nanoseconds."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "routing"
        subprocess.run(["make", "-s", "-C", ENGINE, f"BUILD={folder}"], check=True)
        flags = ["-O2", "-std=gnu11", "-ffp-contract=off", f"-I{ENGINE / 'include'}", f"-I{ENGINE / 'src'}"]
        sources = [Path(__file__).with_name("routing.c"), Path(folder) / "libcolibri.a", "-lm"]
        subprocess.run(["cc", *flags, *sources, "-o", program], check=True)
        print("| ns a token | k | " + " | ".join(f"{n} experts" for n in EXPERTS) + " |")
        print("|---|---:|" + "---:|" * len(EXPERTS))
        for k in (2, 8):
            for kind, about in KINDS.items():
                runs = [[program, str(n), str(k), kind] for n in EXPERTS]
                times = [float(subprocess.run(r, capture_output=True, text=True, check=True).stdout) for r in runs]
                print(f"| {about} | {k} | " + " | ".join(f"{t:,.0f}" for t in times) + " |")


if __name__ == "__main__":
    main()
