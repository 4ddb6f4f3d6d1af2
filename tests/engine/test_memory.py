"""The engine stays inside what it is given, reads nothing it has not written, and asks the system for nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from colibri import exporter
from colibri.reference.interpreter import Trace, run
from tests.engine.conftest import (
    GRAPHS,
    HERE,
    MAX_BATCH,
    TEXTS,
    Build,
    compile_c,
    compiler,
    example,
    packed,
    random_rows,
)


@pytest.fixture(scope="session")
def driver(gcc_build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("driver") / "driver"
    sources = [HERE / "driver.c", gcc_build.archive]
    return compile_c(gcc_build.cc, output, sources, "-std=gnu11", "-O1", "-g", "-pthread")


def drive(
    driver: Path, tmp_path: Path, export: exporter.Export, batch: int, *, poison: int = 0xA5, place: str = "high",
    mode: str = "plain", under: tuple[str, ...] = (),
) -> bytes:  # fmt: skip
    """The driver's output; fails with its words where an expectation of it did."""
    model, rows = tmp_path / "model.bin", tmp_path / "input.f32"
    model.write_bytes(export.image)
    rows.write_bytes(packed(random_rows(export, batch)))
    command = [*under, driver, model, rows, str(batch), str(poison), place, mode]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr.decode()}"
    return done.stdout


def reference(export: exporter.Export, batch: int) -> bytes:
    return packed(run(export.graph, random_rows(export, batch)))


@pytest.mark.parametrize("place", ["high", "low"])
@pytest.mark.parametrize("batch", [1, MAX_BATCH])
def test_block_of_exactly_the_stated_size_between_guards_gives_the_reference(
    driver: Path, tmp_path: Path, model: exporter.Export, batch: int, place: str
) -> None:
    assert drive(driver, tmp_path, model, batch, place=place) == reference(model, batch)


@pytest.mark.parametrize("poison", [0x00, 0x7F, 0xFF])  # zeros, huge numbers, NaN
@pytest.mark.parametrize("batch", [2, MAX_BATCH])
def test_output_does_not_depend_on_what_the_block_held(
    driver: Path, tmp_path: Path, model: exporter.Export, batch: int, poison: int
) -> None:
    assert drive(driver, tmp_path, model, batch, poison=poison) == reference(model, batch)


def test_second_run_in_a_context_equals_the_first(driver: Path, tmp_path: Path, model: exporter.Export) -> None:
    assert drive(driver, tmp_path, model, 3, mode="twice") == reference(model, 3)


def test_forward_makes_no_system_call(driver: Path, tmp_path: Path, model: exporter.Export) -> None:
    assert drive(driver, tmp_path, model, MAX_BATCH, mode="seccomp") == reference(model, MAX_BATCH)


def test_strict_seccomp_kills_what_makes_a_system_call(tmp_path: Path) -> None:
    # The test above would pass where the kernel ignores the request.
    source = tmp_path / "call.c"
    source.write_text(
        "#include <linux/seccomp.h>\n#include <sys/prctl.h>\n#include <unistd.h>\n"
        "int main(void) { return prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0 ? (int)getppid() : 0; }\n",
        encoding="utf-8",
    )
    binary = compile_c(compiler("gcc"), tmp_path / "call", [source], "-std=gnu11")
    assert subprocess.run([binary], check=False).returncode == -9


def test_contexts_do_not_disturb_each_other(driver: Path, tmp_path: Path, model: exporter.Export) -> None:
    assert drive(driver, tmp_path, model, MAX_BATCH, mode="contexts") == reference(model, MAX_BATCH)


def test_selftest_passes_between_guards_and_leaves_the_hook(
    driver: Path, tmp_path: Path, model: exporter.Export
) -> None:
    assert drive(driver, tmp_path, model, 1, mode="selftest") == reference(model, 1)


@pytest.mark.parametrize("batch", [1, MAX_BATCH])
def test_on_route_is_called_once_a_layer_with_the_choices(
    driver: Path, tmp_path: Path, model: exporter.Export, batch: int
) -> None:
    out = drive(driver, tmp_path, model, batch, mode="routes")
    trace = Trace()
    want = packed(run(model.graph, random_rows(model, batch), trace))
    assert out[: len(want)] == want
    calls = np.frombuffer(out[len(want) :], np.int32).tolist()
    expected = []
    for layer, routes in enumerate(trace.routes):  # (batch, tokens, k)
        expected += [layer, routes.shape[0] * routes.shape[1], routes.shape[2], *routes.reshape(-1).tolist()]
    assert calls == expected


def test_the_models_here_route() -> None:
    # So that the routes compared above are not empty ones.
    assert [len(list(example(name).graph.moe_nodes())) for name in GRAPHS] == [0, 1, 1, 1, 3, 1, 2, 7, 2]


LONG = 71  # tokens: more than a page of the cache, and more than the longest delay


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("poison", [0xA5, 0xFF])
def test_a_text_over_pages_reads_nothing_but_what_it_wrote(
    driver: Path, tmp_path: Path, name: str, poison: int
) -> None:
    export = example(name, max_batch=LONG)
    assert drive(driver, tmp_path, export, LONG, poison=poison, mode="seccomp") == reference(export, LONG)


@pytest.mark.parametrize("name", ["top2_shared", "deep", "quantized", "text", "text_window", "text_int8"])
@pytest.mark.parametrize("batch", [1, MAX_BATCH])
def test_valgrind_finds_no_uninitialised_or_stray_access(driver: Path, tmp_path: Path, name: str, batch: int) -> None:
    memcheck = (compiler("valgrind"), "-q", "--error-exitcode=99", "--track-origins=yes")
    export = example(name)
    assert drive(driver, tmp_path, export, batch, place="heap", under=memcheck) == reference(export, batch)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["twice", "selftest", "routes"])
def test_valgrind_finds_nothing_in_any_model_and_mode(
    driver: Path, tmp_path: Path, model: exporter.Export, mode: str
) -> None:
    memcheck = (compiler("valgrind"), "-q", "--error-exitcode=99", "--track-origins=yes")
    out = drive(driver, tmp_path, model, 3, place="heap", mode=mode, under=memcheck)
    assert out.startswith(reference(model, 3))
