"""A mapped model file: opened with a named error for every reason it cannot be, and harmless whatever becomes of it."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import mmap
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import exporter
from colibri.reference.interpreter import run
from tests.engine.conftest import C_FLAGS, compile_c, compiler
from tests.host.conftest import (
    CODES,
    LIBC,
    PAGE,
    UNCHECKED,
    UNGUARDED,
    WEIGHTS,
    Host,
    Map,
    become_nobody,
    in_child,
    name,
    parsed,
)  # fmt: skip
from tools import size

Rows = np.ndarray[Any, Any]


@pytest.fixture
def want(export: exporter.Export, rows: Rows) -> bytes:
    return run(export.graph, [rows])[0].tobytes()


@pytest.mark.parametrize("options", [0, WEIGHTS, UNCHECKED, UNGUARDED, WEIGHTS | UNGUARDED])
def test_a_mapped_model_gives_the_reference(host: Host, model: Path, rows: Rows, want: bytes, options: int) -> None:
    opened = Map(host, model, options)
    assert opened.error == "OK"
    assert opened.forward(rows) == want
    assert opened.status == "OK"
    opened.close()
    assert (opened.address, opened.status) == (0, "NULL")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_closing_twice_or_what_was_never_open_closes_nothing_else(host: Host, model: Path) -> None:
    never = (ctypes.c_uint64 * 16)()
    before = open_files()
    host.map_close(never)
    opened = Map(host, model)
    opened.close()
    opened.close()
    assert open_files() == before


# --- files that cannot be opened --------------------------------------------------------------------------------------


def _edit(at: int, value: bytes) -> Callable[[Path], object]:
    def edit(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(value)

    return edit


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


BAD_FILES: dict[str, tuple[Callable[[Path], object], str, int]] = {
    "missing": (lambda path: path.unlink(), "OPEN_FAILED", errno.ENOENT),
    "a directory": (_directory, "OPEN_FAILED", errno.EISDIR),
    "a pipe": (_fifo, "OPEN_FAILED", errno.EINVAL),
    "empty": (lambda path: os.truncate(path, 0), "TRUNCATED", 0),
    "shorter than a header": (lambda path: os.truncate(path, 100), "TRUNCATED", 0),
    "shorter than its metadata": (lambda path: os.truncate(path, 300), "TRUNCATED", 0),
    "a byte too short": (lambda path: os.truncate(path, path.stat().st_size - 1), "TRUNCATED", 0),
    "something else": (_edit(0, b"GGUF"), "MAGIC", 0),
    "of another version": (_edit(8, b"\xff"), "VERSION", 0),
    "damaged in its header": (_edit(20, b"\xff"), "HEADER", 0),
}


@pytest.mark.parametrize("options", [0, WEIGHTS, UNCHECKED])
@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_by_name(host: Host, model: Path, case: str, options: int) -> None:
    damage, error, number = BAD_FILES[case]
    damage(model)
    before = open_files()
    opened = Map(host, model, options)
    assert (opened.error, opened.address) == (error, 0)
    assert number in (0, opened.errno)
    assert open_files() == before


@pytest.mark.parametrize(
    ("place", "found"),
    [("metadata", {0: "CHECKSUM", WEIGHTS: "CHECKSUM", UNCHECKED: "OK"}),
     ("shared", {0: "OK", WEIGHTS: "CHECKSUM", UNCHECKED: "OK"}),
     ("expert", {0: "OK", WEIGHTS: "CHECKSUM", UNCHECKED: "OK"})],
)  # fmt: skip
def test_each_check_finds_what_it_reads(host: Host, model: Path, place: str, found: dict[int, str]) -> None:
    header = parsed().header
    at = {"metadata": int(header["ops_offset"]) + 4, "shared": int(header["meta_bytes"]) + 8,
          "expert": int(parsed().experts[-1]["offset"]) + 8}[place]  # fmt: skip
    _edit(at, bytes([model.read_bytes()[at] ^ 1]))(model)
    for options, error in found.items():
        opened = Map(host, model, options)
        assert opened.error == error
        opened.close()


def test_null_arguments_are_named(host: Host, model: Path) -> None:
    assert name(host.map_open(None, os.fsencode(model), 0)) == "NULL"
    assert name(host.map_open((ctypes.c_uint64 * 16)(), None, 0)) == "NULL"
    assert name(host.map_status(None)) == "NULL"
    assert host.map_model(None) is None
    host.map_close(None)


def test_a_file_without_permission_is_refused(host: Host, model: Path) -> None:
    model.chmod(0)

    def act() -> str:
        become_nobody()
        return Map(host, model).error

    assert in_child(act) == "OPEN_FAILED"


def test_too_little_address_space_is_named(host: Host, model: Path) -> None:
    def act() -> str:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
        resource.setrlimit(resource.RLIMIT_AS, (used + model.stat().st_size // 2, resource.RLIM_INFINITY))
        return Map(host, model).error

    assert in_child(act) == "MMAP_FAILED"


def test_sixty_four_maps_can_be_guarded_and_any_number_unguarded(host: Host, model: Path) -> None:
    maps = [Map(host, model) for _ in range(64)]
    assert {m.error for m in maps} == {"OK"}
    assert Map(host, model).error == "MMAP_FAILED"
    unguarded = Map(host, model, UNGUARDED)
    assert unguarded.error == "OK"
    maps.pop(10).close()
    maps.append(Map(host, model))
    assert maps[-1].error == "OK"
    for m in (*maps, unguarded):
        m.close()


# --- files that change under a running process ------------------------------------------------------------------------


def _offsets() -> dict[str, int]:
    found = parsed()
    experts = sorted(int(e["offset"]) for e in found.experts)
    return {"nothing left": 0, "in the header": 100, "in the metadata": int(found.header["meta_bytes"]) - 1,
            "in the shared weights": int(found.header["meta_bytes"]) + 5000, "between experts": experts[5],
            "amid a page of an expert": experts[3] + 5 * PAGE + 17,
            "the last byte": int(found.header["total_bytes"]) - 1}  # fmt: skip


LENGTHS = ["nothing left", "in the header", "in the metadata", "in the shared weights", "between experts",
           "amid a page of an expert", "the last byte"]  # fmt: skip


@pytest.mark.parametrize("used", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_truncated_file_ends_nobody(host: Host, model: Path, rows: Rows, length: str, used: bool) -> None:
    def act() -> tuple[str, int]:
        opened = Map(host, model)
        opened.start()
        if used:
            opened.forward(rows)
        os.truncate(model, _offsets()[length])
        y = opened.forward(rows)
        return opened.status, len(y)

    assert in_child(act) == ("TRUNCATED", rows.nbytes)


def test_an_unguarded_mapping_of_a_truncated_file_ends_the_process(host: Host, model: Path, rows: Rows) -> None:
    # The tests above would pass where the forward never read what was lost.
    def act() -> None:
        opened = Map(host, model, UNGUARDED)
        opened.start()
        os.truncate(model, _offsets()["in the shared weights"])
        opened.forward(rows)

    assert in_child(act) == -signal.SIGBUS


def test_a_file_truncated_amid_forwards_of_several_threads_ends_nobody(host: Host, model: Path, rows: Rows) -> None:
    def act() -> tuple[str, int]:
        opened = [Map(host, model) for _ in range(2)]
        stop, runs = threading.Event(), []

        def work(m: Map) -> None:
            while not stop.is_set():
                runs.append(len(m.forward(rows)))

        threads = [threading.Thread(target=work, args=(m,)) for m in opened]
        for m, t in zip(opened, threads, strict=True):
            m.start()
            t.start()
        full, pages = model.stat().st_size, model.stat().st_size // PAGE
        for length in np.linspace(pages, 1, 40).astype(int) * PAGE:
            time.sleep(0.002)
            os.truncate(model, min(full, int(length)))
        time.sleep(0.05)
        stop.set()
        for t in threads:
            t.join()
        return "/".join(sorted({m.status for m in opened})), min(runs)

    assert in_child(act) == ("TRUNCATED", rows.nbytes)


def test_a_file_truncated_and_grown_again_is_noticed(host: Host, model: Path, rows: Rows) -> None:
    opened = Map(host, model)
    full = model.stat().st_size
    os.truncate(model, 0)
    os.truncate(model, full)
    opened.forward(rows)
    assert opened.status == "CHANGED"
    opened.close()


def test_metadata_overwritten_in_place_is_not_followed(host: Host, model: Path, rows: Rows) -> None:
    opened = Map(host, model)
    opened.start()
    with model.open("r+b") as file:
        file.write(b"\xff" * (int(parsed().header["meta_bytes"]) // PAGE * PAGE))
    opened.forward(rows)
    assert opened.status == "CHANGED"
    opened.close()


def test_a_file_replaced_by_renaming_leaves_a_running_map_alone(
    host: Host, model: Path, rows: Rows, want: bytes
) -> None:
    opened = Map(host, model)
    other = model.with_name("new.bin")
    other.write_bytes(b"another model")
    other.rename(model)
    assert opened.forward(rows) == want
    assert opened.status == "OK"
    opened.close()
    assert Map(host, model).error == "TRUNCATED"


def test_what_the_medium_cannot_read_is_named(host: Host, model: Path, rows: Rows) -> None:
    # There is no broken disk here: the handler is told of a fault by hand, at a page of a file that is whole.
    def act() -> tuple[str, str, bool, bool]:
        opened = Map(host, model)
        action = (ctypes.c_uint64 * 32)()
        LIBC.sigaction(signal.SIGBUS, None, action)
        info = (ctypes.c_uint64 * 16)()
        info[1], info[2] = 2, opened.address + _offsets()["between experts"] + 100  # BUS_ADRERR, where
        before = opened.status
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(action[0])
        handler(signal.SIGBUS, ctypes.cast(info, ctypes.c_void_p), None)
        pages = ctypes.string_at(opened.address + _offsets()["between experts"], 2 * PAGE)
        return before, opened.status, any(pages[:PAGE]), any(pages[PAGE:])

    assert in_child(act) == ("OK", "READ_FAILED", False, True)


def _fault(folder: Path) -> None:
    """A SIGBUS of somebody else's."""
    path = folder / "foreign"
    path.write_bytes(b"x" * 2 * PAGE)
    with path.open("r+b") as file:
        foreign = mmap.mmap(file.fileno(), 2 * PAGE)
    os.truncate(path, 0)
    foreign[PAGE]


