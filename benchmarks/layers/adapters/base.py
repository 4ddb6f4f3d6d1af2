"""What a peer must offer the harness."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.environment import ROOT, thread_environment
from benchmarks.layers.sizes import Array, Size

LAYERS = ROOT / "benchmarks" / "layers"
WORKER = (sys.executable, "-m", "benchmarks.layers.worker")  # in ROOT


class Adapter:
    """One peer, alone in its process.

    `build` makes the peer's files once, in a process of its own; `prepare` only loads them, so that memory and start-up
    are those of running, not of converting.
    """

    sources: tuple[str, ...] = ()  # of `build`, in benchmarks/layers/
    size: Size  # set by `prepare`

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self.options = name, options

    def folder(self, size: Size) -> Path:
        """Where the peer's files for `size` are."""
        path = size.path / self.name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def fingerprint(self) -> str:
        """Changes when the files must be made anew: with the code that makes them."""
        files = [LAYERS / name for name in ("sizes.py", *self.sources)]
        return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()

    def stale(self, size: Size) -> bool:
        """Whether `build` must run."""
        done = self.folder(size) / "done"
        return not done.exists() or done.read_text() != self.fingerprint()

    def make(self, size: Size) -> None:
        """Build unless that was done; peers that share files wait for each other."""
        with (self.folder(size) / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.stale(size):
                for file in self.folder(size).iterdir():
                    if file.is_file() and file.name != "lock":
                        file.unlink()  # some writers append
                self.build(size)
                (self.folder(size) / "done").write_text(self.fingerprint())

    def build(self, size: Size) -> None:
        """Make the files `prepare` loads."""

    def imports(self) -> None:
        """Import the peer's library: memory is counted from here."""

    def prepare(self, size: Size, threads: int) -> None:
        """Load the layer, to run with `threads` threads."""
        raise NotImplementedError

    def run(self, x: Array) -> Any:
        """x (batch, d) float32 -> y (batch, d)."""
        raise NotImplementedError

    @property
    def weight_bytes(self) -> int:
        """Bytes of the files it loads."""
        kinds = (".bin", ".data", ".onnx", ".pte", ".pt")
        return sum(f.stat().st_size for f in self.folder(self.size).iterdir() if f.suffix in kinds)

    def time(self, xs: Array, calls: int, first: int) -> int:
        """Nanoseconds of `calls` calls on the inputs in turn, from number `first` on."""
        rows = [xs[(first + n) % len(xs)] for n in range(min(calls, len(xs)))]
        start = time.perf_counter_ns()
        for n in range(calls):
            self.run(rows[n % len(rows)])
        return time.perf_counter_ns() - start

    def outputs(self, xs: Array) -> Array:
        """The outputs of all inputs."""
        return np.stack([np.array(self.run(x), np.float32, copy=True) for x in xs])

    def start(self, size: Size, inputs: Path) -> subprocess.Popen[str]:
        """A fresh process that loads the layer, runs one row and says "ready"; then it answers "memory"."""
        command = [*WORKER, self.name, size.name, "1", str(inputs)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                text=True, env=thread_environment(1), cwd=ROOT)  # fmt: skip


class Driven(Adapter):
    """A peer that runs in the loop of driver.c, in C from end to end."""

    def program(self) -> Path:
        """The compiled driver."""
        raise NotImplementedError

    def model(self, size: Size) -> Path:
        """The file the driver maps."""
        raise NotImplementedError

    def prepare(self, size: Size, threads: int) -> None:
        self.size = size
        self._process = subprocess.Popen([self.program(), self.model(size), str(threads)], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)  # fmt: skip
        self._loaded = b""

    def ask(self, line: str) -> str:
        """The driver's answer to one line."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the driver ended with code {self._process.wait()}")
        return answer.strip()

    def _load(self, xs: Array) -> None:
        if (held := xs.tobytes()) != self._loaded:
            with tempfile.NamedTemporaryFile(suffix=".f32") as file:
                file.write(held)
                file.flush()
                self.ask(f"load {xs.shape[1]} {xs.shape[0]} {file.name}")
            self._loaded = held

    def run(self, x: Array) -> Array:
        y: Array = self.outputs(x[None])[0]
        return y

    def time(self, xs: Array, calls: int, first: int) -> int:
        self._load(xs)
        return int(self.ask(f"time {calls} {first % len(xs)}"))

    def outputs(self, xs: Array) -> Array:
        self._load(xs)
        with tempfile.NamedTemporaryFile(suffix=".f32") as file:
            self.ask(f"write {file.name}")
            y: Array = np.fromfile(file.name, np.float32).reshape(*xs.shape[:2], -1)
            return y

    def start(self, size: Size, inputs: Path) -> subprocess.Popen[str]:
        return subprocess.Popen([self.program(), self.model(size), "1", inputs], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip


def memory_line(resident: int) -> str:
    """Resident bytes at the start and the peak since, as driver.c prints them."""
    return f"{resident} {status_bytes('VmHWM')}"


def status_bytes(field: str) -> int:
    """A memory field of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))
