"""Qwen3-30B-A3B's shape in int4, some 17 GB, decoded with enough memory and with too little of it.

    python -m benchmarks.language.larger --export --publish     exports it where it is missing
    python -m benchmarks.language.larger --quick --export       two layers

Needs root, to make a memory control group. The machine must be quiet, and its disk is what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.common.control_group import limited
from benchmarks.language.home import FILES, ROOT, enter, require_quiet, save
from benchmarks.language.page import publish
from benchmarks.language.processes import drop, warm
from benchmarks.language.synthetic import DISK, exported

CONTEXT = 1024
THREADS = 2
WAYS = {"faults": 0, "announced, 1 thread": 1, "announced, 2 threads": 2}
LIMITS = {"qwen3-30b": (12_000, 8_000), "qwen3-2": (600,)}  # MB; beside them everything the machine has


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.language.larger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="two layers")
    parser.add_argument("--export", action="store_true", help="export the model where it is missing")
    parser.add_argument("--limits", nargs="+", type=int, metavar="MB", help="of memory; by default 12000 8000")
    parser.add_argument("--fill", type=int, help="tokens before those that count (32)")
    parser.add_argument("--tokens", type=int, help="tokens that count (24)")
    parser.add_argument("--rounds", type=int, help="2")
    parser.add_argument("--disk", type=float, default=DISK, help="GB of models at a time; the oldest are deleted")
    parser.add_argument("--loaded", action="store_true", help="measure although other work runs beside")
    parser.add_argument("--publish", action="store_true", help="write docs/language-performance.md")
    args = parser.parse_args()
    enter()
    shape = "qwen3-2" if args.quick else "qwen3-30b"
    path = FILES / f"{shape}-int4-fp16-{CONTEXT}.bin"
    if not path.exists() and not args.export:
        raise SystemExit(f"{path.name} is missing: export it with --export")
    require_quiet(args.loaded)
    load = os.getloadavg()[0]
    exported(shape, "int4", "fp16", CONTEXT, disk=args.disk)
    fill, tokens, rounds = (8, 8, 1) if args.quick else (32, 24, 2)
    chosen = (args.fill or fill, args.tokens or tokens, args.rounds or rounds)
    save("larger", {**measure(shape, path, args.limits or LIMITS[shape], *chosen), "load": load})
    print(publish(args.publish))


def measure(shape: str, path: Path, limits: tuple[int, ...], fill: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Every limit and way in turn."""
    driver, rows, digests = _driver(), [], set()
    for megabytes in (None, *limits):
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, threads in WAYS.items():
                done = _run(driver, path, megabytes, [THREADS, fill, tokens, threads])
                found[way].append(done)
                digests.add(done["digest"])
                print(f"  {megabytes or 'all'} MB, {way}: {done['tokens'] / done['seconds']:.2f} tokens/s, "
                      f"{done['read'] / done['tokens'] / 1e6:.0f} MB a token", flush=True)  # fmt: skip
        for way, runs in found.items():
            rates = sorted(r["tokens"] / r["seconds"] for r in runs)
            rows.append({
                "limit": f"{megabytes / 1000:g} GB" if megabytes else "as much as there is", "policy": way,
                "tokens_s": statistics.median(rates), "slowest": rates[0], "fastest": rates[-1],
                "read": statistics.median(r["read"] / r["tokens"] for r in runs), "runs": runs,
            })  # fmt: skip
    if len(digests) != 1:
        raise SystemExit("ways of reading gave different bits")
    name = "Two layers of Qwen3-30B-A3B's shape" if shape.endswith("-2") else "Qwen3-30B-A3B's shape"
    return {"shape": name, "bytes": path.stat().st_size, "threads": THREADS, "tokens": tokens, "fill": fill,
            "rounds": rounds, "rows": rows}  # fmt: skip


def _driver() -> Path:
    """larger.c with the engine and the host layer."""
    engine, program = ROOT / "engine", FILES / "larger"
    subprocess.run(["make", "-s", "-C", engine, f"BUILD={FILES / 'engine'}"], check=True)
    libraries = [FILES / "engine" / f"{name}.a" for name in ("libcolibri_host", "libcolibri_lm", "libcolibri")]
    sources = [Path(__file__).with_name("larger.c"), *(x for x in libraries if x.exists())]
    subprocess.run(["cc", "-O2", "-std=gnu11", "-pthread", f"-I{engine / 'include'}", *sources, "-lm", "-o", program],
                   check=True)  # fmt: skip
    return program


def _run(driver: Path, path: Path, megabytes: int | None, numbers: list[int]) -> dict[str, Any]:
    """One run: from a cold page cache where memory is limited (pages count for the group that read them), else warm."""
    (warm if megabytes is None else drop)(path)
    with nullcontext() if megabytes is None else limited(megabytes) as join:
        done = subprocess.run([driver, path, *map(str, numbers)], capture_output=True, text=True, check=False,
                              preexec_fn=join)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"larger: status {done.returncode}: {done.stderr.strip()}")
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    main()
