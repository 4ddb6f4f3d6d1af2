"""Models of any size: written a weight at a time they are what is written at once, and an interruption costs little."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from colibri import exporter
from colibri.emit import crc, model_bin, pieces, writer
from colibri.errors import ExportError
from colibri.format import package
from colibri.ir.graph import Graph, Router
from colibri.ir.weights import Deferred, Weight, kind_of, loaded, stack, take_rows
from colibri.lowering.lower import lower
from colibri.lowering.plan import plan
from colibri.lowering.program import Program
from colibri.passes.fuse import fuse_activations
from colibri.passes.merge import merge_gates
from colibri.passes.read import read_weights
from colibri.pipeline import language as language_export
from colibri.quantize.deferred import quantize_deferred
from colibri.reference.certificate import Certificate, certify
from colibri.runtime import engine
from tests.graphs import FORMATS, constant, expert, linear
from tests.lm_graphs import language_model

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("fp32", "fp16", "int8", "int4")


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """A shell starts background jobs deaf to SIGINT; what it stops is tested here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def moe_graph(fmt: str = "fp32", d: int = 40, experts: int = 5) -> Graph:
    graph, rng = Graph("stream"), np.random.default_rng(1)
    x = graph.add("rmsnorm", graph.add_input("x", (d,)), constant(graph, rng, "norm", d), eps=1e-6)
    logits = linear(graph, rng, x, experts, True)
    body = [expert(e, d, 27, d, (1, 0)[e % 2], fmt) for e in range(experts)]
    y = graph.add("moe", x, logits, router=Router(experts, 2, "softmax", "sum"), experts=body)
    graph.outputs = [linear(graph, rng, graph.add("binary", x, y, func="add"), 70, True, fmt)]
    return graph


def text_graph(tied: bool = False) -> Graph:
    """A language model of operations that every engine knows, and an embedding."""
    graph, rng = Graph("text", context=64), np.random.default_rng(2)
    table = constant(graph, rng, "embedding", 90, 48)
    x = graph.add("embed", graph.add_input("id", (1,)), table)
    logits = graph.add("reshape", linear(graph, rng, x, 4, False), shape=(4,))
    body = [expert(e, 48, 32, 48, 1) for e in range(4)]
    x = graph.add("moe", x, logits, router=Router(4, 2, "softmax", "sum"), experts=body)
    head = table if tied else constant(graph, rng, "head", 90, 48)
    graph.outputs = [graph.add("linear", x, head)]
    return graph


def deferred(graph: Graph, log: Path | None = None, by_rows: bool = True) -> Graph:
    """The graph with its weights read when they are needed, each reading a line in `log`."""

    def later(name: str, value: Weight) -> Weight:
        def load() -> Any:
            if log is not None:
                with log.open("a") as file:
                    file.write(f"{graph.name} {name}\n")
            return loaded(value)

        rows = (lambda start, stop: take_rows(load(), start, stop)) if by_rows and kind_of(value)[1] < 0 else None
        return Deferred(value.shape, type(value), load, kind_of(value)[1], rows if len(value.shape) == 2 else None)

    nodes = [
        replace(n, attrs={**n.attrs, "experts": [deferred(e, log, by_rows) for e in n.attrs["experts"]]})
        if n.op == "moe"
        else n
        for n in graph.nodes
    ]
    return replace(graph, nodes=nodes, constants={k: later(k, v) for k, v in graph.constants.items()})


def program_of(graph: Graph) -> Program:
    program = lower(merge_gates(fuse_activations(graph)), 4)
    plan(program)
    return program


def nothing(path: Path) -> Certificate:
    return Certificate([], [], 0)


