"""The host layer as one shared library, a model with experts of many pages, and children to do dangerous things in."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import pickle
import platform
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import exporter
from colibri.format import package, spec
from colibri.ir.graph import Graph, Router
from colibri.runtime.engine import aligned
from tests import graphs
from tests.engine.conftest import Build, build_engine, compiler

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = os.sysconf("SC_PAGESIZE")
LAYERS, EXPERTS, WIDTH, HIDDEN = 2, 6, 48, 700
NOBODY = 65534
CODES = {name: code for code, (name, _) in enumerate(spec.ERRORS)}
WEIGHTS, UNCHECKED, UNGUARDED = 1, 2, 4


class Progress(ctypes.Structure):
    """colibri_progress_t."""

    _fields_ = (("experts", ctypes.c_int32), ("bytes", ctypes.c_uint64))


class Counts(ctypes.Structure):
    """colibri_prefetch_counts_t."""

    _fields_ = tuple((n, ctypes.c_uint64) for n in ("announced", "dropped", "late", "hits", "misses", "bytes",
                                                    "failures", "nanoseconds", "faults"))  # fmt: skip


class Context(ctypes.Structure):
    """The head of colibri_context_t."""

    _fields_ = (("status", ctypes.c_int32), ("max_batch", ctypes.c_int32), ("input_size", ctypes.c_uint32),
                ("output_size", ctypes.c_uint32), ("on_route", ctypes.c_void_p), ("user", ctypes.c_void_p))  # fmt: skip


class Host:
    """The library's functions, by name without `colibri_`."""

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(str(library), use_errno=True)
        for name, result in (("map_model", ctypes.c_void_p), ("init", ctypes.c_void_p), ("model_size", ctypes.c_size_t),
                             ("error_name", ctypes.c_char_p)):  # fmt: skip
            getattr(self.lib, f"colibri_{name}").restype = result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lib, f"colibri_{name}")


