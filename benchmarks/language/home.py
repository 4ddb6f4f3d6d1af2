"""Where the language benchmarks' files and environment are, and what else the machine is doing. Standard library only.

COLIBRI_BENCH_FILES names the directory for models and the environment; by default build/bench/language.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

FILES = Path(os.environ.get("COLIBRI_BENCH_FILES", ROOT / "build" / "bench" / "language")).resolve()
VENV = FILES / "peers"
PYTHON = VENV / "bin" / "python"
SO_FAR, PUBLISHED = FILES / "results.json", HERE / "results.json"
_PATIENCE = 300.0  # seconds
QUIET = 0.5  # load average above which other work runs beside
# gcc 12 does not know that ldtilecfg reads memory and drops the stores before it: the peer's AMX kernels would die.
_KEEP_STORES = "-fno-tree-dse -fno-dse"
_PEER_FLAGS = f"-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF '-DCMAKE_CXX_FLAGS={_KEEP_STORES}'"
_SUFFIXES = (".bin", ".gguf", ".partial", ".journal")


def enter() -> None:
    """Make the environment where it is missing or old, and go on in it."""
    FILES.mkdir(parents=True, exist_ok=True)
    stamp = VENV / "stamp"
    if not stamp.exists() or stamp.read_text() != _digest():
        if not PYTHON.exists():
            venv.create(VENV, with_pip=True)
        print("environment: building the peer, 15 to 40 minutes the first time", flush=True)
        pip = ["nice", "-n", "15", str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        native = {**os.environ, "CMAKE_ARGS": _PEER_FLAGS}
        for wanted in (["-r", str(HERE / "requirements.txt")], ["-e", f"{ROOT}[lm]"]):
            subprocess.run([*pip, *wanted], env=native, check=True)
        stamp.write_text(_digest())
    if Path(sys.prefix).resolve() != VENV:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's; models have threads of their own
        os.execv(PYTHON, [str(PYTHON), *sys.orig_argv[1:]])


def _digest() -> str:
    ours = [f for f in ROOT.glob("src/colibri/_engine_*") if f.suffix in (".c", ".py")]
    files = [HERE / "requirements.txt", *ROOT.glob("engine/**/*.[ch]"), ROOT / "pyproject.toml", *ours]
    return hashlib.sha256(str(ROOT).encode() + b"".join(f.read_bytes() for f in sorted(files))).hexdigest()


def require_quiet(anyway: bool) -> None:
    """End where other work runs beside, or with `anyway` warn; what has just ended is given time to be forgotten."""
    begin = time.monotonic()
    while (load := os.getloadavg()[0]) > QUIET:
        said = f"the load average is {load:.1f}, above {QUIET}: other work would disturb the figures"
        if anyway:
            print(f"warning: {said}; they are marked so", flush=True)
            return
        if time.monotonic() - begin > _PATIENCE:
            sys.exit(f"{said}; measure all the same with --loaded")
        print(f"{said}; waiting", flush=True)
        time.sleep(20)


class Busy:
    """Processor use between two points in time: shares of stolen time (the host's other guests) and of load."""

    def __init__(self) -> None:
        self._begin, self.load = _ticks(), os.getloadavg()[0]

    def result(self) -> dict[str, float]:
        """Load averages, and the share of time stolen."""
        spent = [b - a for a, b in zip(self._begin, _ticks(), strict=True)]
        return {"load": self.load, "load_at_end": os.getloadavg()[0], "stolen": spent[7] / max(1, sum(spent[:8]))}


def _ticks() -> list[int]:
    return [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]


def make_room(size: float, keep: Iterable[Path], limit: float) -> None:
    """Delete model files, those used longest ago first, until `size` more bytes keep within `limit` in all."""
    kept = set(keep)
    files = [f for f in FILES.glob("*") if f.suffix in _SUFFIXES]
    total = sum(f.stat().st_size for f in files)
    for file in sorted((f for f in files if f not in kept), key=lambda f: max(f.stat().st_atime, f.stat().st_mtime)):
        if total + size <= limit:
            return
        total -= file.stat().st_size
        print(f"deleting {file.name} to make room", flush=True)
        file.unlink()
    if total + size > limit:
        sys.exit(f"{(total + size) / 1e9:.0f} GB of models are needed at once: raise --disk ({limit / 1e9:.0f} GB)")


def results() -> dict[str, Any]:
    """The sections so far: those of this directory over the published ones."""
    found: dict[str, Any] = {}
    for file in (PUBLISHED, SO_FAR):
        found |= json.loads(file.read_text()) if file.exists() else {}
    return found


def save(section: str, value: Any) -> None:
    """Replace a section of the results so far."""
    found = json.loads(SO_FAR.read_text()) if SO_FAR.exists() else {}
    SO_FAR.write_text(json.dumps({**found, section: value}, indent=1) + "\n")
