"""The ring of pointers: nothing lost, nothing twice, in order, whatever the threads' steps; mutants are caught."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.engine.conftest import C_FLAGS, compile_c, compiler
from tools import size

HERE = Path(__file__).parent
RING = size.ENGINE / "include" / "colibri_ring.h"

# What is changed, into what, and what then must go wrong.
MUTANTS = {
    "one slot too many": (">= ring->count", "> ring->count"),
    "one slot, however many there are": ("pushed & (ring->count - 1)", "pushed & 0"),
    "announced before it is there": (
        r"    COLIBRI_RING_STORE(&ring->slots[pushed & (ring->count - 1)], pointer, relaxed);"
        "\n    COLIBRI_RING_STORE(&ring->pushed, pushed + 1, release);",
        r"    COLIBRI_RING_STORE(&ring->pushed, pushed + 1, release);"
        "\n    COLIBRI_RING_STORE(&ring->slots[pushed & (ring->count - 1)], pointer, relaxed);",
    ),
    "taken without asking": (
        "if (COLIBRI_RING_REPLACE(&ring->popped, &popped, popped + 1)) return pointer;",
        "COLIBRI_RING_STORE(&ring->popped, popped + 1, release);\n        return pointer;",
    ),
    "read after it was given up": (
        "popped + 1)) return pointer;",
        "popped + 1)) return COLIBRI_RING_LOAD(&ring->slots[(popped) & (ring->count - 1)], relaxed);",
    ),
    "gives up an element when it loses a race": (
        "popped + 1)) return pointer;",
        "popped + 1)) return pointer;\n        popped = COLIBRI_RING_LOAD(&ring->popped, acquire);\n"
        "        COLIBRI_RING_STORE(&ring->popped, popped + 1, release);",
    ),
}


def explore(folder: Path, header: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "colibri_ring.h").write_text(header, encoding="utf-8")
    binary = folder / "interleave"
    command = [compiler("gcc"), "-std=gnu11", "-O2", *flags, f"-I{folder}", str(HERE / "interleave.c"), "-o", binary]
    subprocess.run(command, check=True)
    return subprocess.run([binary], capture_output=True, text=True, timeout=60, check=False)


def test_no_interleaving_loses_repeats_or_reorders(tmp_path: Path) -> None:
    done = explore(tmp_path, RING.read_text(encoding="utf-8"), "-Wall", "-Wextra", "-Wconversion", "-Werror")
    assert done.returncode == 0, done.stdout
    found = re.fullmatch(r"(\d+) states, (\d+) orders\n", done.stdout)
    assert found is not None
    assert int(found[1]) > 10_000 and int(found[2]) > 100


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_ring_is_caught(tmp_path: Path, mutant: str) -> None:
    old, new = MUTANTS[mutant]
    text = RING.read_text(encoding="utf-8")
    assert text.count(old) == 1, "the header has changed: change the mutant too"
    done = explore(tmp_path, text.replace(old, new), "-w")
    assert done.returncode == 1 and "in the order" in done.stdout, done.stdout


# --- real threads -----------------------------------------------------------------------------------------------------

THREADS = r"""
#include "colibri_ring.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>

enum { ITEMS = 200000, CONSUMERS = 3, SLOTS = 8 };

typedef struct {
    unsigned number, taken; /* plain: a race unless the ring orders what is before a push and after a pop */
} item;

static item items[ITEMS];
static colibri_ring_slot slots[SLOTS];
static colibri_ring_t ring;
static atomic_uint left = ITEMS;

