"""One engine in a process of its own: answers a JSON request a line.

    serve ENGINE FILE THREADS CONTEXT CACHE [first]

{"do": "decode", "at": p, "count": n}    -> {"ns": [n times of one token, from position p on]}
{"do": "prefill", "count": n}            -> {"ns": of evaluating n tokens as a new text}
{"do": "memory"}                         -> resident bytes after a text, and what they should be where known
With `first` the process evaluates a prompt before it says that it is ready.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.language.engines import ENGINES

PROMPT = 16  # tokens before the first token
LONGEST = 8192  # tokens drawn
TEXT = 512  # tokens after which memory is looked at


def main() -> None:
    """Load, say so, answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = ENGINES[sys.argv[1]]()
    path, threads, context, cache = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    engine.imports()
    imported, before = time.monotonic(), _resident()
    engine.load(path, threads, context, cache)
    loaded = time.monotonic()
    if sys.argv[6:]:
        logits = engine.append(_text(engine, 0)[:PROMPT])
        _ = float(logits[0])
    ready = {"imported": imported, "loaded": loaded, "ready": time.monotonic(), "kernels": engine.kernels}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _answer(engine, request, before)
        except Exception as error:  # what an engine raises is a result
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def _answer(engine: Any, request: dict[str, Any], before: int) -> dict[str, Any]:
    ids = _text(engine, request.get("seed", 0))
    if request["do"] == "decode":
        at, took = request["at"], []
        engine.reset()
        engine.append(ids[:at])
        for token in ids[at : at + request["count"]]:
            begin = time.perf_counter_ns()
            engine.append([token])
            took.append(time.perf_counter_ns() - begin)
        return {"ns": took}
    if request["do"] == "prefill":
        engine.reset()
        begin = time.perf_counter_ns()
        engine.append(ids[: request["count"]])
        return {"ns": time.perf_counter_ns() - begin}
    engine.reset()
    engine.append(ids[:TEXT])
    found = {"resident": _resident() - before, "libraries": before}
    return {**found, **(engine.should_take(ids[:TEXT]) if hasattr(engine, "should_take") else {})}


def _text(engine: Any, seed: int) -> list[int]:
    return random.Random(seed).choices(range(engine.vocabulary), k=LONGEST)


def _resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


if __name__ == "__main__":
    main()