class Steps:
    """What progress was told."""

    done = total = count = 0

    def add(self, done: int, total: int, name: str) -> None:
        assert self.done < done <= total and name
        self.done, self.total, self.count = done, total, self.count + 1


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of the tests are large, and cut into many pieces and blocks."""
    monkeypatch.setattr(pieces, "_PIECE", 256)
    monkeypatch.setattr(pieces, "_BLOCK", 200)


def test_checksums_of_parts_give_that_of_the_whole() -> None:
    data = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8).tobytes()
    for cut in (0, 1, 64, 4999, 5000):
        a, b = data[:cut], data[cut:]
        assert crc.combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(data)
    assert crc.combine(zlib.crc32(data), zlib.crc32(bytes(1 << 20)), 1 << 20) == zlib.crc32(data + bytes(1 << 20))


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_streamed_file_has_the_bytes_of_one_made_in_memory(
    fmt: str, by_rows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = moe_graph(fmt)
    rows = [np.random.default_rng(3).standard_normal((12, 40), np.float32)]
    certificate = certify(merge_gates(graph), rows)
    want = model_bin.write(program_of(graph), certificate.golden, certificate.frequencies, {"n": 1}, 64)
    late = program_of(deferred(graph, by_rows=by_rows))
    assert model_bin.write(late, certificate.golden, certificate.frequencies, {"n": 1}, 64) == want
    for workers, cut in ((1, False), (1, True), (3, True)):
        if cut:
            small_pieces(monkeypatch)
        path, seen = tmp_path / f"{workers}{cut}.bin", Steps()
        writer.write(late, path, lambda file: certificate, info={"n": 1}, golden_rows=len(certificate.golden),
                     expert_align=64, workers=workers, on_progress=seen.add)  # fmt: skip
        assert path.read_bytes() == want
        assert seen.done == seen.total and seen.count >= (20 if cut and by_rows and "outliers" not in fmt else 6)
        assert sorted(p.name for p in tmp_path.glob(f"{path.name}*")) == [path.name]
    package.open_package(path).check_weights()


@pytest.mark.parametrize("share", [0.0, 0.05])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_formats_by_role_stream_like_in_memory(
    tied: bool, dtype: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in (True, False):
        graph = quantize_deferred(deferred(text_graph(tied), by_rows=part), dtype, share=share)
        program = program_of(graph)
        small_pieces(monkeypatch)
        writer.write(program, tmp_path / "model.bin", nothing, workers=2)
        assert (tmp_path / "model.bin").read_bytes() == model_bin.write(program_of(read_weights(graph)))
        kinds = {name: kind_of(value)[0] for name, value in graph.constants.items()}
        linears = {"fp32": "ndarray", "fp16": "Fp16Weight", "int8": "Int8Weight", "int4": "Int4Weight"}[dtype]
        assert kinds["w_0"] == "ndarray"  # the router
        assert kinds["embedding"] == ("Int8Weight" if dtype == "int4" and not tied else linears)
        assert kinds["embedding" if tied else "head"] == linears
        assert kind_of(graph.constants["embedding"])[1] == -1
        body = graph.nodes[-2].attrs["experts"][0]
        assert {kind_of(v)[0] for v in body.constants.values() if len(v.shape) == 2} == {linears}
        if share and dtype.startswith("int"):
            assert any(kind_of(v)[1] > 0 for v in body.constants.values())


def test_energies_change_the_weights_they_are_for() -> None:
    graph = text_graph()
    flat = quantize_deferred(graph, "int4")
    energy = {"head": np.geomspace(1e-4, 1, 48).astype(np.float32), (0, 2, "w_1"): np.ones(48, np.float32)}
    given = quantize_deferred(graph, "int4", energies=energy)
    changed = [n for n in graph.constants if not np.array_equal(flat.array(n), given.array(n))]
    assert changed == ["head"]


def test_rows_of_stacked_weights_are_the_rows_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((n, 6)).astype(np.float32) for n in (13, 9)]
    a, b = (Deferred(p.shape, np.ndarray, lambda p=p: p, -1, lambda i, j, p=p: p[i:j]) for p in parts)  # type: ignore[misc]
    both, whole = stack(a, b), np.concatenate(parts)
    for start, stop in ((0, 22), (0, 13), (13, 22), (8, 16), (12, 14)):
        found = take_rows(both, start, stop)
        assert isinstance(found, np.ndarray) and np.array_equal(found, whole[start:stop])


# --- interruptions ----------------------------------------------------------------------------------------------------


def in_child(run: Callable[[], None]) -> tuple[int, str]:
    """Run it in a process of its own; how that ended, and the error it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    return os.waitpid(child, 0)[1], text


def reads(log: Path) -> list[str]:
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


