"""Models larger than memory, and cold experts: which way of getting an expert's weights into memory is how fast.

    python -m benchmarks.memory [--directory DIR] [--limit 128] [--tokens 240] [--rounds 5] [--write]

Needs the package, a C compiler, and for the first table the right to make a memory control group (root). The model is
512 MB of float32: 8 layers of 32 experts of 2 MB, top-2. Its routes are drawn, not learnt: a token keeps a layer's
choice of the token before with probability 0.35, otherwise experts are drawn by Zipf's law. `--write` puts the tables
into docs/memory.md; `--directory` is where the models lie, which decides what disk is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.control_group import limited
from benchmarks.common.environment import ROOT
from benchmarks.common.tables import write_between

PAGE = ROOT / "docs" / "memory.md"
LAYERS, EXPERTS, WIDTH, K, KEEP = 8, 32, 512, 2, 0.35
SWITCH_MB, SWITCH_BATCHES, SWITCH_TRIALS = (2, 5, 10, 20), (1, 16), 11
MB = 1 << 20


# --- models -----------------------------------------------------------------------------------------------------------


def routes(tokens: int, seed: int) -> np.ndarray[Any, Any]:
    """Logits (tokens, layers, experts) that choose as the module's text says."""
    rng = np.random.default_rng(seed)
    logits = np.zeros((tokens, LAYERS, EXPERTS), np.float32)
    fixed = np.random.default_rng(1)
    for layer in range(LAYERS):
        weights = 1.0 / (1 + fixed.permutation(EXPERTS))
        weights /= weights.sum()
        chosen: list[int] = []
        for token in range(tokens):
            chosen = [e for e in chosen if rng.random() < KEEP]
            while len(chosen) < K:
                e = int(rng.choice(EXPERTS, p=weights))
                if e not in chosen:
                    chosen.append(e)
            logits[token, layer, chosen] = 4 + np.arange(K)
    return logits


def rows(tokens: int, seed: int) -> np.ndarray[Any, Any]:
    """Input rows: features, then every layer's logits."""
    features = np.random.default_rng(seed).standard_normal((tokens, WIDTH), np.float32)
    return np.concatenate([features, routes(tokens, seed).reshape(tokens, -1)], axis=1)


def _expert(width: int, hidden: int) -> Any:
    from colibri.ir.graph import Graph

    rng = np.random.default_rng(3)
    graph = Graph("expert")
    x = graph.add_input("x", (width,))
    for name, out, n in (("up", hidden, width), ("down", width, hidden)):
        weight = graph.add_constant(name, rng.standard_normal((out, n), np.float32) / np.sqrt(n))
        x = graph.add("linear", x, weight, **({"activation": "relu"} if name == "up" else {}))
    graph.outputs = [x]
    return graph


def write_large(path: Path) -> None:
    """The model larger than memory."""
    from colibri import exporter
    from colibri.ir.graph import Graph, Router

    graph = Graph("large")
    x = graph.add_input("x", (WIDTH + LAYERS * EXPERTS,))
    y = graph.add("slice", x, axis=0, start=0, stop=WIDTH, step=1)
    one = _expert(WIDTH, WIDTH)
    for layer in range(LAYERS):
        start = WIDTH + layer * EXPERTS
        logits = graph.add("slice", x, axis=0, start=start, stop=start + EXPERTS, step=1)
        y = graph.add("moe", y, logits, router=Router(EXPERTS, K, "softmax", "sum"), experts=[one] * EXPERTS)
    graph.outputs = [y]
    _write(path, exporter.build(graph, max_batch=1, calibration=[rows(64, 5)]).image)


