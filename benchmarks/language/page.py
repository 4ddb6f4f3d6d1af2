"""Writes docs/language-performance.md from the results alone: no figure is worked out anywhere else."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.tables import percent, size_of, table
from benchmarks.language import home
from benchmarks.language.shapes import SHAPES, weights

Data = dict[str, Any]
OURS, PEER = "colibri", "llama.cpp"
_DECODE = {"int8": 0.92, "int4": 0.85}  # goals: shares of the reading rate, at most, with the machine's processors
_PREFILL, _START, _MEMORY, _FAR = 0.65, 1 / 3, 0.02, 1.5


def write(data: Data, path: Path) -> Path:
    """The page of whatever sections there are."""
    speed = data.get("speed")
    parts = ["# Speed and quality of language models\n\nWritten by `benchmarks/language/page.py`; do not edit."]
    if speed:
        parts += [_opening(speed), _goals(speed), _decode(speed), _prefill(speed), _starts(speed), _memory(speed),
                  _far(speed), _method(speed)]  # fmt: skip
    parts += [_quality(data["quality"])] if "quality" in data else []
    parts += [_larger(data["larger"])] if "larger" in data else []
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return path


def publish(really: bool) -> Path:
    """Write the page of the results so far beside them, or `really` both where they are committed."""
    if not really:
        return write(home.results(), home.SO_FAR.with_name("language-performance.md"))
    home.PUBLISHED.write_text(json.dumps(home.results(), indent=1) + "\n")
    return write(home.results(), home.ROOT / "docs" / "language-performance.md")


# --- figures ----------------------------------------------------------------------------------------------------------


def _pairs(contest: Data) -> Iterator[tuple[int, Data, Data]]:
    """Threads, our cell, the peer's."""
    for threads in sorted({c["threads"] for c in contest["cells"]}):
        of = {c["engine"]: c for c in contest["cells"] if c["threads"] == threads}
        yield threads, of[OURS], of[PEER]


def _read_share(contest: Data, cell: Data, side: int) -> tuple[float, float]:
    """GB/s of active weights while decoding, and the share of what reading reaches."""
    rate = contest["active"][side] / cell["seconds"]["decode"] / 1e9
    return rate, rate / contest["reading"][str(cell["threads"])]


def _peak_share(contest: Data, cell: Data, tokens: int) -> tuple[float, float]:
    """GMAC/s in prefill, and the share of the peak."""
    rate = contest["macs"][str(tokens)] / cell["seconds"][f"prefill {tokens}"] / 1e9
    return rate, rate / contest["peak"][str(cell["threads"])]


def _memory_error(contest: Data) -> tuple[float, int]:
    """Resident bytes over what should be, less one; and what should be."""
    memory = contest["starts"][0]["memory"]
    due = memory["weights"] + memory["context"]
    return memory["resident"] / due - 1, due


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _prefills(contest: Data) -> list[int]:
    return sorted(map(int, contest["macs"]))


# --- sections ---------------------------------------------------------------------------------------------------------


def _opening(speed: Data) -> str:
    m, busy = speed["machine"], speed.get("busy", {})
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    load = max(busy.get("load", 0), m["load"])
    loud = (
        f"\n\n**The machine was not quiet** (load average {load:.1f} at the start): these figures are too low, and no "
    )
    loud += "goal is judged by them."
    config = SHAPES[speed["shape"]]
    quick = config["num_hidden_layers"] == 2
    of = "Two layers of OLMoE-1B-7B's shape" if quick else "OLMoE-1B-7B's shape"
    return f"""{of}: {weights(config) / 1e9:.2f} billion weights, {config["num_hidden_layers"]} layers of
{config["num_experts"]} experts, top-{config["num_experts_per_tok"]}, random weights. Peer: llama.cpp, built on this
machine for its instructions.

- *Machine*: {m["cpu"]}, {m["cpus"]} processors, {m["memory_gib"]} GiB; {", ".join(m["features"])}
- *System*: Linux {m["kernel"]}; {m["compiler"]}; Python {m["python"]}
- *Versions*: {versions}
- *Commit*: {m["commit"]}; *date*: {m["date"]}
- *Load average* at begin and end: {busy.get("load", 0):.1f} and {busy.get("load_at_end", 0):.1f}, up to 2 of it ours
- *Taken by the host* of the processors' time: {busy.get("stolen", 0):.1%}{loud if load > home.QUIET else ""}"""