@pytest.mark.parametrize("workers", [1, 2])
def test_an_export_that_was_killed_goes_on_where_it_stopped(workers: int, tmp_path: Path) -> None:
    log, path, told, said = tmp_path / "log", tmp_path / "out" / "model.bin", tmp_path / "finished", []
    program = program_of(quantize_deferred(deferred(moe_graph(experts=40), log), "int8"))

    def die(done: int, total: int, name: str) -> None:
        with told.open("a") as file:
            file.write(name + "\n")
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    status, _ = in_child(lambda: writer.write(program, path, nothing, workers=workers, on_progress=die))
    assert os.WTERMSIG(status) == signal.SIGKILL and not path.exists()
    finished = len(told.read_text().splitlines())
    time.sleep(1 if workers > 1 else 0)  # workers go when they see that their parent is gone
    before = len(reads(log))
    writer.write(program, path, nothing, workers=workers, say=said.append)
    assert finished > 10 and said == [f"going on with an unfinished export: {finished} parts are there"]
    after = len(reads(log))
    assert path.read_bytes() == model_bin.write(program)
    every = len(reads(log))
    assert after == every - before if workers == 1 else after <= every - 3 * finished
    assert [p.name for p in path.parent.iterdir()] == ["model.bin"]


def interrupted(program: Program, path: Path, **options: Any) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="run the same export again to go on"):
        writer.write(program, path, nothing, on_progress=stop, **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_control_c_leaves_a_state_to_go_on_from(workers: int, tmp_path: Path) -> None:
    path, said = tmp_path / "model.bin", []
    program = program_of(moe_graph("int8"))
    interrupted(program, path, workers=workers)
    assert {p.name for p in tmp_path.iterdir()} == {"model.bin.partial", "model.bin.journal"}
    writer.write(program, path, nothing, workers=workers, say=said.append)
    assert "going on" in said[0] and path.read_bytes() == model_bin.write(program)


def test_other_options_or_another_model_start_again(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "model.bin"
    graph = deferred(moe_graph(), log)
    program = program_of(graph)
    for other, key in ((program, "energies"), (program_of(quantize_deferred(graph, "fp16")), "")):
        said: list[str] = []
        interrupted(program, path, key="")
        reads(log)
        writer.write(other, path, nothing, key=key, say=said.append)
        assert said == ["an unfinished export of another model or with other options is discarded"]
        resumed = len(reads(log))
        assert path.read_bytes() == model_bin.write(other)
        assert resumed == len(reads(log))


def test_a_finished_part_that_is_damaged_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    program = program_of(moe_graph("int8"))
    interrupted(program, path)
    partial = path.with_name("model.bin.partial")
    data = bytearray(partial.read_bytes())
    data[model_bin.arrange(program, 0, {}).meta_bytes] ^= 1
    partial.write_bytes(data)
    with path.with_name("model.bin.journal").open("a") as file:
        file.write("3 0000")  # a line that was cut off
    writer.write(program, path, nothing)
    assert path.read_bytes() == model_bin.write(program)


@pytest.mark.parametrize("early", [True, False])
def test_a_full_disk_is_reported_and_the_export_can_go_on(
    early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.bin"
    program = program_of(moe_graph("fp16"))
    want = model_bin.write(program)

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(want) * 2 // 3, len(want) * 2 // 3))
        writer.write(program, path, nothing)

    if not early:  # a file system that sets nothing aside
        monkeypatch.setattr(writer, "_allocate", lambda file, total: None)
    status, error = in_child(run)
    assert os.WEXITSTATUS(status) == 1 and error.startswith("ExportError: ") and "cannot be written" in error
    assert "File too large" in error and "go on with it" in error
    assert path.with_name("model.bin.journal").exists() and not path.exists()
    monkeypatch.undo()
    writer.write(program, path, nothing)
    assert path.read_bytes() == want


@pytest.mark.parametrize("workers", [1, 2])
def test_a_weight_that_cannot_be_read_is_named(workers: int, tmp_path: Path) -> None:
    graph = moe_graph()

    def broken(problem: Any) -> Graph:
        body = graph.nodes[-3].attrs["experts"]
        bad = Deferred((27, 40), np.ndarray, problem)
        last = replace(body[4], constants={**body[4].constants, "w_1": bad})
        moe = replace(graph.nodes[-3], attrs={**graph.nodes[-3].attrs, "experts": [*body[:4], last]})
        return replace(graph, nodes=[*graph.nodes[:-3], moe, *graph.nodes[-2:]])

    def absent() -> Any:
        raise FileNotFoundError("shard 3")

    nan = np.full((27, 40), np.nan, np.float32)
    for problem, dtype, message in (
        (absent, "fp32", r"expert 4: w_0\+w_1 cannot be read: FileNotFoundError: shard 3"),
        (lambda: nan, "fp32", "expert 4: .*w_1: .*NaN or infinite"),
        (lambda: nan, "int4", "expert 4: .*w_1: .*NaN or infinite"),
        (
            lambda: np.zeros((27, 5), np.float32),
            "fp32",
            r"w_1: .*shape \(27, 5\) was read where .* \(27, 40\) was announced",
        ),
    ):
        program = program_of(quantize_deferred(broken(problem), dtype))
        with pytest.raises(ExportError, match=message):
            writer.write(program, tmp_path / "model.bin", nothing, workers=workers)


def test_one_export_at_a_time_writes_to_a_place(tmp_path: Path) -> None:
    program = program_of(moe_graph())

    def second(path: Path) -> Certificate:
        _, error = in_child(lambda: writer.write(program, tmp_path / "model.bin", nothing))
        assert "in use" in error
        return nothing(path)

    writer.write(program, tmp_path / "model.bin", second)


# --- export_lm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_language_model_exports_with_the_certificate_of_its_first_tokens(dtype: str, tmp_path: Path) -> None:
    stages: list[str] = []
    summary = exporter.export_lm(deferred(language_model()), tmp_path, dtype=dtype, workers=2, max_batch=8,
                                 golden_rows=6, on_stage=lambda name, value: stages.append(name))  # fmt: skip
    model = engine.load(tmp_path)
    model.selftest()
    found = model.package
    assert summary["certificate"] == found.info["certificate"] == "reference" and summary["golden_rows"] == 6
    assert stages[-1] == "export" and (tmp_path / "model.h").exists()
    at, size = int(found.header["golden_offset"]), int(found.header["golden_bytes"])
    heads = [found.data[at + n * size :][:12].view(np.uint32) for n in range(6)]
    assert len({int(head[0]) for head in heads}) == 6 and all(head[1] == 4 for head in heads)


def test_the_engine_certifies_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter.export_lm(language_model(), tmp_path / "a.bin", golden_rows=3)
    monkeypatch.setattr(language_export, "_REFERENCE_WORK", 0)
    exporter.export_lm(language_model(), tmp_path / "b.bin", golden_rows=3)
    a, b = (package.open_package(tmp_path / f"{name}.bin") for name in "ab")
    assert (a.info["certificate"], b.info["certificate"]) == ("reference", "engine")
    (first, end), (start, stop) = (
        (int(p.header["golden_offset"]), int(p.header["golden_offset"]) + 3 * int(p.header["golden_bytes"]))
        for p in (a, b)
    )
    assert np.array_equal(a.data[first:end], b.data[start:stop])
    assert np.array_equal(a.experts["frequency"], b.experts["frequency"]) and a.experts["frequency"].any()
    engine.load(tmp_path / "b.bin").selftest()


# --- memory -----------------------------------------------------------------------------------------------------------

MEASURE = """
import json, resource, sys, re
from pathlib import Path
import numpy as np
from colibri import exporter
from colibri.ir.graph import Graph, Router
from colibri.pipeline.language import certify_by_engine
from colibri.ir.weights import Deferred

wide, experts, dtype, workers, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
base = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
total = [0, 0]

def weight(graph, name, *shape):
    size = 4 * int(np.prod(shape))
    total[0], total[1] = total[0] + size, max(total[1], size)
    return graph.add_constant(name, Deferred(shape, np.ndarray, lambda: np.resize(base, shape)))

g, d, vocab = Graph("large", context=64), 1024, wide
x = g.add("embed", g.add_input("id", (1,)), weight(g, "embedding", vocab, d))
bodies = []
for e in range(experts):
    b = Graph(f"e{e}")
    t = b.add_input("x", (d,))
    gate = b.add("unary", b.add("linear", t, weight(b, "gate", 2048, d)), func="silu")
    up = b.add("linear", t, weight(b, "up", 2048, d))
    b.outputs = [b.add("linear", b.add("binary", gate, up, func="mul"), weight(b, "down", d, 2048))]
    bodies.append(b)
logits = g.add("linear", x, weight(g, "router", experts, d))
x = g.add("moe", x, logits, router=Router(experts, 2, "softmax", "sum"), experts=bodies)
g.outputs = [g.add("linear", x, weight(g, "head", vocab, d))]
seen, peak = [], 0

def certify(*given):
    global peak  # what the engine maps of the file afterwards is no memory of the process's own
    peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    return certify_by_engine(*given)

exporter.export_lm(g, Path(path), dtype=dtype, workers=workers, certifier=certify,
                   on_progress=lambda *step: seen.append(step))
worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps({"weights": total[0], "largest": total[1], "peak": max(peak, worker), "seen": seen[-1][:2]}))
"""


def measured(wide: int, experts: int, dtype: str, workers: int, path: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", MEASURE, *map(str, (wide, experts, dtype, workers, path))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["seen"][0] == found["seen"][1] > 0
    return found


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Weights of 0.9 GB, the largest a tenth of a GB and read whole."""
    found = measured(32768, 25, "fp16", 2, tmp_path / "model.bin")
    assert found["weights"] > 850e6 and found["peak"] < 2 * found["largest"] + 130e6


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "workers"), [("int8", 2), ("int4", 1)])
def test_memory_stays_bounded_for_gigabytes(dtype: str, workers: int, tmp_path: Path) -> None:
    found = measured(131072, 60, dtype, workers, tmp_path / "model.bin")
    assert found["weights"] > 2.5e9 and found["peak"] < max(1e9, 2 * found["largest"])


# --- the command ------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, d: int = 32, vocab: int = 50) -> Path:
    """A tiny Qwen3-MoE as Hugging Face stores it."""
    rng, tensors = np.random.default_rng(4), {}

    def put(name: str, *shape: int) -> None:
        tensors[f"model.{name}.weight"] = rng.normal(0, 0.2, shape).astype(np.float32)

    put("embed_tokens", vocab, d)
    for n in range(2):
        block = f"layers.{n}."
        for name, rows in (("q", 32), ("k", 16), ("v", 16)):
            put(f"{block}self_attn.{name}_proj", rows, d)
        put(f"{block}self_attn.o_proj", d, 32)
        for name, size in (("self_attn.q_norm", 8), ("self_attn.k_norm", 8), ("input_layernorm", d),
                           ("post_attention_layernorm", d)):  # fmt: skip
            put(block + name, size)
        put(f"{block}mlp.gate", 4, d)
        for e in range(4):
            for name, shape in (("gate", (24, d)), ("up", (24, d)), ("down", (d, 24))):
                put(f"{block}mlp.experts.{e}.{name}_proj", *shape)
    put("norm", d)
    tensors["lm_head.weight"] = rng.normal(0, 0.2, (vocab, d)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": vocab, "hidden_size": d,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 48, "norm_topk_prob": True,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 128, "hidden_act": "silu",
        "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def command(*args: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "colibri.cli", *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_the_command_exports_a_checkpoint_and_goes_on_with_it(tmp_path: Path) -> None:
    source, out = checkpoint(tmp_path / "source"), tmp_path / "out"
    done = command("export", "-m", source, "-o", out, "--dtype", "int4", "--workers", 2, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    summary = json.loads(done.stdout)
    assert (summary["dtype"], summary["certificate"], summary["golden_rows"]) == ("int4", "reference", 16)
    engine.load(out).selftest()
    assert "model.bin" in {p.name for p in out.iterdir()}
    refused = command("export", "-m", source, "-o", out, "--budget", "3MB")
    assert refused.returncode == 1 and "--budget is not for language models" in refused.stderr
    (out / "model.bin").rename(tmp_path / "first.bin")
    interrupted(program_of(moe_graph()), out / "model.bin")
    done = command("export", "-m", source, "-o", out, "--dtype", "int4")
    assert "an unfinished export of another model or with other options is discarded" in done.stderr
    assert (out / "model.bin").read_bytes() == (tmp_path / "first.bin").read_bytes()
