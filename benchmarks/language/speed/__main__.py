"""Speed, start and memory of language models, beside llama.cpp and within this machine's limits.

    python -m benchmarks.language.speed --publish       OLMoE's shape; writes docs/language-performance.md
    python -m benchmarks.language.speed --quick         two layers of it, to see that everything works
    python -m benchmarks.language.speed --report        the page of the results so far

Works with any Python from 3.11: makes its own environment and goes on in there. Colibri and the peer are processes that
are alive together and asked in turn. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.language.gguf_files import active_bytes, random_file
from benchmarks.language.home import Busy, enter, require_quiet, results, save
from benchmarks.language.page import publish
from benchmarks.language.processes import Process, Side, drop, limit, probe, warm
from benchmarks.language.shapes import SHAPES, prefill_macs
from benchmarks.language.synthetic import CONTEXT, DISK, exported

CONTESTS = (("int8", "Q8_0"), ("int4", "Q4_0"), ("int4", "Q4_K"))
THREADS = (1, 2)
PREFILL = (128, 512)
DECODE_AT, DECODE = 64, 32  # position and number of the tokens whose times are taken
NEAR, FAR = 64, 4096
READING = ("DRAM", "DRAM streams")
PEAKS = (("int8 vpdpbusd 512",), ("int8",))  # the first that this machine has
Sides = tuple[Side, Side]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.language.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the two-layer shape, two rounds")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--rounds", type=int, help="5; samples of every figure")
    parser.add_argument("--contests", nargs="+", metavar="FORMAT",
                        help="of the peer, only these: Q8_0 Q4_0 Q4_K; the results of the others are kept")  # fmt: skip
    parser.add_argument("--threads", nargs="+", type=int, default=list(THREADS))
    parser.add_argument("--no-far", action="store_true", help="leave position 4,096 out")
    parser.add_argument("--only-far", action="store_true", help="measure position 4,096 alone")
    parser.add_argument("--disk", type=float, default=DISK, help="GB of models at a time; the oldest are deleted")
    parser.add_argument("--loaded", action="store_true", help="measure although other work runs beside")
    parser.add_argument("--report", action="store_true", help="only write the page of the results so far")
    parser.add_argument(
        "--publish", action="store_true", help="write the page and the results where they are committed"
    )
    args = parser.parse_args()
    enter()
    if not args.report:
        require_quiet(args.loaded)
        args.shape = args.shape or ("olmoe-2" if args.quick else "olmoe")
        measure(args)
    print(publish(args.publish))


def measure(args: argparse.Namespace) -> None:
    """All contests, saved as they come."""
    rounds, turns = args.rounds or (2 if args.quick else 5), 1 if args.quick else 2
    busy, begin = Busy(), time.monotonic()
    data: dict[str, Any] = {"machine": _machine(), "shape": args.shape, "rounds": rounds, "contests": [], "far": []}
    if args.contests:  # the others stay as they were measured before
        data |= {name: results().get("speed", {}).get(name, []) for name in ("contests", "far")}
    for number, (dtype, kind) in enumerate(CONTESTS):
        if args.contests and kind not in args.contests:
            continue
        sides = _files(args.shape, dtype, kind, "fp16", args.disk)
        if not args.only_far:
            _put(data["contests"], contest(args.shape, sides, args.threads, rounds), lambda c: c["kinds"])
        if not args.no_far:
            caches = ["fp16"]
            if number == 0 or CONTESTS[number - 1][0] != dtype:  # once for each of ours
                caches.append("int8")
            for cache in caches:
                pair = sides if cache == "fp16" else _files(args.shape, dtype, kind, cache, args.disk)
                _put(data["far"], far(pair, max(args.threads), turns),
                     lambda f: [(c["kind"], c["cache"]) for c in f["cells"]])  # fmt: skip
        data |= {"busy": busy.result(), "minutes": (time.monotonic() - begin) / 60}
        save("speed", data)


def _put(rows: list[Any], row: Any, key: Callable[[Any], Any]) -> None:
    """Add a row in the place of one measured before, if any."""
    at = next((n for n, old in enumerate(rows) if key(old) == key(row)), len(rows))
    rows[at : at + 1] = [row]


def _machine() -> dict[str, Any]:
    import importlib.metadata

    from benchmarks.common.environment import machine

    found = machine()
    found["versions"] = {n: importlib.metadata.version(n) for n in ("colibri-moe", "llama-cpp-python", "numpy")}
    return found


def _files(shape: str, dtype: str, kind: str, cache: str, disk: float) -> Sides:
    """Both sides' models, made where they are missing, and read once."""
    theirs = random_file(shape, kind, CONTEXT, (), disk)
    ours = exported(shape, dtype, cache, keep=(theirs,), disk=disk)
    for path in (theirs, ours):
        warm(path)
    return Side("colibri", dtype, ours, CONTEXT, cache), Side("llama.cpp", kind, theirs, CONTEXT, cache)


