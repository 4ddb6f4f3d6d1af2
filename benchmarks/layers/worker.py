"""One peer in a process of its own.

    worker PEER SIZE THREADS            answers one JSON request a line (see `serve`)
    worker PEER SIZE THREADS INPUTS     runs the first row of INPUTS, says "ready", then answers "memory"
    worker build PEER SIZE              makes the peer's files

What libraries print goes to stderr: stdout carries the answers.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from benchmarks.common.environment import available_bytes
from benchmarks.layers.adapters import entries
from benchmarks.layers.adapters.base import Adapter, memory_line, status_bytes
from benchmarks.layers.sizes import Array, Size, by_name, inputs, reference

_ROOM = 0.85  # of the free memory, for making files
_WARM_NS = 20_000_000  # calls longer than this are not warmed up


def main() -> None:
    """Dispatch on the arguments."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.argv[1] == "build":
        most = int(_ROOM * available_bytes())  # a MemoryError is a result; to be killed, perhaps with others, is not
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        entries()[sys.argv[2]].create().make(by_name(sys.argv[3]))
        return
    name, size, threads = sys.argv[1], by_name(sys.argv[2]), int(sys.argv[3])
    adapter = entries()[name].create()
    adapter.imports()
    resident = status_bytes("VmRSS")
    adapter.prepare(size, threads)
    if len(sys.argv) > 4:
        once(adapter, size, Path(sys.argv[4]), resident, answers)
    else:
        serve(adapter, size, answers)


def once(adapter: Adapter, size: Size, path: Path, resident: int, answers: TextIO) -> None:
    """First output as soon as can be; then, asked for memory, all inputs of batch 1, so that every expert was used."""
    rows = np.fromfile(path, np.float32).reshape(-1, 1, size.d)
    adapter.run(rows[0])
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        adapter.outputs(rows)
        print(memory_line(resident), file=answers, flush=True)


def serve(adapter: Adapter, size: Size, answers: TextIO) -> None:
    """Answers requests until stdin ends.

    {"do": "check", "batch": b}                       -> {"error": …, "rms": …} against the float64 reference
    {"do": "time", "batch": b, "calls": n, "first": f} -> {"ns": total of n calls}; with "path" on the rows there,
                                                          (…, b, d) raw float32
    """
    held: dict[str, Array] = {}
    print(json.dumps({"ready": True, "weight_bytes": adapter.weight_bytes}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _answer(adapter, size, request, held)
        except Exception as error:  # whatever a peer raises is a result, not the end of the run
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def _answer(adapter: Adapter, size: Size, request: dict[str, Any], held: dict[str, Array]) -> dict[str, Any]:
    batch, path = request["batch"], request.get("path")
    if (key := path or str(batch)) not in held:
        held[key] = np.fromfile(path, np.float32).reshape(-1, batch, size.d) if path else inputs(size, batch)
    xs = held[key]
    if request["do"] == "check":
        return _errors(adapter.outputs(xs), reference(size, request["batch"]))
    calls, first = request["calls"], request.get("first", 0)
    if request.get("warm", 0) < _WARM_NS:
        adapter.time(xs, min(calls, len(xs)), first)  # the other peers emptied the caches
    return {"ns": adapter.time(xs, calls, first)}


def _errors(y: Array, exact: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    """The largest error over the largest output, and the error's root mean square over the outputs'."""
    error = y.astype(np.float64) - exact
    return {
        "error": float(np.abs(error).max() / np.abs(exact).max()),
        "rms": float(np.sqrt((error**2).mean() / (exact**2).mean())),
    }


if __name__ == "__main__":
    main()
