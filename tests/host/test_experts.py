"""Experts' memory: locked within the limit, released, in huge pages, and fetched ahead by other threads."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import exporter
from colibri.reference.interpreter import run
from tests.engine.conftest import Build, compile_c, compiler
from tests.host.conftest import (
    EXPERTS,
    LAYERS,
    LIBC,
    PAGE,
    Counts,
    Host,
    Map,
    become_nobody,
    in_child,
    name,
    needs_filter,
    pages_of,
    refuse,
)  # fmt: skip
from tools import size

HERE = Path(__file__).parent
ALL = range(LAYERS * EXPERTS)
Rows = np.ndarray[Any, Any]


def missing(opened: Map, *experts: int) -> int:
    """Pages of experts that are not in memory."""
    total = 0
    for expert in experts:
        offset, size_ = pages_of(expert)
        total += size_ // PAGE - opened.resident(offset, size_)
    return total


def locked_bytes() -> int:
    return int(re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


# --- locking ----------------------------------------------------------------------------------------------------------


def test_locked_experts_are_in_memory_until_unlocked(host: Host, model: Path) -> None:
    opened = Map(host, model)
    opened.act("release", *ALL)
    each = pages_of(3)[1]
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 3 * each and os.geteuid() != 0:
        pytest.skip("RLIMIT_MEMLOCK is smaller than two experts")
    before = locked_bytes()
    assert opened.act("lock", 3, 7) == ("OK", 2, 2 * each)
    assert locked_bytes() - before == 2 * each
    assert missing(opened, 3, 7) == 0
    assert opened.act("unlock", 3, 7) == ("OK", 2, 2 * each)
    assert locked_bytes() == before
    opened.close()


@pytest.mark.parametrize("room", [0, 3])
def test_the_lock_limit_is_named_and_what_fits_stays_locked(host: Host, model: Path, room: int) -> None:
    each = pages_of(0)[1]

    def act() -> tuple[tuple[str, int, int], int]:
        opened = Map(host, model)
        limit = room * each + each // 2 if room else 0
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
        become_nobody()
        return opened.act("lock", *ALL), locked_bytes()

    assert in_child(act) == (("LOCK_LIMIT", room, room * each), room * each)


@needs_filter
def test_a_system_that_refuses_to_lock_is_named(host: Host, model: Path) -> None:
    def act() -> tuple[str, int, int]:
        opened = Map(host, model)
        refuse("mlock", errno.EAGAIN)
        return opened.act("lock", 0)

    assert in_child(act) == ("LOCK_FAILED", 0, 0)


def test_locking_what_the_file_has_lost_is_named(host: Host, model: Path) -> None:
    start, each = pages_of(1)

    def act() -> tuple[str, int, int]:
        opened = Map(host, model)
        os.truncate(model, start)
        return opened.act("lock", 0, 1, 2)

    assert in_child(act) == ("TRUNCATED", 1, each)


@pytest.mark.parametrize("verb", ["lock", "unlock", "release"])
def test_experts_that_are_none_are_named(host: Host, model: Path, verb: str) -> None:
    opened = Map(host, model)
    for wrong in (-1, len(ALL), 2**31 - 1):
        assert opened.act(verb, 0, wrong, 1) == ("NO_EXPERT", 1, pages_of(0)[1])
    opened.act("unlock", 0)
    opened.close()
    assert opened.act(verb, 0)[0] == "NULL"


# --- releasing, huge pages --------------------------------------------------------------------------------------------


def test_released_experts_leave_memory_and_give_the_same_bits(
    host: Host, model: Path, export: exporter.Export, rows: Rows
) -> None:
    opened = Map(host, model)
    want = run(export.graph, [rows])[0].tobytes()
    assert opened.forward(rows) == want
    assert opened.act("release", *ALL)[:2] == ("OK", len(ALL))
    assert (
        missing(opened, *ALL) > sum(pages_of(e)[1] // PAGE for e in ALL) // 4
    )  # the shared weights keep a neighbourhood
    assert opened.forward(rows) == want
    opened.close()


def test_a_locked_expert_is_not_released(host: Host, model: Path) -> None:
    opened = Map(host, model)
    assert opened.act("lock", 1)[0] == "OK"
    assert opened.act("release", 0, 1, 2) == ("RELEASE_FAILED", 1, pages_of(0)[1])
    opened.act("unlock", 1)
    opened.close()


def test_a_process_without_huge_pages_is_told(host: Host, model: Path) -> None:
    def act() -> str:
        opened = Map(host, model)
        disable = 41
        assert LIBC.prctl(disable, 1, 0, 0, 0) == 0
        return name(host.map_huge_pages(opened.memory))

    assert in_child(act) == "HUGE_PAGES"


@needs_filter
def test_a_kernel_without_huge_pages_is_named(host: Host, model: Path) -> None:
    def act() -> str:
        opened = Map(host, model)
        refuse("madvise", errno.EINVAL, 14)
        return name(host.map_huge_pages(opened.memory))

    assert in_child(act) == "HUGE_PAGES"


def test_huge_pages_leave_the_bits_alone(host: Host, model: Path, export: exporter.Export, rows: Rows) -> None:
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not modes.exists() or "[never]" in modes.read_text():
        pytest.skip("this system has no transparent huge pages")
    opened = Map(host, model)
    assert name(host.map_huge_pages(opened.memory)) == "OK"
    assert opened.forward(rows) == run(export.graph, [rows])[0].tobytes()
    opened.close()


# --- fetching ahead ---------------------------------------------------------------------------------------------------


class Prefetch:
    """A started colibri_prefetch_t."""

    def __init__(self, opened: Map, threads: int = 1) -> None:
        self.host, self.memory = opened.host, (ctypes.c_uint64 * 384)()
        self.error = name(self.host.prefetch_start(self.memory, opened.memory, threads))
        opened.prefetchers.append(self.memory)

    def announce(self, layer: int, *experts: int) -> None:
        numbers = (ctypes.c_int32 * len(experts))(*experts)
        self.host.prefetch_announce(self.memory, layer, numbers, len(experts), 1)

    def experts(self, *experts: int) -> None:
        self.host.prefetch_experts(self.memory, (ctypes.c_int32 * len(experts))(*experts), len(experts))

    @property
    def counts(self) -> Counts:
        counts = Counts()
        self.host.prefetch_count(self.memory, ctypes.byref(counts))
        return counts

    def settle(self) -> Counts:
        """The counts once everything announced is done."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            c = self.counts
            if c.hits + c.misses + c.dropped == c.announced:
                return c
            time.sleep(0.001)
        raise AssertionError("the prefetcher does not come to an end")