def _goals(speed: Data) -> str:
    rows = []

    quiet = max(speed.get("busy", {}).get("load", 0), speed["machine"]["load"]) <= home.QUIET

    def add(what: str, goal: str, value: str, reached: bool) -> None:
        rows.append([what, goal, value, ("yes" if reached else "**no**") if quiet else "not judged"])

    for contest in speed["contests"]:
        kind = contest["kinds"][0]
        if kind == "int4" and contest["kinds"][1] == "Q4_K":
            continue  # ours is the same as beside Q4_0
        for threads, mine, _ in _pairs(contest):
            _, share = _read_share(contest, mine, 0)
            goal = _DECODE[kind]
            add(
                f"{kind}: decode, {_threads(threads)}, of the reading rate",
                f"≥ {goal:.0%}",
                percent(share),
                share >= goal,
            )
        for threads, mine, _ in _pairs(contest):
            for tokens in _prefills(contest):
                _, share = _peak_share(contest, mine, tokens)
                add(f"{kind}: prefill of {tokens}, {_threads(threads)}, of the int8 peak", f"≥ {_PREFILL:.0%}",
                    percent(share), share >= _PREFILL)  # fmt: skip
        ratio = _start_ratio(contest, "process")
        add(f"{kind}: time to the first token ÷ llama.cpp's", "≤ 1/3", f"{ratio:.2f}", ratio <= _START)
        error, _ = _memory_error(contest)
        add(f"{kind}: resident against weights touched + context", "within 2 %", f"{error:+.1%}", abs(error) <= _MEMORY)
    for found in speed["far"]:
        mine = next(c for c in found["cells"] if c["engine"] == OURS)
        if found["cells"][1]["kind"] == "Q4_K":
            continue
        ratio = mine["far"] / mine["near"]
        add(f"{mine['kind']}, cache {mine['cache']}: position 4,096 ÷ position 64", f"≤ {_FAR}", f"{ratio:.2f}",
            ratio <= _FAR)  # fmt: skip
    return "## Goals\n\n" + table(["what", "goal", "measured", "reached"], rows)


def _decode(speed: Data) -> str:
    rows = []
    for contest in speed["contests"]:
        for threads, *cells in _pairs(contest):
            shown = [f"{contest['kinds'][0]} / {contest['kinds'][1]}", threads,
                     f"{contest['reading'][str(threads)]:.1f} GB/s"]  # fmt: skip
            for side, cell in enumerate(cells):
                rate, share = _read_share(contest, cell, side)
                shown.append(f"{1 / cell['seconds']['decode']:.1f}")
                shown.append(f"{rate:.1f} GB/s ({percent(share)})")
            times = [cell["seconds"]["decode"] for cell in cells]
            rows.append([*shown, f"**{times[1] / times[0]:.2f}×**"])
    active = "; ".join(f"{contest['kinds'][side]} {size_of(contest['active'][side])}"
                       for contest in speed["contests"] for side in (0, 1))  # fmt: skip
    head = ["weights", "threads", "reading", "Colibri, tokens/s", "reads", "llama.cpp, tokens/s", "reads", "faster"]
    return f"""## Decoding, one token at a time

{table(head, rows)}

Bytes of weights a token reads: {active}."""