def _send(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGBUS)


@pytest.mark.parametrize("closed", [False, True], ids=["mapped", "closed"])
@pytest.mark.parametrize("raise_it", [_fault, _send])
@pytest.mark.parametrize("handler", ["default", "ignored", "python", "faulthandler"])
def test_faults_elsewhere_reach_whoever_had_them_before(
    host: Host, model: Path, tmp_path: Path, handler: str, raise_it: Callable[[Path], None], closed: bool
) -> None:
    log = tmp_path / "log"

    def act() -> str:
        seen = []
        if handler == "ignored":
            signal.signal(signal.SIGBUS, signal.SIG_IGN)
        elif handler == "python":
            signal.signal(signal.SIGBUS, lambda *_: seen.append("seen"))
        elif handler == "faulthandler":
            faulthandler.enable(log.open("w"))
        opened = Map(host, model)
        if closed:
            opened.close()
        raise_it(tmp_path)
        return "".join(seen)

    if handler == "python" and raise_it is _fault:
        pytest.skip("Python's own handlers return to the fault, forever")
    expected = {"ignored": "", "python": "seen"}.get(handler, -signal.SIGBUS)
    if raise_it is _fault:
        expected = -signal.SIGBUS
    assert in_child(act) == expected
    if handler == "faulthandler":
        assert "Bus error" in log.read_text()