static void *consume(void *wrong)
{
    unsigned last = 0;
    while (atomic_load(&left) > 0) {
        item *p = colibri_ring_pop(&ring);
        if (p == NULL) {
            sched_yield();
            continue;
        }
        if (p->number <= last || p->taken++ != 0) {
            *(unsigned *)wrong = p->number;
        }
        last = p->number;
        atomic_fetch_sub(&left, 1);
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[CONSUMERS];
    unsigned wrong[CONSUMERS] = {0}, lost = 0;
    colibri_ring_init(&ring, slots, SLOTS);
    for (int n = 0; n < CONSUMERS; ++n) {
        pthread_create(&threads[n], NULL, consume, &wrong[n]);
    }
    for (unsigned n = 0; n < ITEMS; ++n) {
        items[n].number = n + 1;
        while (!colibri_ring_push(&ring, &items[n])) {
            sched_yield();
        }
    }
    for (int n = 0; n < CONSUMERS; ++n) {
        pthread_join(threads[n], NULL);
        lost += wrong[n] != 0;
    }
    for (unsigned n = 0; n < ITEMS; ++n) {
        lost += items[n].taken != 1;
    }
    printf("%u wrong\n", lost);
    return lost != 0;
}
"""


def threaded(folder: Path, cc: str, *flags: str, header: str | None = None) -> subprocess.CompletedProcess[str]:
    source = folder / "threads.c"
    source.write_text(THREADS, encoding="utf-8")
    if header is not None:
        (folder / "colibri_ring.h").write_text(header, encoding="utf-8")
    command = [cc, *C_FLAGS, "-std=gnu11", "-g", "-pthread", *flags, f"-I{folder}", f"-I{RING.parent}", str(source)]
    subprocess.run([*command, "-o", folder / "threads"], check=True)
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run([folder / "threads"], capture_output=True, text=True, timeout=120, check=False, env=env)


@pytest.mark.parametrize("flags", [("-O2",), ("-O1", "-fsanitize=thread")], ids=["plain", "thread sanitizer"])
@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_threads_get_every_pointer_once(tmp_path: Path, cc: str, flags: tuple[str, ...]) -> None:
    done = threaded(tmp_path, compiler(cc), *flags)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_thread_sanitizer_sees_a_missing_order(tmp_path: Path) -> None:
    # The test above would pass where the sanitizer does not look.
    text = RING.read_text(encoding="utf-8")
    weak = text.replace("pushed + 1, release)", "pushed + 1, relaxed)")
    assert weak != text
    done = threaded(tmp_path, compiler("clang"), "-O1", "-fsanitize=thread", header=weak)
    assert "data race" in done.stderr


SINGLE = r"""
#include "colibri_ring.h"

int main(void)
{
    static colibri_ring_slot slots[4];
    colibri_ring_t ring;
    int values[6], wrong = 0;
    colibri_ring_init(&ring, slots, 4);
    ring.pushed = ring.popped = UINT32_MAX - 2; /* the counts wrap around */
    for (int round = 0; round < 5; ++round) {
        for (int n = 0; n < 6; ++n) {
            wrong += colibri_ring_push(&ring, &values[n]) != (n < 4);
        }
        for (int n = 0; n < 4; ++n) {
            wrong += colibri_ring_pop(&ring) != &values[n];
        }
        wrong += colibri_ring_pop(&ring) != 0;
    }
    return wrong;
}
"""


@pytest.mark.parametrize("flags", [(), ("-DCOLIBRI_RING_SINGLE",), ("-D__STDC_NO_ATOMICS__=1",)], ids=str)
def test_a_ring_for_one_thread_does_the_same(tmp_path: Path, flags: tuple[str, ...]) -> None:
    source = tmp_path / "single.c"
    source.write_text(SINGLE, encoding="utf-8")
    binary = compile_c(compiler("gcc"), tmp_path / "single", [source], "-std=c11", *flags)
    assert subprocess.run([binary], check=False).returncode == 0


def test_without_threads_the_ring_uses_no_atomics() -> None:
    command = [compiler("gcc"), "-std=c11", "-DCOLIBRI_RING_SINGLE", f"-I{size.ENGINE / 'include'}", "-E", "-xc", "-"]
    text = subprocess.run(command, input='#include "colibri_ring.h"\n', capture_output=True, text=True, check=True)
    assert "_Atomic" not in text.stdout and "colibri_ring_pop" in text.stdout