def _prefill(speed: Data) -> str:
    rows = []
    for contest in speed["contests"]:
        for threads, *cells in _pairs(contest):
            for tokens in _prefills(contest):
                shown = [f"{contest['kinds'][0]} / {contest['kinds'][1]}", threads, tokens,
                         f"{contest['peak'][str(threads)]:.0f}"]  # fmt: skip
                for cell in cells:
                    rate, share = _peak_share(contest, cell, tokens)
                    shown.append(f"{tokens / cell['seconds'][f'prefill {tokens}']:.0f}")
                    shown.append(f"{rate:.0f} ({percent(share)})")
                times = [cell["seconds"][f"prefill {tokens}"] for cell in cells]
                rows.append([*shown, f"**{times[1] / times[0]:.2f}×**"])
    names = ", ".join(dict.fromkeys(contest["peak_name"] for contest in speed["contests"]))
    kernels = ", ".join(dict.fromkeys(contest["kernels"] for contest in speed["contests"]))
    head = ["weights", "threads", "tokens", "peak, GMAC/s", "Colibri, tokens/s", "GMAC/s",
            "llama.cpp, tokens/s", "GMAC/s", "faster"]  # fmt: skip
    return f"""## Evaluating a prompt

{table(head, rows)}

The peak is that of *{names}* (`benchmarks/limits`); Colibri's kernels: {kernels}. Multiply-accumulates are those with
weights. Where the processor has matrix tiles (AMX) llama.cpp uses them, beyond this peak; Colibri does not."""


def _start_ratio(contest: Data, what: str) -> float:
    mine, theirs = (statistics.median(side[what]) for side in contest["starts"])
    return float(mine / theirs)


def _starts(speed: Data) -> str:
    rows = []
    for contest in speed["contests"]:
        for what, said in (("process", "process"), ("library", "end of imports")):
            times = [statistics.median(side[what]) for side in contest["starts"]]
            rows.append([f"{contest['kinds'][0]} / {contest['kinds'][1]}", said, *(f"{t:.2f} s" for t in times),
                         f"**{times[1] / times[0]:.1f}×**"])  # fmt: skip
    return f"""## Time to the first token

From Python, page cache warm, two threads, a prompt of 16 tokens.

{table(["weights", "counted from the start of the", "Colibri", "llama.cpp", "faster"], rows)}"""


def _memory(speed: Data) -> str:
    rows = []
    for contest in speed["contests"]:
        for side, found in enumerate(contest["starts"]):
            memory = found["memory"]
            due = f"{size_of(memory['weights'])} + {size_of(memory['context'])}" if "weights" in memory else ""
            over = f"{_memory_error(contest)[0]:+.1%}" if due else ""
            rows.append([found["engine"], contest["kinds"][side], size_of(contest["bytes"][side]),
                         size_of(memory["resident"]), due, over])  # fmt: skip
    return f"""## Memory

Resident bytes after a text of 512 tokens, less those of the interpreter and the libraries.

{table(["", "weights", "file", "resident", "weights touched + context", "over that"], rows)}

Of Colibri's file only what is touched is resident: experts never chosen and rows of the embedding never looked up are
not (64 KB are counted for each row looked up; the kernel may map more around it)."""


def _far(speed: Data) -> str:
    rows = [
        [c["engine"], c["kind"], c["cache"], f"{c['near'] * 1e3:.1f} ms", f"{c['far'] * 1e3:.1f} ms",
         f"**{c['far'] / c['near']:.2f}×**"]
        for found in speed["far"] for c in found["cells"]
    ]  # fmt: skip
    if not rows:
        return ""
    threads = speed["far"][0]["threads"]
    return f"""## Far into a text

A token at position 64 and at position 4,096, {threads} threads. OLMoE keeps 32 heads' rows a layer and token, 131 KB in
fp16: at position 4,096 that is 0.54 GB beside the weights. llama.cpp's int8 cache is its Q8_0.

{table(["", "weights", "cache", "at 64", "at 4,096", "dearer"], rows)}"""


def _touched(speed: Data) -> str:
    contest = speed["contests"][0]
    return percent(contest["starts"][0]["memory"]["weights"] / contest["bytes"][0])