# --- other systems ----------------------------------------------------------------------------------------------------

STUBS = """
#include "colibri_host.h"
#include <string.h>

int main(void)
{
    colibri_map_t map;
    colibri_prefetch_t prefetch;
    colibri_prefetch_counts_t counts;
    colibri_progress_t done = {7, 7};
    const int32_t expert = 0;
    const int errors[] = {
        colibri_map_open(&map, "model.bin", 0), colibri_map_status(&map), colibri_map_lock(&map, &expert, 1, &done),
        colibri_map_unlock(&map, &expert, 1, NULL), colibri_map_release(&map, &expert, 1, &done),
        colibri_map_huge_pages(&map), colibri_prefetch_start(&prefetch, &map, 1),
    };
    for (unsigned n = 0; n < sizeof errors / sizeof errors[0]; ++n) {
        if (errors[n] != COLIBRI_ERR_UNSUPPORTED) {
            return 1;
        }
    }
    colibri_prefetch_experts(&prefetch, &expert, 1);
    colibri_prefetch_announce(&prefetch, 0, &expert, 1, 1);
    colibri_prefetch_count(&prefetch, &counts);
    colibri_prefetch_stop(&prefetch);
    colibri_map_close(&map);
    return colibri_map_model(&map) != NULL || done.experts != 0 || counts.announced != 0;
}
"""


@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_other_systems_say_that_they_cannot(cc: str, tmp_path: Path) -> None:
    source = tmp_path / "stubs.c"
    source.write_text(STUBS, encoding="utf-8")
    sources = [source, size.ENGINE / "host/map.c", size.ENGINE / "host/prefetch.c"]
    binary = compile_c(compiler(cc), tmp_path / "stubs", sources, "-std=c11", "-U__linux__")
    assert subprocess.run([binary], check=False).returncode == 0


@pytest.mark.parametrize("header", ["colibri_host.h", "colibri_ring.h"])
def test_each_header_stands_alone_in_c11(header: str) -> None:
    command = [compiler("gcc"), "-std=c11", *C_FLAGS, f"-I{size.ENGINE / 'include'}", "-fsyntax-only", "-xc", "-"]
    subprocess.run(command, input=f'#include "{header}"\n#include "{header}"\n', text=True, check=True)


def test_the_host_layer_stays_small() -> None:
    lines = size.host_lines()
    assert 0 < lines["host/map.c"] + lines["host/prefetch.c"] + lines["host/host.h"] < 750
    assert CODES["OPEN_FAILED"] > 0