@pytest.fixture
def opened(host: Host, model: Path) -> Iterator[Map]:
    m = Map(host, model)
    m.act("release", *ALL)
    yield m
    m.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_announced_experts_come_into_memory(opened: Map, model: Path, threads: int) -> None:
    prefetch = Prefetch(opened, threads)
    assert prefetch.error == "OK"
    absent = missing(opened, EXPERTS + 1, EXPERTS + 4)
    others = [e for e in ALL if e not in (EXPERTS + 1, EXPERTS + 4)]
    before = missing(opened, *others)
    prefetch.announce(1, 4, 1, 4, 1, 1)  # the second layer's; each once, however often it was chosen
    c = prefetch.settle()
    assert missing(opened, EXPERTS + 1, EXPERTS + 4) == 0
    assert missing(opened, *others) == before > 0  # nothing that nobody asked for
    assert (c.announced, c.dropped, c.failures) == (2, 0, 0)
    assert 1 <= c.misses <= 2 and 0 < c.bytes <= absent * PAGE and c.nanoseconds > 0
    prefetch.experts(EXPERTS + 4, EXPERTS + 1)
    again = prefetch.settle()
    assert (again.announced, again.misses, again.hits) == (4, c.misses, c.hits + 2)
    host = opened.host
    host.prefetch_stop(prefetch.memory)
    prefetch.announce(0, 1)  # nobody is there any more
    assert prefetch.counts.announced == 4


def test_faults_do_not_read_ahead_of_experts_while_they_are_fetched(opened: Map) -> None:
    def flags() -> list[str]:
        text = Path("/proc/self/smaps").read_text()
        at = opened.address + pages_of(len(ALL) - 1)[0]
        for begin, end, rest in re.findall(r"^(\w+)-(\w+) .*?^VmFlags:(.*?)$", text, re.M | re.S):
            if int(begin, 16) <= at < int(end, 16):
                return str(rest).split()
        raise AssertionError("the map is not in smaps")

    assert "rr" not in flags()
    prefetch = Prefetch(opened)
    assert "rr" in flags()
    opened.host.prefetch_stop(prefetch.memory)
    assert "rr" not in flags()


def test_what_is_no_expert_is_not_announced(opened: Map) -> None:
    prefetch = Prefetch(opened)
    for layer in (-1, LAYERS, 2**31 - 1):
        prefetch.announce(layer, 0)
    prefetch.announce(0, -1, EXPERTS, 2**31 - 1)
    prefetch.experts(-1, len(ALL))
    prefetch.experts()
    assert prefetch.counts.announced == 0
    opened.host.prefetch_stop(prefetch.memory)


def test_a_full_ring_drops_and_counts(opened: Map) -> None:
    prefetch = Prefetch(opened)
    for _ in range(2000):
        prefetch.experts(*ALL)
    c = prefetch.settle()
    assert c.announced == 2000 * len(ALL)
    assert 0 < c.dropped < c.announced
    assert c.late > 0
    opened.host.prefetch_stop(prefetch.memory)