def write_switch(path: Path, megabytes: int, batch: int) -> None:
    """Two layers of experts; every row takes the first; the others are there to keep these 4 MB apart."""
    from colibri import exporter
    from colibri.ir.graph import Graph, Router

    width = 256
    graph = Graph("switch")
    x = graph.add_input("x", (width,))
    count = 1 + max(1, -(-4 // megabytes))
    logits = graph.add_constant("w", np.zeros((count, width)))
    bias = graph.add_constant("b", np.arange(count)[::-1])
    one = _expert(width, megabytes * MB // (2 * width * 4))
    for _ in range(2):
        x = graph.add("moe", x, graph.add("linear", x, logits, bias), router=Router(count, 1), experts=[one] * count)
    graph.outputs = [x]
    _write(path, exporter.build(graph, max_batch=batch).image)


def _write(path: Path, image: bytes) -> None:
    with path.open("wb") as file:
        file.write(image)
        file.flush()
        os.fsync(file.fileno())  # what is not on the disk cannot be dropped from memory


def drop(path: Path) -> None:
    """Take the file out of memory."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- running ----------------------------------------------------------------------------------------------------------


def compile_driver(folder: Path) -> Path:
    """memory.c with the engine and the host layer."""
    engine, driver = ROOT / "engine", folder / "memory"
    subprocess.run(["make", "-s", "-C", engine, f"BUILD={folder / 'engine'}"], check=True)
    libraries = [folder / "engine" / f"{name}.a" for name in ("libcolibri_host", "libcolibri")]
    subprocess.run(["cc", "-O2", "-std=gnu11", "-pthread", f"-I{engine / 'include'}", f"-I{engine / 'src'}",
                    Path(__file__).with_name("memory.c"), *libraries, "-o", driver], check=True)  # fmt: skip
    return driver


def run(
    driver: Path, model: Path, x: Path, batch: int, policy: str, number: int, join: Callable[[], None] | None = None
) -> Any:
    """One run's figures."""
    drop(model)
    command = [driver, model, x, str(batch), policy, str(number)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=join)
    if done.returncode != 0:
        raise SystemExit(f"{policy} {number}: status {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def read_ahead(path: Path) -> int:
    """KB the kernel reads ahead on the disk of `path`."""
    device = path.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    found = next(p for p in (node / "queue", node / ".." / "queue") if (p / "read_ahead_kb").exists())
    return int((found / "read_ahead_kb").read_text())


def policies(limit: int) -> dict[str, tuple[str, int]]:
    """What is compared: a name, and the driver's policy and number."""
    locked, cached = limit * MB // 2, limit * MB * 3 // 4
    return {
        "page faults": ("faults", 0),
        "page faults without read-ahead": ("random", 0),
        "announce, 1 thread": ("announce", 1),
        "announce, 2 threads": ("announce", 2),
        "announce, and the next layer's last choice": ("ahead", 1),
        f"lock the most frequent, {locked // MB} MB": ("hot", locked),
        f"lock {locked // MB} MB and announce, 2 threads": ("both", locked),
        f"own cache, LRU, {cached // MB} MB": ("cache", cached),
        f"own cache, LRU, {cached // MB} MB, O_DIRECT": ("direct", cached),
    }


def larger_than_memory(driver: Path, folder: Path, limit: int, tokens: int, rounds: int) -> str:
    """The table of policies, interleaved so that a disturbance affects all of them."""
    model, x = folder / "large.bin", folder / "large.f32"
    if not model.exists():
        write_large(model)
    rows(tokens, 7).tofile(x)
    compared = policies(limit)
    found: dict[str, list[Any]] = {name: [] for name in compared}
    with limited(limit) as join:
        for _ in range(rounds):
            for name, (policy, number) in compared.items():
                found[name].append(run(driver, model, x, 1, policy, number, join))
    digests = {r["digest"] for results in found.values() for r in results}
    assert len(digests) == 1, "policies gave different bits"
    base = statistics.median(r["seconds"] / r["tokens"] for r in found["page faults"])
    sizes = f"{model.stat().st_size // MB} MB of model under a limit of {limit} MB; read-ahead {read_ahead(model)} KB"
    lines = [f"{sizes}; {tokens * 3 // 4} tokens, {rounds} rounds, medians (slowest to fastest round).", "",
             "| policy | tokens/s | against page faults | read a token |", "|---|---:|---:|---:|"]  # fmt: skip
    for name, results in found.items():
        each = sorted(r["seconds"] / r["tokens"] for r in results)
        middle = statistics.median(each)
        read = statistics.median(r["read"] / r["tokens"] for r in results) / MB
        lines.append(f"| {name} | {1 / middle:.1f} ({1 / each[-1]:.1f} to {1 / each[0]:.1f}) | {base / middle:.2f} "
                     f"| {read:.1f} MB |")  # fmt: skip
    return "\n".join(lines)


def everything_cold(driver: Path, folder: Path, rounds: int) -> str:
    """Every expert released before every token: no control group needed."""
    model, x = folder / "large.bin", folder / "cold.f32"
    rows(40, 8).tofile(x)
    compared = {"page faults": ("drop", 0), "announce, 1 thread": ("dropped", 1), "announce, 2 threads": ("dropped", 2)}
    found: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(rounds):
        for name, (policy, number) in compared.items():
            result = run(driver, model, x, 1, policy, number)
            found[name].append(result["seconds"] / result["tokens"])
    base = statistics.median(found["page faults"])
    lines = ["| all experts cold at every token | ms a token | against page faults |", "|---|---:|---:|"]
    for name, each in found.items():
        lines.append(f"| {name} | {1e3 * statistics.median(each):.1f} | {base / statistics.median(each):.2f} |")
    return "\n".join(lines)


def switching(driver: Path, folder: Path) -> str:
    """The table of cold experts by size."""
    lines = [
        "| expert | rows | layer before | cold | announced a layer ahead | | announced 0.1 s ahead | |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for megabytes in SWITCH_MB:
        for batch in SWITCH_BATCHES:
            model, x = folder / "switch.bin", folder / "switch.f32"
            write_switch(model, megabytes, batch)
            np.random.default_rng(4).standard_normal((SWITCH_TRIALS * batch, 256), np.float32).tofile(x)
            r = run(driver, model, x, batch, "switch", 1)
            cold, ahead, long = (max(r[case] - r["warm"], 1e-6) for case in ("cold", "layer_ahead", "long_ahead"))
            lines.append(
                f"| {r['bytes'] / MB:.0f} MB | {batch} | {1e3 * r['first_layer']:.2f} ms | {1e3 * cold:.2f} ms "
                f"| {1e3 * ahead:.2f} ms | {cold / ahead:.1f}× | {1e3 * long:.3f} ms "
                f"| {'> 99' if cold > 99 * long else f'{cold / long:.0f}'}× |"
            )
    (folder / "switch.bin").unlink()
    return "\n".join(lines)


def main() -> None:
    """Measure and print, or write."""
    parser = argparse.ArgumentParser("python -m benchmarks.memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where the models lie (600 MB)")
    parser.add_argument("--limit", type=int, default=128, help="MB of memory for the model larger than it")
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["larger", "cold", "switch"])
    parser.add_argument("--suffix", default="", help="of the tables' names in docs/memory.md, for another disk")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.directory or Path(temporary)
        driver = compile_driver(Path(temporary))
        tables = {
            "larger": lambda: larger_than_memory(driver, folder, args.limit, args.tokens, args.rounds),
            "cold": lambda: everything_cold(driver, folder, args.rounds),
            "switch": lambda: switching(driver, folder),
        }
        for name, measure in tables.items():
            if args.only in (None, name):
                text = measure()
                print(text, end="\n\n", flush=True)
                if args.write:
                    write_between(PAGE, name + args.suffix, text)


if __name__ == "__main__":
    main()
