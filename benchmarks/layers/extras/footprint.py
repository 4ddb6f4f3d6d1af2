"""Bytes installed, memory over the weights, start-up."""

from __future__ import annotations

import importlib.metadata
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.environment import ENGINE, ROOT
from benchmarks.layers.adapters import Entry
from benchmarks.layers.sizes import Size, inputs, stored

_OWN = "colibri-moe"
_PATIENCE = 120.0  # seconds for a process to give its first output
_LONG = 5.0  # seconds beyond which one start must do


def packages(absent: dict[str, str]) -> list[dict[str, Any]]:
    """Bytes of each peer's package, of all it requires, and of its shared libraries."""
    rows: list[dict[str, Any]] = []
    for name in (_OWN, "onnxruntime", "torch", "executorch"):
        if name in absent:
            rows.append({"package": name, "absent": absent[name]})
            continue
        needed = _closure(name)
        own = _files(name)
        rows.append({
            "package": name,
            "version": importlib.metadata.version(name),
            "bytes": sum(own.values()),
            "with_requirements": sum(sum(_files(n).values()) for n in needed),
            "requirements": len(needed) - 1,
            "libraries": sum(size for path, size in own.items() if ".so" in path.name),
        })  # fmt: skip
    for path in _onnxruntime_library():
        rows.append({"package": "libonnxruntime.so", "bytes": path.stat().st_size})
    for library in ("libcolibri.so", "libcolibri.a"):
        path = ENGINE / library
        stripped = ENGINE / f"{library}.stripped"
        subprocess.run(["strip", "--strip-unneeded", str(path), "-o", str(stripped)], check=False)
        rows.append({"package": library, "bytes": (stripped if stripped.exists() else path).stat().st_size})
    return rows


def _onnxruntime_library() -> list[Path]:
    """The library a C program links, if the wheel has it beside the Python module."""
    try:
        return [p for p in _files("onnxruntime") if p.name.startswith("libonnxruntime.so")]
    except importlib.metadata.PackageNotFoundError:
        return []


def _files(name: str) -> dict[Path, int]:
    if name == _OWN:  # installed editable: its files are the repository's
        files = [p for p in (ROOT / "src/colibri").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        files = [p for p in files if p.name != "_engine.c"]
    else:
        listed = importlib.metadata.files(name) or []
        files = [Path(str(f.locate())) for f in listed if not str(f).endswith(".pyc")]
    return {path: path.stat().st_size for path in files if path.exists()}


def _closure(name: str) -> set[str]:
    """The installed distributions `name` requires, itself included; extras are not counted."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        current = todo.pop()
        try:
            requires = importlib.metadata.requires(current) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if (canonical := re.sub(r"[-_.]+", "-", current).lower()) in seen:
            continue
        seen.add(canonical)
        todo += [match[0] for r in requires if "extra ==" not in r and (match := re.match(r"[\w.-]+", r))]
    return seen


def startup(
    entries: list[Entry], size: Size, repeats: int, drop: Callable[[Entry, str], None], step: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Seconds from starting a process to its first output, and its peak memory over what it had before the model.

    The processes of the peers take turns. Peers whose time is compiling are measured like the others, but only once.
    """
    path = Path(stored(size, "inputs-1", inputs(size, 1)).path)
    times: dict[str, list[float]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for n in range(repeats):
        for entry in entries:
            if n and (entry.name not in times or times[entry.name][0] > _LONG):
                continue
            step(f"{entry.name}: start {n + 1} of {repeats}")
            adapter = entry.create()
            adapter.size = size
            begin = time.perf_counter()
            process = adapter.start(size, path)
            watchdog = threading.Timer(_PATIENCE, process.kill)
            watchdog.start()
            assert process.stdin and process.stdout
            ready = process.stdout.readline().strip() == "ready"
            seconds = time.perf_counter() - begin
            answer, _ = process.communicate("memory\n") if ready else ("", "")
            watchdog.cancel()
            if not ready or not answer.strip():
                drop(entry, "its process ended before the first output")
                continue
            times.setdefault(entry.name, []).append(seconds)
            resident, peak = map(int, answer.split())
            weight_bytes = adapter.weight_bytes
            rows[entry.name] = {"peer": entry.name, "baseline_bytes": resident, "peak_bytes": peak,
                                "weight_bytes": weight_bytes,
                                "over_weights_bytes": peak - resident - weight_bytes}  # fmt: skip
    return [
        {**row, "size": size.name, "startup_s": round(statistics.median(times[name]), 4),
         "startup_samples": [round(t, 4) for t in times[name]]}
        for name, row in rows.items()
    ]  # fmt: skip