def contest(shape: str, sides: Sides, threads: list[int], rounds: int) -> dict[str, Any]:
    """Decoding and prefill in turn for each number of threads, then starting and memory."""
    config, cells, probes = SHAPES[shape], [], []
    kernels = ""
    for count in threads:
        pair = [Process(side, count) for side in sides]
        drop(sides[1].path)  # where it made a copy in another order, the file's pages only take memory
        kernels = pair[0].ready["kernels"]
        taken: list[dict[str, list[float]]] = [{} for _ in pair]
        for process in pair:  # pages are mapped and pools started before anything counts
            process.ask("prefill", count=PREFILL[0])
        for turn in range(rounds):
            probes.append(probe(3))
            for n in (0, 1) if turn % 2 == 0 else (1, 0):
                ns = pair[n].ask("decode", at=DECODE_AT, count=DECODE, seed=turn)["ns"]
                taken[n].setdefault("decode", []).append(statistics.median(ns) / 1e9)
            for tokens in PREFILL:
                for n in (0, 1) if turn % 2 == 0 else (1, 0):
                    ns = pair[n].ask("prefill", count=tokens, seed=turn)["ns"]
                    taken[n].setdefault(f"prefill {tokens}", []).append(ns / 1e9)
            last = ", ".join(f"{what} {taken[0][what][-1]:.3f} / {taken[1][what][-1]:.3f} s" for what in taken[0])
            print(
                f"  {sides[0].kind} / {sides[1].kind}, {count} threads, round {turn + 1} of {rounds}: {last}",
                flush=True,
            )
        for process in pair:
            process.stop()
        for side, found in zip(sides, taken, strict=True):
            cells.append({"engine": side.engine, "kind": side.kind, "threads": count, "samples": found,
                          "seconds": {what: statistics.median(each) for what, each in found.items()}})  # fmt: skip
    starts = _starts(sides, rounds)
    return {
        "kinds": [side.kind for side in sides], "cells": cells, "starts": starts, "kernels": kernels,
        "bytes": [side.path.stat().st_size for side in sides],
        "active": [_active(sides[0].path), active_bytes(sides[1].path, config)],
        "macs": {str(tokens): prefill_macs(config, tokens) for tokens in PREFILL},
        "reading": {str(t): limit(probes, READING, t) for t in THREADS},
        "peak": {str(t): limit(probes, _peak(probes), t) for t in THREADS}, "peak_name": _peak(probes)[0],
        "probes": probes,
    }  # fmt: skip


def _peak(probes: list[list[dict[str, Any]]]) -> tuple[str, ...]:
    names = {s["name"] for s in probes[0]}
    return next(group for group in PEAKS if names & set(group))


def _active(path: Path) -> int:
    import colibri

    return int(colibri.load(path, verify=False).package.header["worst_bytes"])


def _starts(sides: Sides, rounds: int) -> list[dict[str, Any]]:
    """From starting a process to its first token, in turn, one alive at a time; then its memory."""
    found: list[dict[str, Any]] = [{"engine": side.engine, "process": [], "library": []} for side in sides]
    for turn in range(max(3, rounds)):
        for n in (0, 1) if turn % 2 == 0 else (1, 0):
            warm(sides[n].path)  # the other side may have pushed it out of memory
            process = Process(sides[n], 2, first=True)
            for what, seconds in process.start_times().items():
                found[n][what].append(seconds)
            if turn == 0:
                found[n]["memory"] = process.ask("memory")
            process.stop()
    return found


def far(sides: Sides, threads: int, turns: int) -> dict[str, Any]:
    """Decoding near the beginning and far from it: `turns` texts for each figure."""
    cells = []
    for side in sides:
        process = Process(side, threads)
        near, distant = [], []
        for turn in range(turns):
            near += process.ask("decode", at=NEAR, count=DECODE, seed=turn)["ns"]
            distant += process.ask("decode", at=FAR, count=DECODE, seed=turn)["ns"]
        process.stop()
        cells.append({"engine": side.engine, "kind": side.kind, "cache": side.cache,
                      "near": statistics.median(near) / 1e9, "far": statistics.median(distant) / 1e9})  # fmt: skip
        print(f"  {side.engine} {side.kind}, cache {side.cache}: {cells[-1]['near'] * 1e3:.1f} ms at {NEAR}, "
              f"{cells[-1]['far'] * 1e3:.1f} ms at {FAR}", flush=True)  # fmt: skip
    return {"threads": threads, "cells": cells}


if __name__ == "__main__":
    main()
