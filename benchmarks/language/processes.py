"""Starting engines as processes, asking them, timing their start, and measuring the machine's limits between."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.language.home import FILES, HERE, ROOT

_PAUSE = 0.2  # seconds between samples: a pool's threads spin for a while after its last call


@dataclass(frozen=True)
class Side:
    """An engine and its model."""

    engine: str
    kind: str  # the format of its weights
    path: Path
    context: int
    cache: str


class Process:
    """An engine that has loaded its model, and with `first` evaluated a prompt."""

    def __init__(self, side: Side, threads: int, first: bool = False) -> None:
        self.side = side
        command = [sys.executable, "-m", "benchmarks.language.serve", side.engine, str(side.path), str(threads),
                   str(side.context), side.cache, *(["first"] if first else [])]  # fmt: skip
        self._begin = time.monotonic()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, text=True, env=environment(), cwd=ROOT)  # fmt: skip
        self.ready = self._answer()

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """The answer to a request."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        time.sleep(_PAUSE)
        return answer

    def start_times(self) -> dict[str, float]:
        """Seconds from the start of the process, and from the end of its imports, until it was ready."""
        return {"process": self.ready["ready"] - self._begin, "library": self.ready["ready"] - self.ready["imported"]}

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.side.engine} with {self.side.path.name} ended: code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise SystemExit(f"{self.side.engine} with {self.side.path.name}: {answer['failed']}")
        return answer


def environment() -> dict[str, str]:
    """Of a process: what would bind or limit the peer's threads is left out, NumPy's own are of no use."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    return {**kept, "OPENBLAS_NUM_THREADS": "1"}


def probe(samples: int = 5) -> list[dict[str, Any]]:
    """The machine's limits as they are now, as probe.c prints them."""
    program, sources = FILES / "probe", [HERE / "probe.c", HERE.parent / "limits" / "limits.c"]
    if not program.exists() or program.stat().st_mtime < max(s.stat().st_mtime for s in sources):
        subprocess.run(["gcc", "-O3", "-march=native", "-pthread", sources[0], "-o", program], check=True)
    done = subprocess.run([program, str(samples)], capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def limit(probes: list[list[dict[str, Any]]], names: tuple[str, ...], threads: int) -> float:
    """The median over all probes of the best sample: the faster way of reading, the better instruction."""
    best = [max(s["best"] for s in each if s["name"] in names and s["threads"] == threads) for each in probes]
    return statistics.median(best)


def warm(path: Path) -> None:
    """Read a file, so that it is in the page cache."""
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass


def drop(path: Path) -> None:
    """Give up the pages of a file that nobody has mapped."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