def test_stopping_does_not_wait_for_what_was_announced(opened: Map) -> None:
    prefetch = Prefetch(opened)
    prefetch.experts(*ALL)
    opened.host.prefetch_stop(prefetch.memory)
    opened.host.prefetch_stop(prefetch.memory)
    assert prefetch.counts.hits + prefetch.counts.misses <= len(ALL)


@needs_filter
def test_a_kernel_that_cannot_populate_is_asked_to_read_ahead(host: Host, model: Path) -> None:
    def act() -> tuple[int, int]:
        opened = Map(host, model)
        opened.act("release", *ALL)
        refuse("madvise", errno.EINVAL, 22)
        prefetch = Prefetch(opened)
        prefetch.announce(0, 2)
        failures = prefetch.settle().failures
        deadline = time.monotonic() + 10
        while missing(opened, 2) and time.monotonic() < deadline:
            time.sleep(0.001)
        return failures, missing(opened, 2)

    assert in_child(act) == (0, 0)


def test_fetching_what_the_file_has_lost_is_counted(host: Host, model: Path) -> None:
    def act() -> tuple[int, str]:
        opened = Map(host, model)
        prefetch = Prefetch(opened)
        os.truncate(model, pages_of(1)[0])
        prefetch.experts(1, 2)
        return prefetch.settle().failures, opened.status

    assert in_child(act) == (2, "TRUNCATED")


def test_threads_that_cannot_start_are_named(host: Host, model: Path) -> None:
    def act() -> tuple[str, int]:
        opened = Map(host, model)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        become_nobody()
        prefetch = Prefetch(opened, 8)
        prefetch.announce(0, 1)
        return prefetch.error, prefetch.counts.announced

    assert in_child(act) == ("THREAD_FAILED", 0)


def test_a_map_that_is_not_open_is_not_prefetched(host: Host, opened: Map) -> None:
    memory = (ctypes.c_uint64 * 384)()
    closed = (ctypes.c_uint64 * 16)()
    assert name(host.prefetch_start(memory, closed, 1)) == "NULL"
    assert name(host.prefetch_start(None, opened.memory, 1)) == "NULL"


def test_other_users_files_count_as_hits_but_are_fetched(host: Host, model: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to own a file that another user reads")

    def act() -> tuple[int, int]:
        opened = Map(host, model)
        opened.act("release", *ALL)
        reader = os.fork()
        if reader == 0:
            become_nobody()
            prefetch = Prefetch(opened)
            prefetch.announce(0, 2)
            os._exit(prefetch.settle().hits)
        hits = os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
        return hits, missing(opened, 2)

    assert in_child(act) == (1, 0)


# --- the forward's side -----------------------------------------------------------------------------------------------


def announcing(tmp_path: Path, cc: str, sources: list[Path], *flags: str) -> Path:
    gnu = ("-std=gnu11", "-g", "-pthread", *flags)
    return compile_c(cc, tmp_path / "announce", [HERE / "announce.c", *sources], *gnu)


def forwards(binary: Path, model: Path, rows: Rows, mode: str) -> subprocess.CompletedProcess[bytes]:
    path = model.with_name("rows.f32")
    path.write_bytes(rows.tobytes())
    command = [binary, model, path, str(len(rows)), "2", mode]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("mode", ["plain", "strict"])
def test_a_forward_that_announces_makes_no_system_call(
    build: Build, tmp_path: Path, model: Path, export: exporter.Export, rows: Rows, mode: str
) -> None:
    libraries = [build.directory / "libcolibri_host.a", build.archive]
    done = forwards(announcing(tmp_path, build.cc, libraries), model, rows, mode)
    assert (done.returncode, done.stdout) == (0, run(export.graph, [rows])[0].tobytes()), done.stderr


def test_a_hook_that_makes_a_system_call_does_not_come_back(
    build: Build, tmp_path: Path, model: Path, rows: Rows
) -> None:
    # The test above would pass where the kernel ignores the request.
    libraries = [build.directory / "libcolibri_host.a", build.archive]
    assert forwards(announcing(tmp_path, build.cc, libraries), model, rows, "curious").returncode != 0


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing_while_experts_are_fetched(
    build: Build, tmp_path: Path, model: Path, rows: Rows, sanitizer: str
) -> None:
    sources = [size.ENGINE / f"host/{n}.c" for n in ("map", "prefetch")]
    binary = announcing(tmp_path, compiler("clang"), [*sources, build.archive], "-O1", f"-fsanitize={sanitizer}")
    done = forwards(binary, model, rows, "plain")
    assert done.returncode == 0, done.stderr.decode()
