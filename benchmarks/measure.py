"""The run itself: limits, then every size, thread count and batch with all peers in turn, then the extras."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from typing import Any

import limits
import pool
import report
from adapters import Entry, entries, why_not
from adapters.base import WORKER
from environment import BUILD, ROOT, absent, caches, machine, thread_environment
from extras import packages, startup
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from sizes import BATCHES, SIZES, Size, bound_us, input_file, reference, switching, weights

RESULTS = BUILD / "results.json"
_SAMPLE_NS = 3e6  # a sample lasts at least about this long
_SWITCH_ROUNDS = 5


class Run:
    """The results so far and how to report progress."""

    def __init__(self, options: argparse.Namespace, progress: Progress, task: Any) -> None:
        self.options, self._progress, self._task = options, progress, task
        self.absent = absent()
        self.results: dict[str, Any] = {
            "machine": machine(), "limits": limits.measure(), "absent": self.absent,
            "settings": {"quick": options.quick, "rounds": options.rounds, "sample_ms": _SAMPLE_NS / 1e6},
            "sizes": {n: SIZES[n].__dict__ for n in options.sizes},
            "cells": [], "left_out": [], "switching": [], "startup": [], "packages": [],
        }  # fmt: skip

    def say(self, *text: str) -> None:
        """Show what is being done."""
        self._progress.update(self._task, description="".join(text))

    def advance(self) -> None:
        """One cell is done."""
        self._progress.advance(self._task)

    def leave_out(self, entry: Entry, reason: str, size: Size, **where: Any) -> None:
        """Remember, once, that a peer is missing somewhere, and why; addresses and paths stay out."""
        row = {"peer": entry.name, "size": size.name, **where, "reason": re.sub(r"/\S+/\S+|\S+://\S+", "…", reason)}
        if row not in self.results["left_out"]:
            self.results["left_out"].append(row)

    def save(self) -> None:
        """Write the results so far."""
        RESULTS.write_text(json.dumps(self.results, indent=1))


def run(options: argparse.Namespace) -> None:
    """Measure, write build/bench/results.json and the page; with --publish the committed copies too."""
    columns = [TextColumn("{task.description:<52}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns) as progress:
        cells = len(options.sizes) * len(options.threads) * len(options.batches)
        task = progress.add_task("the machine's limits", total=cells)
        bench = Run(options, progress, task)
        for name in options.sizes:
            _size(bench, SIZES[name])
            bench.save()
        if not options.no_extras:
            _extras(bench)
        bench.results["machine"]["load_at_end"] = os.getloadavg()[0]
        bench.save()
    page = report.write(RESULTS, BUILD)
    if options.publish:
        shutil.copyfile(RESULTS, ROOT / "benchmarks" / "results.json")
        page = report.write(RESULTS, ROOT / "docs")
    print(f"{RESULTS.relative_to(ROOT)} and {page.relative_to(ROOT)} are written")


def _size(bench: Run, size: Size) -> None:
    options = bench.options
    bench.say(f"{size.name}: weights and exact outputs")
    weights(size)
    for batch in sorted({1, 4, *options.batches} & set(BATCHES)):
        reference(size, batch)
    built = list(_built(bench, size))
    for threads in options.threads:
        usable = []
        for entry in built:
            reason = why_not(entry, size, threads, bench.absent)
            if reason:
                bench.leave_out(entry, reason, size, threads=threads)
            else:
                usable.append(entry)
        for group in _fitting(usable, size):
            _group(bench, group, size, threads)
        for _ in options.batches:
            bench.advance()


def _built(bench: Run, size: Size) -> Iterator[Entry]:
    """The peers asked for whose files exist or could be made."""
    patterns = bench.options.peers or ["*"]
    for entry in entries().values():
        if not any(fnmatch(entry.name, p) for p in patterns):
            continue
        reason = why_not(entry, size, entry.threads[0], bench.absent)
        if reason is None:
            bench.say(f"{size.name}: {entry.name}: its files")
            done = subprocess.run([sys.executable, str(WORKER), "build", entry.name, size.name],
                                  capture_output=True, text=True, check=False, env=thread_environment(2))  # fmt: skip
            lines = done.stderr.strip().splitlines()
            reason = f"could not be built: {lines[-1][:300] if lines else done.returncode}" if done.returncode else None
        if reason:
            bench.leave_out(entry, reason, size)
        else:
            yield entry


def _fitting(usable: list[Entry], size: Size) -> Iterator[list[Entry]]:
    """Groups that fit in memory together; in each, Colibri's smallest C entry is there to tie the groups together."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.6
    anchors = [e for e in usable if e.ours and "-c-" in e.name]
    anchor = min(anchors, key=lambda e: e.resident(size), default=None)
    group: list[Entry] = []
    for entry in usable:
        if group and sum(e.resident(size) for e in group) + entry.resident(size) > memory:
            yield group
            group = [anchor] if anchor else []
        if entry not in group:
            group.append(entry)
    yield group


def _group(bench: Run, group: list[Entry], size: Size, threads: int) -> None:
    where = f"{size.name}, {threads} thread{'s' * (threads > 1)}"
    bench.say(f"{where}: starting {len(group)} peers")

    def drop(entry: Entry, reason: str, **more: Any) -> None:
        bench.leave_out(entry, reason, size, threads=threads, **more)

    workers = pool.start(group, size, threads, drop)
    known = entries()
    begin = time.monotonic()
    for batch in bench.options.batches:
        step = partial(bench.say, f"{where}, batch {batch}: ")
        cells = pool.measure(workers, batch, bench.options.rounds, _SAMPLE_NS, partial(drop, batch=batch), step)
        for cell in cells:
            cell |= {"size": size.name, "threads": threads, "dtype": known[cell["peer"]].dtype}
            if "unmeasured" not in bench.results["limits"]:
                bound = bound_us(size, batch, threads, cell["dtype"], bench.results["limits"], caches())
                cell |= {"bound_us": round(bound, 3), "over_bound": round(cell["us"] / bound, 3)}
            cell["load"] = os.getloadavg()[0]
        bench.results["cells"] += cells
    if threads == 1 and not bench.options.no_extras:
        bench.say(f"{where}: switching experts")
        same, alternating, fresh = switching(size)
        paths = (str(input_file(size, "same", same)), str(input_file(size, "alternating", alternating)))
        routed = [w for w in workers if not w.entry.dense]
        rows = pool.switching(routed, paths, fresh, min(_SWITCH_ROUNDS, bench.options.rounds), _SAMPLE_NS)
        bench.results["switching"] += [{**row, "size": size.name} for row in rows]
    seconds = bench.results.setdefault("seconds", {})
    seconds[where] = round(seconds.get(where, 0.0) + time.monotonic() - begin, 1)
    for worker in workers:
        worker.stop()


def _extras(bench: Run) -> None:
    bench.say("package bytes")
    bench.results["packages"] = packages(bench.absent)
    chosen = ["small"] if bench.options.quick else ["small", "medium"]
    patterns = bench.options.peers or ["*"]
    for size in (SIZES[n] for n in chosen if n in bench.options.sizes):
        usable = [
            e for e in entries().values()
            if any(fnmatch(e.name, p) for p in patterns) and not why_not(e, size, 1, bench.absent)
            and not (bench.options.quick and e.name == "torch-compile")
        ]  # fmt: skip
        drop = partial(bench.leave_out, size=size, what="start-up")
        step = partial(bench.say, f"{size.name}: start-up: ")
        bench.results["startup"] += startup(usable, size, 3 if bench.options.quick else 5, drop, step)
