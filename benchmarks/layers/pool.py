"""Worker processes, one a peer: started together, kept alive, asked in turn."""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common.environment import ROOT, thread_environment
from benchmarks.layers.adapters import Entry
from benchmarks.layers.adapters.base import WORKER
from benchmarks.layers.sizes import COUNTS, Rows, Size

_PAUSE = 0.01  # seconds between samples: a pool's threads spin for a while after its last call
_PATIENCE = 240.0  # seconds for one answer; compiling is slow
_FEWEST = 3  # rounds, however little time there is
_LEAST = 10.0  # seconds for a cell, even where a run is out of time: fast peers are never left out
_LOOKS = 3  # calls that are only to learn how long one takes


class Failed(Exception):
    """A peer could not do what was asked; the text says why."""


class Worker:
    """One peer's process."""

    def __init__(self, entry: Entry, size: Size, threads: int) -> None:
        self.entry, self.size = entry, size
        self.weight_bytes = 0
        command = [*WORKER, entry.name, size.name, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.PIPE, env=thread_environment(threads),
                                         cwd=ROOT)  # fmt: skip

    def wait_ready(self) -> None:
        """Until the model is loaded."""
        self.weight_bytes = int(self._answer()["weight_bytes"])

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request; raises Failed."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed("its process ended") from None
        return self._answer()

    def stop(self) -> None:
        """End the process."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout and self._process.stderr
        # Reads stderr too: a worker whose libraries say much would otherwise block on a full pipe.
        deadline, said = time.monotonic() + _PATIENCE, b""
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([self._process.stdout, self._process.stderr], [], [], left)
            if self._process.stderr in ready:
                said = (said + (chunk := os.read(self._process.stderr.fileno(), 1 << 16)))[-4000:]
                if not chunk and self._process.stdout not in ready:
                    self._process.wait()
            if self._process.stdout in ready:
                line = self._process.stdout.readline()
                if not line:
                    said += self._process.stderr.read()
                    lines = said.decode(errors="replace").strip().splitlines()
                    raise Failed(lines[-1][:300] if lines else f"ended with code {self._process.wait()}")
                answer: dict[str, Any] = json.loads(line)
                if "failed" in answer:
                    raise Failed(str(answer["failed"]))
                return answer
        raise Failed(f"no answer in {_PATIENCE:.0f} s")


Drop = Callable[[Entry, str], None]
Step = Callable[[str], None]


def start(wanted: list[tuple[Entry, Size]], threads: int, drop: Drop) -> list[Worker]:
    """The workers that came up; `drop(entry, reason)` is told about the others. Two load at a time."""
    up: list[Worker] = []
    waiting = list(wanted)
    loading: list[Worker] = []
    while waiting or loading:
        while waiting and len(loading) < 2:
            loading.append(Worker(*waiting.pop(0), threads))
        worker = loading.pop(0)
        try:
            worker.wait_ready()
            up.append(worker)
        except Failed as error:
            drop(worker.entry, str(error))
            worker.stop()
    return up


def measure(
    workers: list[Worker], batch: int, rounds: int, seconds: float, sample_ns: float, drop: Drop, step: Step
) -> list[dict[str, Any]]:
    """One result for each worker: nanoseconds a call of every round, round-robin, and the errors of its outputs.

    `rounds` at most, and as many as fit into `seconds`, but at least three: peers too slow for that are dropped.
    """
    begin = time.monotonic()
    taking = []
    for worker, once in _affordable(workers, batch, seconds, drop, step):
        step(f"{worker.entry.name}: outputs")
        try:
            result: dict[str, Any] = worker.ask(do="check", batch=batch)
            many = max(1, round(sample_ns / 4 / once))  # the second look is longer: the first is all overhead
            result["estimate"] = worker.ask(do="time", batch=batch, calls=many)["ns"] / many
        except Failed as error:
            drop(worker.entry, str(error))
            continue
        calls = max(1, round(sample_ns / result["estimate"]))
        if calls > 1:  # whole cycles, so that every sample has the same inputs
            calls = -(-calls // COUNTS[batch]) * COUNTS[batch]
        result |= {"calls": calls, "samples": []}
        taking.append((worker, result))
    longest = 0.0
    for n in range(rounds):
        elapsed = time.monotonic() - begin
        if n >= _FEWEST and elapsed + longest > seconds:
            break
        turn = n % max(1, len(taking))
        for worker, result in [*taking[turn:], *taking[:turn]]:
            step(f"{worker.entry.name}: round {n + 1} of {rounds}")
            calls = result["calls"]
            warm = result["estimate"] * min(calls, COUNTS[batch])
            try:
                answer = worker.ask(do="time", batch=batch, calls=calls, first=n, warm=warm)
                result["samples"].append(answer["ns"] / calls)
            except Failed as error:
                drop(worker.entry, str(error))
                result["samples"] = []
                taking = [pair for pair in taking if pair[0] is not worker]
            time.sleep(_PAUSE)
        longest = max(longest, time.monotonic() - begin - elapsed)
    return [
        {"peer": worker.entry.name, "batch": batch, **summary(result["samples"]), "error": result["error"],
         "rms": result["rms"], "calls": result["calls"]}
        for worker, result in taking if result["samples"]
    ]  # fmt: skip


def _affordable(
    workers: list[Worker], batch: int, seconds: float, drop: Drop, step: Step
) -> list[tuple[Worker, float]]:
    """The workers, with the nanoseconds of a call, whose calls fit into `seconds`; the slowest peers go first."""
    begin, once = time.monotonic(), []
    for worker in workers:
        step(f"{worker.entry.name}: one call")
        try:
            once.append((worker, float(worker.ask(do="time", batch=batch, calls=1)["ns"])))
        except Failed as error:
            drop(worker.entry, str(error))
    left = max(_LEAST, seconds - (time.monotonic() - begin))
    calls = COUNTS[batch] + _LOOKS + _FEWEST
    slowest = sorted((pair for pair in once if not pair[0].entry.ours), key=lambda pair: -pair[1])
    for worker, ns in slowest:
        if sum(each for _, each in once) * calls / 1e9 <= left:
            break
        drop(worker.entry, f"too slow for the time of the run: a call takes {ns / 1e9:.2g} s, and {calls} are needed")
        once = [pair for pair in once if pair[0] is not worker]
    return once


def compare(pairs: list[tuple[Worker, dict[str, Rows]]], rounds: int, sample_ns: float) -> list[dict[str, list[float]]]:
    """For each worker, microseconds a call on each of its sets of rows, a sample of every set in each round."""
    results: list[dict[str, list[float]]] = [{name: [] for name in sets} for _, sets in pairs]
    calls: dict[tuple[int, str], int] = {}
    for _ in range(rounds):
        for number, (worker, sets) in enumerate(pairs):
            for name, rows in sets.items():
                place = {"do": "time", "path": rows.path, "batch": rows.batch}
                try:
                    if (number, name) not in calls:
                        ns = worker.ask(**place, calls=rows.count)["ns"]
                        calls[number, name] = rows.count * max(1, round(sample_ns / ns))
                    count = calls[number, name]
                    results[number][name].append(worker.ask(**place, calls=count)["ns"] / count / 1e3)
                except Failed:
                    continue
                time.sleep(_PAUSE)
    return results


def summary(samples_ns: list[float]) -> dict[str, Any]:
    """Median and spread in microseconds, and the samples themselves."""
    us = sorted(ns / 1e3 for ns in samples_ns)
    if not us:
        return {}

    def at(share: float) -> float:
        return us[round(share * (len(us) - 1))]

    return {"us": round(statistics.median(us), 3), "p10": round(at(0.1), 3), "p90": round(at(0.9), 3),
            "samples": [round(ns / 1e3, 3) for ns in samples_ns]}  # fmt: skip
