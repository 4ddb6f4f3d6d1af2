"""What the built engine is made of: no heap, no system call, no mutable globals, few symbols and lines, small stack."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.engine.conftest import C_FLAGS, Build, compiler
from tools import size

# What the engine may ask of the C library. Compilers call these four for assignments and loops in any program.
ALLOWED_UNDEFINED = {"memcpy", "memset", "memcmp", "memmove"}
MAX_SYMBOLS = 17
# Bytes of the engine's own frames below the deepest call, x86-64; gcc 12.2: forward 7,752, of which attention's weights
# of a tile take 2,048; models without attention stay below 5,600. Evaluating tokens adds their ids as floats. The
# caller's route hook and the C library's mem functions come on top.
STACK_LIMITS = {
    "colibri_forward": 8192, "colibri_selftest": 8192, "colibri_lm_evaluate": 10240, "colibri_lm_source": 10240,
    "colibri_init": 1536, "colibri_check": 1536, "colibri_diagnose": 1536,  # the proof of the order of reads and writes
}  # fmt: skip
STACK_WITHOUT_ATTENTION = 6144
OTHER_STACK = 256


def undefined(*files: Path) -> set[str]:
    """Symbols the files need from elsewhere, beyond those one of them defines."""
    needed, defined = set(), set()
    for line in size.run("nm", *files).splitlines():
        match = re.fullmatch(r"\s*[0-9a-f]*\s+(\w)\s+(\S+)", line)
        if match:
            (needed if match[1] in "Uw" else defined).add(match[2])
    return needed - defined - {"_GLOBAL_OFFSET_TABLE_"}


def test_engine_needs_nothing_but_memory_functions(engine_build: Build) -> None:
    assert undefined(engine_build.archive) <= ALLOWED_UNDEFINED


def test_shared_library_imports_nothing_but_memory_functions(engine_build: Build) -> None:
    wanted = {line.split()[-1].split("@")[0] for line in size.run("nm", "-D", "-u", engine_build.library).splitlines()}
    runtime = {"__cxa_finalize", "__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}
    assert wanted - runtime <= ALLOWED_UNDEFINED


def test_no_object_holds_writable_data(engine_build: Build) -> None:
    objects = size.objects(engine_build.directory)
    assert objects, "the build left no objects to look at"
    assert {o.name: size.sections(o) for o in objects if size.sections(o)["data"] or size.sections(o)["bss"]} == {}


def test_sections_are_read_from_objects_that_have_them(tmp_path: Path) -> None:
    # The test above would pass on a reader that sees nothing.
    source, obj = tmp_path / "x.c", tmp_path / "x.o"
    text = "int a = 1; int b[4]; static const int c[] = {1, 2}; const int *d(void) { return c; }"
    source.write_text(text, encoding="utf-8")
    subprocess.run([compiler("gcc"), "-c", "-fdata-sections", source, "-o", obj], check=True)
    found = size.sections(obj)
    assert (found["data"], found["bss"], found["rodata"]) == (4, 16, 8)
    assert found["text"] > 0


def test_exported_symbols_are_the_declared_functions(engine_build: Build) -> None:
    public = size.exported(engine_build.library)
    assert public == size.declared()
    assert {
        "colibri_init",
        "colibri_forward",
        "colibri_free",
        "colibri_model_size",
        "colibri_get_num_experts",
    } <= public
    assert len(public) <= MAX_SYMBOLS


def test_shared_library_is_hardened(engine_build: Build) -> None:
    segments = size.run("readelf", "-lW", engine_build.library)
    dynamic = size.run("readelf", "-dW", engine_build.library)
    assert "GNU_RELRO" in segments
    assert re.search(r"\(FLAGS\).*BIND_NOW", dynamic) and re.search(r"\(FLAGS_1\).*NOW", dynamic)
    assert "TEXTREL" not in dynamic
    stack = re.search(r"GNU_STACK\s.*?\s(R\w*)\s+0x", segments)
    assert stack is not None and "E" not in stack[1]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", 0),
        ("int x;\n\n/* a\n   b */\n// c\n", 1),
        ("int x; /* a */\n  /* b */ int y;\n", 2),
        ('char *s = "/* not a comment";\nint y; /* is */\n', 2),
        ("char c = '\"'; // \"\nint z;\n", 2),
        ("int a; /* spans\nlines */ int b;\n", 2),
    ],
)
def test_code_lines_are_without_blanks_and_comments(text: str, lines: int) -> None:
    assert size.code_lines(text) == lines


def test_engine_stays_under_its_line_limits() -> None:
    core, library = size.core_lines(), size.library_lines()
    assert {"include/colibri.h", "src/core/forward.c", "src/check/file.c", "src/core/internal.h"} <= core.keys()
    assert {*size.BEYOND_CORE, *size.APART} <= library.keys() - core.keys()
    assert size.CORE_OPS and {f"src/ops/{name}" for name in size.CORE_OPS} <= core.keys()
    assert 0 < sum(core.values()) < size.CORE_LIMIT
    assert sum(library.values()) < size.LIBRARY_LIMIT


def test_tokens_are_counted_as_the_preprocessor_does() -> None:
    assert size.tokens('a->b += 1.5e-3f; "x\\"y" /* c d */ \'a\' // e\n') == 8


@pytest.fixture(scope="module")
def calls(gcc_build: Build) -> size.CallGraph:
    return size.call_graph(gcc_build.directory)


def test_every_frame_has_a_fixed_size(calls: size.CallGraph) -> None:
    assert {"colibri_forward", "clb_run_moe", "clb_run_linear"} <= calls.frames.keys()
    assert calls.dynamic == set()


def test_worst_case_stack_is_bounded(calls: size.CallGraph, gcc_build: Build) -> None:
    assert calls.outside <= ALLOWED_UNDEFINED
    worst = {name: calls.worst(name) for name in size.exported(gcc_build.library)}  # raises on recursion
    deep = {name: (used, way) for name, (used, way) in worst.items() if used > STACK_LIMITS.get(name, OTHER_STACK)}
    assert deep == {}


def test_attention_alone_needs_more_stack_than_other_models(calls: size.CallGraph) -> None:
    others = {name: called - {"clb_attention"} for name, called in calls.calls.items()}
    without = size.CallGraph(calls.frames, calls.dynamic, others)
    assert without.worst("colibri_forward")[0] <= STACK_WITHOUT_ATTENTION < calls.worst("colibri_forward")[0]


def test_worst_case_stack_follows_the_calls_through_tables(calls: size.CallGraph) -> None:
    assert {"clb_map", "clb_reduce"} <= calls.calls["run_rows"]
    assert {"panel", "unary"} <= calls.calls.get("run_chunk", set()) | calls.calls["clb_run_linear"]
    assert {"panel", "unary"} <= calls.calls["attend"]
    assert {"scores_of", "choose"} <= calls.calls["clb_route"]
    assert "unary" in calls.calls["scores_of"]
    own = sum(calls.frames[name] for name in ("colibri_forward", "clb_run_moe"))
    assert calls.worst("colibri_forward")[0] > own


def test_recursion_is_found() -> None:
    graph = size.CallGraph({"a": 8, "b": 8}, set(), {"a": {"b"}, "b": {"a"}})
    with pytest.raises(size.StackError, match="a -> b -> a"):
        graph.worst("a")


def test_no_function_calls_itself(calls: size.CallGraph) -> None:
    for name in calls.frames:
        calls.worst(name)


SOURCES = sorted((size.ENGINE / "src").rglob("*.c"))


@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_fast_math_is_refused(cc: str) -> None:
    command = [compiler(cc), "-std=c11", f"-I{size.ENGINE / 'include'}", "-fsyntax-only"]
    assert SOURCES
    for source in SOURCES:
        plain = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
        fast = subprocess.run([*command, "-ffast-math", str(source)], capture_output=True, text=True, check=False)
        assert plain.returncode == 0, plain.stderr
        assert fast.returncode != 0 and "-ffast-math" in fast.stderr, source.name


@pytest.mark.parametrize("standard", ["c++11", "c++20"])
def test_headers_serve_cplusplus(standard: str, gcc_build: Build, tmp_path: Path) -> None:
    program = tmp_path / "use.cpp"
    program.write_text(
        '#include "colibri.h"\n#include "colibri_inspect.h"\n#include "colibri_lm.h"\n#include <cstdio>\n'
        "int main() { std::puts(colibri_version()); return colibri_check(nullptr, 0, COLIBRI_CHECK_WEIGHTS); }\n",
        encoding="utf-8",
    )
    binary = program.with_suffix("")
    flags = [f for f in C_FLAGS if f != "-Wpedantic"]
    subprocess.run([compiler("g++"), f"-std={standard}", *flags, "-Wpedantic", f"-I{size.ENGINE / 'include'}", program,
                    gcc_build.archive, "-o", binary], check=True)  # fmt: skip
    done = subprocess.run([binary], capture_output=True, text=True, check=False)
    assert done.returncode == 1  # COLIBRI_ERR_NULL, by the C++ program's own eyes
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize("first", ["colibri.h", "colibri_inspect.h", "colibri_lm.h"])
def test_each_header_stands_alone_in_c11(first: str) -> None:
    command = [compiler("gcc"), "-std=c11", *C_FLAGS, f"-I{size.ENGINE / 'include'}", "-fsyntax-only", "-xc", "-"]
    subprocess.run(command, input=f'#include "{first}"\n#include "{first}"\n', text=True, check=True)
