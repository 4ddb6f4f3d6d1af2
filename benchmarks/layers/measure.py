"""The run itself: limits, then every size, thread count and batch with all peers in turn, then the extras."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import partial
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.common.environment import BUILD, ROOT, absent, machine, thread_environment
from benchmarks.layers import pool
from benchmarks.layers.adapters import Entry, entries, why_not
from benchmarks.layers.adapters.base import WORKER
from benchmarks.layers.bounds import bound_us
from benchmarks.layers.budget import Shares, end_of_run
from benchmarks.layers.extras import experts, heavy_tails
from benchmarks.layers.extras.footprint import packages, startup
from benchmarks.layers.page import report
from benchmarks.layers.sizes import BATCHES, SIZES, Size, reference, weights, work
from benchmarks.limits import measure as limits

RESULTS = BUILD / "results.json"
PUBLISHED = ROOT / "benchmarks" / "layers" / "results.json"
_SAMPLE_NS = 3e6  # a sample lasts at least about this long
_EXTRA_ROUNDS = 7
_LARGE = 1e9  # weights beyond which files are made one after the other
_STARTS = ("small", "medium")  # sizes whose start-up is measured
# Shares of the time: of a size and thread count, and of a size's extras.
_SHARES = {"tiny": 1.0, "small": 1.0, "medium": 2.0, "olmoe": 2.5, "mixtral": 4.0}


class Run:
    """The results so far and how to report progress."""

    def __init__(self, options: argparse.Namespace, progress: Progress, task: Any) -> None:
        self.options, self._progress, self._task = options, progress, task
        self.absent = absent()
        self.results: dict[str, Any] = {
            "machine": machine(), "limits": {"unmeasured": "not yet"}, "absent": self.absent,
            "settings": {"quick": options.quick, "rounds": options.rounds, "sample_ms": _SAMPLE_NS / 1e6,
                         "minutes": options.minutes},
            "sizes": {n: SIZES[n].__dict__ for n in options.sizes}, "work": {}, "seconds": {},
            "cells": [], "left_out": [], "switching": [], "shared": [], "startup": [], "packages": [],
            "ladder": [], "calls": [], "heavy_tails": [],
        }  # fmt: skip
        self.rounds = min(_EXTRA_ROUNDS, options.rounds)

    def wanted(self) -> list[Entry]:
        """The peers asked for."""
        patterns = self.options.peers or ["*"]
        return [e for e in entries().values() if not e.part and any(fnmatch(e.name, p) for p in patterns)]

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

    def timed(self, name: str, begin: float) -> None:
        """Add the seconds since `begin`, and write the results so far."""
        seconds = self.results["seconds"]
        seconds[name] = round(seconds.get(name, 0.0) + time.monotonic() - begin, 1)
        partial = RESULTS.with_suffix(".partial")
        partial.write_text(json.dumps(self.results, indent=1))
        partial.rename(RESULTS)  # an interrupted run leaves whole results


def run(options: argparse.Namespace) -> None:
    """Measure, write build/bench/results.json and the page; with --publish the committed copies too."""
    columns = [TextColumn("{task.description:<52}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns) as progress:
        cells = len(options.sizes) * len(options.threads) * len(options.batches)
        task = progress.add_task("files", total=cells)
        bench = Run(options, progress, task)
        sizes = [SIZES[name] for name in options.sizes]
        built = {size.name: _files(bench, size) for size in sizes}
        begin = time.monotonic()
        bench.say("the machine's limits")
        bench.results["limits"] = limits.measure()
        bench.timed("limits", begin)
        if not options.no_extras:
            _extras(bench)
        shares = Shares(end_of_run(options.minutes), [_SHARES[size.name] for size in sizes for _ in options.threads])
        for size in sizes:
            _size(bench, size, built[size.name], shares)
        bench.results["machine"]["load_at_end"] = os.getloadavg()[0]
        bench.timed("all", time.monotonic())
    report_so_far(options)


def report_so_far(options: argparse.Namespace) -> None:
    """The page of build/bench/results.json, beside it; with --publish both go where they are committed."""
    page = report.write(RESULTS, BUILD)
    if options.publish:
        shutil.copyfile(RESULTS, PUBLISHED)
        page = report.write(RESULTS, ROOT / "docs" / "measured")
    print(f"{RESULTS.relative_to(ROOT)} and {page.relative_to(ROOT)} are written")


def _files(bench: Run, size: Size) -> list[Entry]:
    """Make the files of everything that is measured on this size; the peers that have theirs."""
    begin = time.monotonic()
    bench.say(f"{size.name}: weights and exact outputs")
    weights(size)
    for batch in sorted({1, 4, *bench.options.batches} & set(BATCHES)):
        reference(size, batch)
        bench.results["work"].setdefault(size.name, {})[str(batch)] = work(size, batch)
    possible = []
    for entry in bench.wanted():
        reason = why_not(entry, size, entry.threads[0], bench.absent)
        if reason:
            bench.leave_out(entry, reason, size)
        else:
            possible.append((entry, size))
    ready = [entry for entry, _ in _build(bench, [pair for pair in possible if pair[0].ours])]
    lost = {entry.dtype for entry, _ in possible if entry.ours} - {entry.dtype for entry in ready}
    peers = []
    for entry, _ in possible:
        if entry.dtype in lost and not entry.ours:
            bench.leave_out(entry, f"there is no Colibri in {entry.dtype} to compare it with", size)
        elif not entry.ours:
            peers.append((entry, size))
    ready += [entry for entry, _ in _build(bench, peers)]
    bench.timed(f"files of {size.name}", begin)
    return ready


def _build(bench: Run, pairs: list[tuple[Entry, Size]]) -> list[tuple[Entry, Size]]:
    """Make the files of peers, unless that was done before; those that have theirs.

    Each in a process of its own, two at a time where memory allows it: most of them use one processor only.
    """
    folders = {entry.create().folder(size): (entry, size) for entry, size in pairs}

    def make(entry: Entry, size: Size) -> str:
        if not entry.create().stale(size):
            return ""
        bench.say(f"{size.name}: {entry.name}: its files")
        done = subprocess.run([*WORKER, "build", entry.name, size.name], capture_output=True, text=True,
                              check=False, env=thread_environment(2), cwd=ROOT)  # fmt: skip
        lines = done.stderr.strip().splitlines()
        return f"could not be built: {lines[-1][:300] if lines else done.returncode}" if done.returncode else ""

    at_once = 2 if all(size.weights < _LARGE for _, size in pairs) else 1
    with ThreadPoolExecutor(at_once) as threads:
        reasons = dict(zip(folders, threads.map(lambda pair: make(*pair), folders.values()), strict=True))
    ready = []
    for entry, size in pairs:
        if reason := reasons[entry.create().folder(size)]:
            bench.leave_out(entry, reason, size)
        else:
            ready.append((entry, size))
    return ready


def _size(bench: Run, size: Size, built: list[Entry], shares: Shares) -> None:
    for threads in bench.options.threads:
        usable = []
        for entry in built:
            reason = why_not(entry, size, threads, bench.absent)
            if reason:
                bench.leave_out(entry, reason, size, threads=threads)
            else:
                usable.append(entry)
        groups = list(_fitting(usable, size))
        seconds = shares.next()
        for group in groups:
            share = sum(e.resident(size) for e in group) / sum(e.resident(size) for g in groups for e in g)
            _group(bench, group, size, threads, seconds * share)
        for _ in bench.options.batches:
            bench.advance()
    if size.name in _STARTS[: 1 if bench.options.quick else None] and not bench.options.no_extras:
        begin = time.monotonic()
        usable = [e for e in built if not (bench.options.quick and e.name == "torch-compile")]
        drop = partial(bench.leave_out, size=size, what="start-up")
        step = partial(bench.say, f"{size.name}: start-up: ")
        bench.results["startup"] += startup(usable, size, 3 if bench.options.quick else 5, drop, step)
        bench.timed(f"start-up, {size.name}", begin)


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


def _group(bench: Run, group: list[Entry], size: Size, threads: int, seconds: float) -> None:
    """Measure peers that fit in memory together, in about `seconds`, the time of loading them included."""
    where = f"{size.name}, {threads} thread{'s' * (threads > 1)}"
    bench.say(f"{where}: starting {len(group)} peers")
    begin = time.monotonic()

    def drop(entry: Entry, reason: str, **more: Any) -> None:
        bench.leave_out(entry, reason, size, threads=threads, **more)

    workers = pool.start([(entry, size) for entry in group], threads, drop)
    batches = bench.options.batches
    shares = Shares(begin + seconds, [1.0 + 0.5 * n for n in range(len(batches))])
    for batch in batches:
        step = partial(bench.say, f"{where}, batch {batch}: ")
        cells = pool.measure(workers, batch, bench.options.rounds, shares.next(), _SAMPLE_NS,
                             partial(drop, batch=batch), step)  # fmt: skip
        known, todo = entries(), bench.results["work"][size.name][str(batch)]
        for cell in cells:
            cell |= {"size": size.name, "threads": threads, "dtype": known[cell["peer"]].dtype}
            if "unmeasured" not in bench.results["limits"]:
                bound = bound_us(bench.results["limits"], todo, cell["dtype"], threads)
                cell |= {"bound_us": round(bound, 3), "over_bound": round(cell["us"] / bound, 3)}
            cell["load"] = os.getloadavg()[0]
        bench.results["cells"] += cells
    if threads == 1 and not bench.options.no_extras:
        bench.say(f"{where}: switching experts")
        bench.results["switching"] += experts.switches(workers, size, bench.rounds, _SAMPLE_NS)
        bench.results["shared"] += experts.shared(workers, size, bench.rounds, _SAMPLE_NS)
    for worker in workers:
        worker.stop()
    bench.timed(where, begin)


def _extras(bench: Run) -> None:
    """What does not belong to one of the sizes."""
    quick, begin = bench.options.quick, time.monotonic()
    most = 64 if quick else 512
    bench.say("package bytes")
    bench.results["packages"] = packages(bench.absent)
    needed = experts.needed(most, bench.absent)
    for _, size in needed:
        weights(size)
    _build(bench, needed)
    bench.timed("files of the extras", begin)
    begin = time.monotonic()
    bench.say("calls of a model that does nothing")
    drop = partial(bench.leave_out, size=SIZES["tiny"], what="calls")
    bench.results["calls"] = experts.empty_calls(bench.rounds, _SAMPLE_NS, drop, bench.absent)
    bench.results["machine"]["kernels"] = experts.kernels()
    bench.say(f"8 to {most} experts")
    bench.results["ladder"] = experts.ladder(bench.rounds, _SAMPLE_NS, drop, most)
    bench.timed("calls and experts", begin)
    begin = time.monotonic()
    bench.results["heavy_tails"] = heavy_tails.measure((256, 1024) if quick else (256, 1024, 2048, 4096), bench.say)
    bench.timed("heavy tails", begin)
