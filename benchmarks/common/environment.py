"""The benchmark's own virtual environment, and what machine and versions it ran on. Standard library only."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "bench"
VENV = BUILD / "venv"
PYTHON = VENV / "bin" / "python"
ENGINE = BUILD / "engine"  # libcolibri.a and libcolibri.so, built by the engine's own Makefile

REQUIRED = ["numpy==2.4.6", "matplotlib==3.11.2", "rich==15.0.0"]
# Each peer is installed on its own, so that one that cannot be had leaves the others; the import proves it works.
PEERS: dict[str, tuple[list[str], str]] = {
    "onnxruntime": (["onnxruntime==1.32.0", "onnx==1.23.2"], "import onnxruntime, onnx"),
    "torch": (["torch==2.13.0"], "import torch"),
    "executorch": (["torch==2.13.0", "executorch==1.5.1"], "import executorch.runtime"),
}
_FEATURES = ("fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8")  # as the kernel calls them
_ABSENT, _STAMP = BUILD / "absent.json", BUILD / "venv.stamp"


def setup() -> None:
    """Create or refresh the environment and the engine's libraries; remembers why a peer could not be installed."""
    BUILD.mkdir(parents=True, exist_ok=True)
    _run(["make", "-s", "-C", str(ROOT / "engine"), f"BUILD={ENGINE}"])
    stamp = _inputs_digest()
    if PYTHON.exists() and _STAMP.exists() and _STAMP.read_text() == stamp:
        return
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
    print("benchmark environment: Colibri", flush=True)
    _run([*_pip(), *REQUIRED, "-e", str(ROOT)])
    reasons: dict[str, str] = {}
    for name, (requirements, check) in PEERS.items():
        print(f"benchmark environment: {name}", flush=True)
        for command in ([*_pip(), *requirements], [str(PYTHON), "-c", check]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                reasons[name] = _reason(done.stderr or done.stdout)
                break
    _ABSENT.write_text(json.dumps(reasons, indent=1))
    _STAMP.write_text(stamp)


def absent() -> dict[str, str]:
    """The peers that could not be installed or imported, and why."""
    return dict(json.loads(_ABSENT.read_text())) if _ABSENT.exists() else {}


def machine() -> dict[str, Any]:
    """What the results depend on: processor, memory, compiler, versions, commit, date and the load at the start."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    flags = re.search(r"flags\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    compiler = subprocess.run(["gcc", "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
                            capture_output=True, text=True, check=False).stdout.strip()  # fmt: skip
    dirty = subprocess.run(["git", "-C", str(ROOT), "status", "--porcelain", "--", "engine", "src"],
                           capture_output=True, text=True, check=False).stdout.strip()  # fmt: skip
    wanted = ["colibri-moe", "numpy", *(r.split("==")[0] for requirements, _ in PEERS.values() for r in requirements)]
    return {
        "cpu": cpu[1] if cpu else platform.processor(),
        "cpus": os.cpu_count(),
        "features": [f for f in _FEATURES if flags and f in flags[1].split()],
        "caches": caches(),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "kernel": platform.release().split("-")[0],
        "compiler": compiler[0] if compiler else "none",
        "python": platform.python_version(),
        "versions": {name: version for name in dict.fromkeys(wanted) if (version := _version(name))},
        "commit": (commit or "unknown") + (" with uncommitted changes" if dirty else ""),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load": os.getloadavg()[0],
    }


def caches() -> dict[str, int]:
    """Bytes of the data caches one core sees: L1, L2, L3."""
    sizes: dict[str, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (index / "type").read_text().strip() != "Instruction":
            sizes["L" + (index / "level").read_text().strip()] = int((index / "size").read_text().strip()[:-1]) << 10
    return sizes


def available_bytes() -> int:
    """Memory that processes can still have."""
    match = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
    return int(match[1]) << 10 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def thread_environment(threads: int) -> dict[str, str]:
    """The process environment that keeps every library's pool at `threads`, and caches out of the home directory."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    inductor = {"TORCHINDUCTOR_CACHE_DIR": str(BUILD / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    kept = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    return {**kept, **dict.fromkeys(names, str(threads)), **inductor}


def _pip() -> list[str]:
    return [str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check"]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr or done.stdout}")


def _inputs_digest() -> str:
    ours = [f for f in ROOT.glob("src/colibri/_engine_*") if f.suffix in (".c", ".py")]
    files = [*ROOT.glob("engine/**/*.[ch]"), ROOT / "engine/Makefile", ROOT / "pyproject.toml", *ours]
    text = repr((REQUIRED, PEERS)).encode() + b"".join(f.read_bytes() for f in sorted(files))
    return hashlib.sha256(text).hexdigest()


def _reason(text: str) -> str:
    """The last line that says something, without addresses: results are published."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return re.sub(r"\S+://\S+|/\S+/\S+", "…", lines[-1] if lines else "no message")[:300]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