def _method(speed: Data) -> str:
    from benchmarks.language.serve import TEXT
    from colibri.pipeline.language import CHUNK

    return f"""## How it is measured

- Each engine is alone in a Python process, its model loaded; two processes, Colibri's and the peer's, are alive
  together and asked in turn, {speed["rounds"]} rounds, the order changing; figures are medians over rounds. A round
  decodes 32 tokens from position 64 (median token) and evaluates texts of 128 and 512. Different random tokens each
  round, the same for both.
- The *reading rate* and the *int8 peak* are measured in every round by `benchmarks/language/probe.c` (reading 1 GB in
  huge pages, sequential or four streams, whichever is faster; best of 3), the median over the rounds.
- llama.cpp has its defaults: it may copy weights into an order its kernels like better, chunks of 512 tokens, flash
  attention as it decides. Colibri: `export_lm`'s defaults (int8 activations, chunks of {CHUNK} tokens), cache fp16
  unless said otherwise. Contexts of 4,352 tokens on both sides.
- Weights are random, of sizes that keep the residual stream as a trained model's is (`shapes.deviation`), so that
  routes depend on the token: a text of {TEXT} tokens touches {_touched(speed)} of Colibri's weights.

```sh
python -m benchmarks.language.speed --publish
```"""


def _quality(quality: Data) -> str:
    rows = [
        [r["name"], r["engine"], size_of(r["bytes"]), f"{r['bits']:.2f}", f"{r['perplexity']:.3f}", f"{r['kl']:.6f}",
         f"{r['kl99']:.5f}", f"{r['top']:.2%}"]
        for r in quality["rows"]
    ]  # fmt: skip
    head = [
        "weights",
        "computed by",
        "bytes",
        "bits a weight",
        "perplexity",
        "KL",
        "KL, 99th percentile",
        "same first token",
    ]
    load = f" {quality['note']}" if quality.get("note") else ""
    return f"""## Quality

The storyteller (`examples/storyteller`), {quality["tokens"]:,} tokens of its validation text in pieces of
{quality["context"]}; Kullback-Leibler divergence from float32, in nats a token.{load}

{table(head, rows)}

- *E* are the sparse outliers of the exporter, with the share of bytes they take; *float activations*: products with
  float32 instead of 8-bit activations.
- *llama.cpp* rows are GGUF files of the same weights, quantised by `llama_model_quantize` (pure) and computed by
  llama.cpp, with 8-bit activations. This model's down projections have rows of 48, which no format of blocks of 32
  holds: llama.cpp leaves them in 16 bits. The rows *in blocks* are the same formats by the `gguf` package, every
  matrix quantised (rows of 48 filled up to 64), computed in float32 by Colibri: what the format alone costs.
- Bytes are those of the tensors, one copy of embedding and output, which are the same in this model; bits a weight
  count everything.
- Q4_K has blocks of 256 and this model rows of 160: llama.cpp would store Q5_0 instead. *Q4_K in blocks* is by its
  quantiser, blocks going on from row to row.

```sh
python -m benchmarks.language.quality --publish
```"""


def _larger(larger: Data) -> str:
    rows = [
        [r["limit"], r["policy"], f"{r['tokens_s']:.2f} ({r['slowest']:.2f} to {r['fastest']:.2f})", size_of(r["read"])]
        for r in larger["rows"]
    ]  # fmt: skip
    return f"""## Larger than memory

{larger["shape"]}, int4, {size_of(larger["bytes"])} of file, mapped by the host layer; {larger["threads"]} threads;
{larger["tokens"]} tokens a run after {larger["fill"]} that fill memory, {larger["rounds"]} rounds in turn; load average
{larger["load"]:.1f}.

{table(["memory", "way", "tokens/s (slowest to fastest)", "read a token"], rows)}

*Faults*: the mapping and nothing else. *Announced*: `colibri_prefetch_announce` as the route hook. Random weights make
routes that hardly repeat: a trained model's locality is missing, so this is the hardest case. A memory limit is a
control group's; the model's pages count in it. All ways gave the same bits.

```sh
python -m benchmarks.language.larger --export --publish
```"""