class Map:
    """An open colibri_map_t and a context on it; `error` is the name of what opening returned, beside errno."""

    def __init__(self, host: Host, path: Path, options: int = 0) -> None:
        self.host, self.memory = host, (ctypes.c_uint64 * 16)()
        ctypes.set_errno(0)
        self.error = name(host.map_open(self.memory, os.fsencode(path), options))
        self.errno = ctypes.get_errno()
        self.context: Any = None
        self.prefetchers: list[Any] = []

    @property
    def address(self) -> int:
        return int(self.host.map_model(self.memory) or 0)

    @property
    def status(self) -> str:
        return name(self.host.map_status(self.memory))

    def close(self) -> None:
        for memory in self.prefetchers:
            self.host.prefetch_stop(memory)
        self.host.map_close(self.memory)

    def start(self) -> Context:
        """A context."""
        if self.context is None:
            model = ctypes.c_void_p(self.address)
            self.block = aligned(self.host.model_size(model), spec.ALIGN_CONTEXT)
            at = self.host.init(ctypes.c_void_p(self.block.ctypes.data), ctypes.c_size_t(len(self.block)), model)
            assert at, "the context could not be prepared"
            self.context = Context.from_address(at)
        return self.context

    def forward(self, x: np.ndarray[Any, Any]) -> bytes:
        """The output rows' bytes."""
        context = self.start()
        y = np.empty((len(x), context.output_size), np.float32)
        self.host.forward(ctypes.byref(context), ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), len(x))
        assert context.status == 0
        return y.tobytes()

    def act(self, verb: str, *experts: int) -> tuple[str, int, int]:
        """Lock, unlock or release experts: the error's name, how many, how many bytes."""
        done = Progress(-1, 0)
        numbers = (ctypes.c_int32 * len(experts))(*experts)
        error = getattr(self.host, f"map_{verb}")(self.memory, numbers, len(experts), ctypes.byref(done))
        return name(error), done.experts, done.bytes

    def resident(self, offset: int, size: int) -> int:
        """Pages of a range of the file that are in memory."""
        pages = -(-size // PAGE)
        found = (ctypes.c_ubyte * pages)()
        start = ctypes.c_void_p(self.address + offset)
        assert LIBC.mincore(start, ctypes.c_size_t(size), found) == 0
        return sum(b & 1 for b in found)


def name(code: int) -> str:
    """An error's name, without the prefix."""
    return spec.ERRORS[code][0]


def in_child(act: Callable[[], Any]) -> Any:
    """What `act` returns in a child process, or minus the signal that ended it; fails with its traceback."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        try:
            result = (True, act())
        except BaseException:
            result = (False, traceback.format_exc())
        os.write(write, pickle.dumps(result))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        return status
    fine, result = pickle.loads(answer)
    assert fine, result
    return result


def become_nobody() -> None:
    """Give up root, in a child."""
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return build_engine(compiler("gcc"), tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="session")
def host(build: Build) -> Host:
    library = build.directory / "host.so"
    archives = [str(build.directory / f"{n}.a") for n in ("libcolibri_host", "libcolibri")]
    command = [compiler("gcc"), "-shared", "-Wl,--whole-archive", *archives, "-Wl,--no-whole-archive", "-o", library]
    subprocess.run(command, check=True)
    return Host(library)


@functools.cache
def exported() -> exporter.Export:
    """Two layers of six experts, each of 67 pages or more."""
    graph = Graph("host")
    rng = np.random.default_rng(1)
    x = graph.add_input("x", (WIDTH,))
    for layer in range(LAYERS):
        logits = graphs.linear(graph, rng, x, EXPERTS, True)
        experts = [graphs.expert(layer * EXPERTS + e, WIDTH, HIDDEN, WIDTH, 0) for e in range(EXPERTS)]
        x = graph.add("moe", x, logits, router=Router(EXPERTS, 2, "softmax", "sum"), experts=experts)
    graph.outputs = [x]
    return exporter.build(graph, max_batch=4)


@functools.cache
def parsed() -> package.Package:
    """Its metadata, read without touching a file: that alone would bring much of a small one into memory."""
    return package.parse(np.frombuffer(exported().image, np.uint8), "model")


def pages_of(expert: int) -> tuple[int, int]:
    """Where an expert begins in the file, and the bytes of its pages."""
    e = parsed().experts[expert]
    return int(e["offset"]), -(-int(e["bytes"]) // PAGE) * PAGE


@pytest.fixture(scope="session")
def export() -> exporter.Export:
    return exported()


@pytest.fixture
def model(export: exporter.Export, tmp_path: Path) -> Path:
    """The model in a file of its own, on the disk: pages that are still to be written cannot be dropped."""
    path = tmp_path / "model.bin"
    with path.open("wb") as file:
        file.write(export.image)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o644)
    for folder in tmp_path.parents:  # for a child without root's rights
        if folder.owner() == tmp_path.owner() and "pytest" in str(folder):
            folder.chmod(folder.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    return path


@pytest.fixture(scope="session")
def rows() -> np.ndarray[Any, Any]:
    return np.random.default_rng(2).standard_normal((4, WIDTH), np.float32)


class Filter(ctypes.Structure):
    """sock_filter: one instruction of a seccomp program."""

    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class Program(ctypes.Structure):
    """sock_fprog."""

    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(Filter)))


SYSTEM_CALLS = {"x86_64": {"mlock": 149, "madvise": 28}, "aarch64": {"mlock": 228, "madvise": 233}}


def refuse(call: str, error: int, third: int | None = None) -> None:
    """Have the kernel answer a system call (whose third argument is `third`) with `error`, in a child."""
    number = SYSTEM_CALLS.get(platform.machine(), {}).get(call)
    load, equal, end, allow, fail = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    assert number is not None
    steps = [(load, 0, 0, 0), (equal, 0, 3 if third is not None else 1, number)]
    if third is not None:
        steps += [(load, 0, 0, 32), (equal, 0, 1, third)]
    steps += [(end, 0, 0, fail | error), (end, 0, 0, allow)]
    program = Program(len(steps), (Filter * len(steps))(*(Filter(*s) for s in steps)))
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert LIBC.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert LIBC.prctl(set_seccomp, filter_mode, ctypes.byref(program), 0, 0) == 0


needs_filter = pytest.mark.skipif(platform.machine() not in SYSTEM_CALLS, reason="system call numbers not known here")
