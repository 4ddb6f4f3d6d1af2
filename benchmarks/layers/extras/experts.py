"""What experts cost: switching between them, sharing one among rows, having many; and what an empty call costs."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.layers import pool
from benchmarks.layers.adapters import Entry, entries
from benchmarks.layers.pool import Drop, Worker
from benchmarks.layers.sizes import LADDER, SIZES, Size, alike, anywhere, stored, switching

_SPREAD = 1024  # rows that visit experts all over a layer of hundreds


def switches(workers: list[Worker], size: Size, rounds: int, sample_ns: float) -> list[dict[str, Any]]:
    """Microseconds more for each expert that the row before did not visit: alternating rows against rows alike."""
    same, alternating, fresh = switching(size)
    sets = {"same": stored(size, "same", same), "alternating": stored(size, "alternating", alternating)}
    routed = [w for w in workers if not w.entry.dense]
    results = pool.compare([(w, sets) for w in routed], rounds, sample_ns)
    return [
        {"peer": worker.entry.name, "size": size.name, "same_us": statistics.median(us["same"]),
         "alternating_us": statistics.median(us["alternating"]),
         "switch_us": statistics.median(b - a for a, b in zip(us["same"], us["alternating"], strict=False)) / fresh}
        for worker, us in zip(routed, results, strict=True) if all(us.values())
    ]  # fmt: skip


def shared(workers: list[Worker], size: Size, rounds: int, sample_ns: float) -> list[dict[str, Any]]:
    """Batch 4 whose rows visit the same experts against batch 1 with the same rows; Colibri's own routes are compared.

    Raises ValueError where the engine's routes differ within an input.
    """
    ours = [w for w in workers if w.entry.ours]
    if not ours:
        return []
    four, one = alike(size, 4)
    _same_routes(ours[0].entry, size, four)
    sets = {"four": stored(size, "alike-4", four), "one": stored(size, "alike-1", one)}
    results = pool.compare([(w, sets) for w in ours], rounds, sample_ns)
    return [
        {"peer": worker.entry.name, "size": size.name, "dtype": worker.entry.dtype,
         "one_us": statistics.median(us["one"]), "four_us": statistics.median(us["four"]),
         "ratio": statistics.median(a / b for a, b in zip(us["four"], us["one"], strict=False))}
        for worker, us in zip(ours, results, strict=True) if all(us.values())
    ]  # fmt: skip


def ladder(rounds: int, sample_ns: float, drop: Drop, most: int) -> list[dict[str, Any]]:
    """Batch 1 of the same expert size in layers of 8 to `most` experts, and of their routers alone, all in turn.

    Once with rows that visit the same two experts, once with rows that visit any.
    """
    known = entries()
    sets = {
        s.name: {"same": stored(s, "same", switching(s)[0]), "any": stored(s, "any", anywhere(s, _SPREAD))}
        for s in LADDER.values() if s.experts <= most
    }  # fmt: skip
    wanted = [(known[f"colibri-c-{kind}"], LADDER[name]) for name in sets for kind in ("int8", "router")]
    workers = pool.start(wanted, 1, drop)
    found: dict[tuple[str, str], dict[str, float]] = {}
    results = pool.compare([(w, sets[w.size.name]) for w in workers], rounds, sample_ns)
    for worker, us in zip(workers, results, strict=True):
        found[worker.size.name, worker.entry.dtype] = {k: statistics.median(v) for k, v in us.items() if v}
        worker.stop()
    rows = []
    for name in sets:
        layer, router = (found.get((name, dtype), {}) for dtype in ("int8", "router"))
        if {"same", "any"} <= layer.keys() & router.keys():
            rows.append({"experts": LADDER[name].experts, "bytes": LADDER[name].weights, "same_us": layer["same"],
                         "any_us": layer["any"], "router_us": router["same"]})  # fmt: skip
    return rows


def empty_calls(rounds: int, sample_ns: float, drop: Drop, absent: dict[str, str]) -> list[dict[str, Any]]:
    """Colibri on the tiny layer from C and from Python, and onnxruntime's call of a model that does nothing."""
    size = SIZES["tiny"]
    wanted = [e for e in entries().values() if e.ours and not e.part]
    if "onnxruntime" not in absent:
        wanted.append(entries()["ort-empty"])
    workers = pool.start([(e, size) for e in wanted], 1, drop)
    sets = {"any": stored(size, "any", anywhere(size, 16))}
    results = pool.compare([(w, sets) for w in workers], rounds, sample_ns)
    for worker in workers:
        worker.stop()
    return [
        {"peer": worker.entry.name, "dtype": worker.entry.dtype, "us": statistics.median(us["any"])}
        for worker, us in zip(workers, results, strict=True) if us["any"]
    ]  # fmt: skip


def needed(most: int, absent: dict[str, str]) -> list[tuple[Entry, Size]]:
    """The peers and sizes besides those of the cells whose files `ladder` and `empty_calls` need."""
    known = entries()
    steps = [s for s in LADDER.values() if s.experts <= most]
    pairs = [(known[f"colibri-c-{kind}"], s) for s in steps for kind in ("int8", "router")]
    pairs += [(e, SIZES["tiny"]) for e in known.values() if e.ours and not e.part]
    return pairs + ([] if "onnxruntime" in absent else [(known["ort-empty"], SIZES["tiny"])])


def kernels() -> str:
    """The instruction set Colibri's engine chooses on this machine."""
    return str(_model(entries()["colibri-c-int8"], SIZES["tiny"]).kernels)


def _same_routes(entry: Entry, size: Size, inputs: Any) -> None:
    model = _model(entry, size)
    for rows in inputs:
        (chosen,) = model.routes(rows)
        if any(set(row.ravel()) != set(chosen[0].ravel()) for row in chosen):
            raise ValueError(f"{size.name}: rows that should visit the same experts do not")


def _model(entry: Entry, size: Size) -> Any:
    import colibri

    return colibri.load(entry.create().folder(size) / "model.bin", verify=False)
