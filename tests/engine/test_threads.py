"""Threads: the same bits for any number of them, and a pool that survives sharing, forking and sanitizers."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import exporter
from colibri.ir.graph import Graph, Router
from colibri.reference.interpreter import run
from colibri.runtime import engine
from colibri.runtime.language import LanguageModel
from tests.engine.conftest import compile_c, compiler
from tests.graphs import FORMATS, expert, linear
from tests.lm_graphs import language_model
from tools import size


def wide(fmt: str) -> exporter.Export:
    """A layer large enough to be spread over threads."""
    graph = Graph(fmt)
    rng = np.random.default_rng(3)
    x = graph.add_input("x", (300,))
    experts = [expert(e, 300, 700, 260, 1, fmt) for e in range(3)]
    graph.outputs = [graph.add("moe", x, linear(graph, rng, x, 3, True), router=Router(3, 2), experts=experts)]
    return exporter.build(graph, max_batch=9)


def batch(rows: int = 9) -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).standard_normal((rows, 300), np.float32)


@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_do_not_depend_on_the_number_of_threads(fmt: str) -> None:
    export = wide(fmt)
    want = run(export.graph, [batch()])[0].tobytes()
    for threads in (1, 2, 0):
        model = engine.load(export.image, threads=threads)
        assert model(batch()).tobytes() == want
        assert model(batch()).tobytes() == want


def test_a_pool_has_no_more_threads_than_processors() -> None:
    assert engine.load(wide("fp32").image, threads=1000).threads == len(os.sched_getaffinity(0))


def test_calls_from_several_threads_share_one_pool() -> None:
    export = wide("int8")
    model = engine.load(export.image, threads=2)
    inputs = [batch()[n : n + 3] for n in range(6)]
    want = [run(export.graph, [x])[0].tobytes() for x in inputs]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(20):
            assert [y.tobytes() for y in callers.map(model, inputs)] == want


def test_a_child_after_fork_computes_alone() -> None:
    export = wide("fp32")
    model = engine.load(export.image, threads=2)
    want = model(batch()).tobytes()
    child = os.fork()
    if child == 0:
        os._exit(0 if model(batch()).tobytes() == want else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert model(batch()).tobytes() == want


LOOPS = r"""
#define _POSIX_C_SOURCE 200809L
#include "colibri_host.h"
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

static atomic_uint seen[1000];
static unsigned plain[1000]; /* written by one task each: a race only if an index were given out twice */

static void task(void *arg, uint32_t i)
{
    atomic_fetch_add(&seen[i], 1);
    plain[i] += *(unsigned *)arg;
}

int main(void)
{
    static colibri_pool_t pool;
    unsigned one = 1, loops = 3000;
    if (colibri_pool_start(&pool, 2) < 1) {
        return 2;
    }
    for (unsigned n = 0; n < loops; ++n) {
        colibri_pool_run(&pool, task, &one, n % 1000);
        if (n % 1000 == 0) { /* long enough for the workers to fall asleep */
            nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL);
        }
    }
    colibri_pool_stop(&pool);
    colibri_pool_run(&pool, task, &one, 1000); /* a stopped pool is its caller */
    for (unsigned i = 0; i < 1000; ++i) {
        const unsigned want = loops / 1000 * (999 - i) + 1;
        if (atomic_load(&seen[i]) != want || plain[i] != want) {
            printf("index %u: %u times\n", i, plain[i]);
            return 1;
        }
    }
    return 0;
}
"""


@pytest.mark.parametrize("flags", [("-O2",), ("-O1", "-g", "-fsanitize=thread")], ids=["plain", "thread sanitizer"])
def test_every_index_is_done_once(flags: tuple[str, ...], tmp_path: Path) -> None:
    source = tmp_path / "loops.c"
    source.write_text(LOOPS, encoding="utf-8")
    sources = [source, size.ENGINE / "host" / "pool.c"]
    binary = compile_c(compiler("gcc"), tmp_path / "loops", sources, "-std=c11", "-pthread", *flags)
    done = subprocess.run([binary], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


PROMPT = r"""
#include "colibri_host.h"
#include "colibri_lm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 200 };

/* Loops over attention's tiles of a full chunk: 4 key heads, 64 tokens of 2 heads each, 8 a tile. */
static unsigned spread;

static void counted(void *user, void (*task)(void *arg, uint32_t index), void *arg, uint32_t count)
{
    spread += count == 4 * 64 * 2 / 8;
    colibri_pool_run(user, task, arg, count);
}

int main(int argc, char **argv)
{
    static colibri_pool_t pool;
    FILE *file = fopen(argv[argc - 1], "rb");
    uint8_t *model = aligned_alloc(64, 1 << 20);
    if (file == NULL || fread(model, 1, 1 << 20, file) == 0 || colibri_pool_start(&pool, 2) < 1) {
        return 2;
    }
    const size_t need = (colibri_model_size(model) + 63) / 64 * 64;
    int32_t ids[TOKENS];
    for (int i = 0; i < TOKENS; ++i) {
        ids[i] = i * 7 % 40;
    }
    float *logits[2];
    for (int n = 0; n < 2; ++n) {
        colibri_context_t *ctx = colibri_init(aligned_alloc(64, need), need, model);
        logits[n] = malloc(ctx->output_size * sizeof(float));
        if (n == 1) {
            ctx->parallel = counted;
            ctx->parallel_user = &pool;
        }
        if (colibri_lm_evaluate(ctx, ids, TOKENS, logits[n]) != COLIBRI_OK || ctx->position != TOKENS) {
            return 3;
        }
    }
    colibri_pool_stop(&pool);
    printf("%u\n", spread);
    return memcmp(logits[0], logits[1], 40 * sizeof(float)) != 0;
}
"""


def long_text() -> exporter.Export:
    """A language model whose attention is worth spreading."""
    graph = language_model(context=256, heads=8, kv=4, key=16, value=16, width=8, layers=2, cache="fp16")
    return exporter.build(graph, max_batch=64)


def test_attention_spread_over_threads_keeps_every_bit() -> None:
    export = long_text()
    ids = np.arange(200) * 7 % 40
    want = run(export.graph, [ids[:, None].astype(np.float32)])[0].tobytes()
    for threads in (1, 2, 0):
        assert LanguageModel(engine.opened(export.image), threads=threads).logits(ids).tobytes() == want


@pytest.mark.parametrize("sanitizer", ["", "-fsanitize=thread"])
def test_tasks_of_attention_touch_nothing_of_each_other(sanitizer: str, tmp_path: Path) -> None:
    flags = ["-O1", "-g", *sanitizer.split()]
    built = size.build(tmp_path / "engine", compiler("gcc"), " ".join(flags), target="libcolibri.a")
    source, model = tmp_path / "prompt.c", tmp_path / "model.bin"
    source.write_text(PROMPT, encoding="utf-8")
    model.write_bytes(long_text().image)
    sources = [source, size.ENGINE / "host" / "pool.c", built / "libcolibri.a"]
    binary = compile_c(compiler("gcc"), tmp_path / "prompt", sources, "-std=c11", "-pthread", *flags)
    done = subprocess.run([binary, model], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) == 6  # two layers' attention, in each of three full chunks
