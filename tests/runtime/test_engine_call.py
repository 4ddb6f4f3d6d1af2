"""Calling a model: the short way in C gives the bits of the general one, and leaves it whatever it cannot take."""

from __future__ import annotations

import gc
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri._engine import caller, ffi
from colibri.errors import ModelError
from colibri.exporter import build
from colibri.format.spec import HEAD_BYTES
from colibri.ir.graph import Graph
from colibri.reference.interpreter import run
from colibri.runtime import engine
from tests.engine.conftest import MAX_BATCH, example, random_rows
from tests.graphs import graphs, linear
from tests.pipeline.test_export import RANDOM, rows
from tests.pipeline.test_export import build as build_any

SHAPE = (2, 8)  # of a row of `model`


def warm(image: bytes) -> engine.Model:
    """A model that has a context, which its first call makes."""
    model = engine.load(image)
    model.routes(*(np.zeros((1, *p.shape), np.float32) for p in model.inputs))
    assert len(model._contexts) == 1
    return model


@pytest.fixture
def model() -> engine.Model:
    return warm(example("top2_shared").image)


def some(batch: int = 3, seed: int = 1) -> np.ndarray[Any, Any]:
    return random_rows(example("top2_shared"), batch, seed)[0]


def want(x: Any) -> bytes:
    return run(example("top2_shared").graph, [x])[0].tobytes()


@given(graphs(), st.integers(1, 6), st.data())
@RANDOM
def test_repeated_calls_equal_the_reference(graph: Graph, max_batch: int, data: st.DataObject) -> None:
    export = build_any(graph, max_batch)
    model = warm(export.image)
    for batch in data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)):
        inputs = rows(graph, batch, batch)
        expected = run(export.graph, inputs)
        short = model._call(*inputs)
        assert (short is not None) == (len(inputs) == len(expected) == 1 and batch <= max_batch)
        got = model(*inputs)
        for outputs in [got if isinstance(got, tuple) else (got,), *([(short,)] if short is not None else [])]:
            assert [y.shape for y in outputs] == [y.shape for y in expected]
            assert [y.tobytes() for y in outputs] == [y.tobytes() for y in expected]


@pytest.mark.parametrize("batch", range(1, MAX_BATCH + 1))
def test_an_output_is_a_new_array(model: engine.Model, batch: int) -> None:
    x = some(batch)
    first, second = model(x), model(x)
    for y in (first, second):
        assert type(y) is np.ndarray and y.dtype is np.dtype(np.float32) and y.shape == (batch, *SHAPE)
        assert y.flags.owndata and y.flags.writeable and y.flags.c_contiguous and y.flags.aligned
    assert not np.shares_memory(first, second) and not np.shares_memory(first, x)
    first[:] = 0
    assert model(x).tobytes() == second.tobytes() == want(x)


def test_an_input_may_be_read_only_and_is_not_written(model: engine.Model) -> None:
    x = some()
    x.flags.writeable = False
    before = x.tobytes()
    assert model._call(x).tobytes() == model(x).tobytes() == want(x)
    assert x.tobytes() == before


def unaligned(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    memory = np.empty(x.nbytes + 1, np.uint8)
    memory[1:] = np.frombuffer(x.tobytes(), np.uint8)
    return memory[1:].view(np.float32).reshape(x.shape)


class Subclass(np.ndarray[Any, Any]):
    """An array of another class."""


OTHERS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "float64": lambda x: x.astype(np.float64),
    "another byte order": lambda x: x.astype(">f4"),
    "not aligned": unaligned,
    "every other row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "columns first": np.asfortranarray,
    "backwards": lambda x: np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "a subclass": lambda x: x.view(Subclass),
    "a masked array": lambda x: np.ma.masked_array(x),
    "lists": lambda x: x.tolist(),
    "a memoryview": memoryview,
    "a batch longer than the engine's": lambda x: np.concatenate([x] * MAX_BATCH),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_the_usual_array_takes_the_general_path(model: engine.Model, name: str) -> None:
    x = OTHERS[name](some())
    assert model._call(x) is None
    plain = np.ascontiguousarray(x, np.float32)
    for _ in range(2):
        y = model(x)
        assert type(y) is np.ndarray and y.shape == (len(plain), *SHAPE) and y.tobytes() == want(plain)


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.bool_, np.float16, np.int32])
def test_numbers_of_other_types_are_converted(model: engine.Model, dtype: type) -> None:
    x = (some() * 3).astype(dtype)
    assert model._call(x) is None
    assert model(x).tobytes() == want(x.astype(np.float32))


USUAL = np.ones((3, *SHAPE), np.float32)
WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "objects": ((USUAL.astype(object),), "holds object, not numbers"),
    "complex": ((USUAL.astype(np.complex64),), "holds complex64, not numbers"),
    "dates": ((USUAL.astype("datetime64[s]"),), "holds datetime64"),
    "records": ((USUAL.view([("a", "f4")]),), "not numbers"),
    "text": (("text",), "not numbers"),
    "nothing": ((None,), "not numbers"),
    "a row alone": ((USUAL[0],), r"has shape \(2, 8\), but the model takes \(batch, 2, 8\)"),
    "an axis before": ((USUAL[None],), r"has shape \(1, 3, 2, 8\)"),
    "an axis behind": ((USUAL[..., None],), r"has shape \(3, 2, 8, 1\)"),
    "an axis less": ((USUAL[:, :, 0].copy(),), r"has shape \(3, 2\)"),
    "one number": ((np.float32(1),), r"has shape \(\)"),
    "an array of one number": ((np.ones((), np.float32),), r"has shape \(\)"),
    "a wider row": ((np.ones((3, 2, 9), np.float32),), r"has shape \(3, 2, 9\)"),
    "as many numbers, another shape": ((USUAL.reshape(3, 8, 2),), r"has shape \(3, 8, 2\)"),
    "no rows": ((USUAL[:0],), "the batch is empty"),
    "no inputs": ((), "takes 1 inputs"),
    "two inputs": ((USUAL, USUAL), "takes 1 inputs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_with_a_reason(model: engine.Model, name: str) -> None:
    inputs, reason = WRONG[name]
    for _ in range(2):
        assert model._call(*inputs) is None
        with pytest.raises(ModelError, match=reason):
            model(*inputs)
    assert len(model._contexts) == 1
    assert model(some()).tobytes() == want(some())


def test_several_inputs_or_outputs_take_the_general_path() -> None:
    export = example("many_ports")
    model, inputs = warm(export.image), random_rows(export, 3)
    assert model._call(*inputs) is None and model._call(inputs[0]) is None
    assert [y.tobytes() for y in model(*inputs)] == [y.tobytes() for y in run(export.graph, inputs)]


@pytest.mark.parametrize("arguments", [(), (1, 2, 3), ((), 1, (), (), 0, 0, 0), ([], 1, [], (), 0, 0, 0),
                                       ([], 1 << 40, (), (), 0, 0, 0)])  # fmt: skip
def test_the_short_way_is_made_from_what_it_needs_only(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        caller(*arguments)


def test_a_failing_allocation_is_raised_and_loses_no_context(model: engine.Model) -> None:
    def empty(*_: Any) -> Any:
        raise MemoryError("none left")

    for failing, error in [(empty, MemoryError), (lambda *_: 1, TypeError), (lambda *_: b"constant", BufferError)]:
        call = caller(model._contexts, MAX_BATCH, SHAPE, SHAPE, np.ndarray, failing, np.dtype(np.float32))
        for _ in range(3):
            with pytest.raises(error):
                call(some())
        assert len(model._contexts) == 1


@pytest.mark.parametrize(("field", "place"), [("max_batch", 4), ("model", 32), ("kernels", 56), ("seal", 80)])
def test_a_forward_that_failed_raises_its_error(model: engine.Model, field: str, place: int) -> None:
    """C13: what the general path raises, the short way raises too."""
    head = np.frombuffer(ffi.buffer(model._contexts[0][2], HEAD_BYTES), np.uint8)
    for _ in range(2):
        head[place] ^= 64
        assert model._call(some()) is None
        for call in (model, model.routes):
            with pytest.raises(ModelError, match="COLIBRI_ERR_DAMAGED"):
                call(some())
        head[place] ^= 64
        assert len(model._contexts) == 1
        assert model(some()).tobytes() == want(some())


def test_an_output_that_was_not_written_is_never_returned(model: engine.Model) -> None:
    """C13: as of a batch that the engine refuses."""
    call = caller(model._contexts, MAX_BATCH + 5, SHAPE, SHAPE, np.ndarray, np.empty, np.dtype(np.float32))
    assert call(some(MAX_BATCH + 1)) is None  # COLIBRI_ERR_BATCH
    assert call(some()).tobytes() == want(some())


@pytest.fixture
def eager_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switches")
def test_calls_from_many_threads_have_contexts_of_their_own() -> None:
    model = engine.load(example("top2_shared").image)
    inputs = [some(1 + n % (MAX_BATCH + 2), seed=n) for n in range(24)]  # some longer than the engine's batch
    inputs[::5] = [x.astype(np.float64) for x in inputs[::5]]
    expected = [want(x.astype(np.float32)) for x in inputs]
    barrier = threading.Barrier(6)

    def work(first: int) -> bool:
        barrier.wait()
        order = [(first + 5 * n) % len(inputs) for n in range(400)]
        return all(model(inputs[n]).tobytes() == expected[n] for n in order)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))
    addresses = [context[0] for context in model._contexts]
    assert len(set(addresses)) == len(addresses) <= 6


def test_other_threads_run_during_a_call() -> None:
    graph = Graph("long")
    x = graph.add_input("x", (600,))
    graph.outputs = [linear(graph, np.random.default_rng(0), x, 600, False)]
    model = warm(build(graph, max_batch=256).image)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(1e-4):
            ticks.append(time.perf_counter())

    interval = sys.getswitchinterval()
    other = threading.Thread(target=tick)
    other.start()
    try:
        sys.setswitchinterval(1000)  # from now on the other thread runs only where this one lets it
        batch, during = np.zeros((256, 600), np.float32), 0
        for _ in range(50):
            before = len(ticks)
            assert model._call(batch) is not None
            during += len(ticks) - before
            if during:
                break
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        other.join()
    assert during


def calls(model: engine.Model, x: np.ndarray[Any, Any], wrong: np.ndarray[Any, Any], count: int) -> None:
    """Calls of every kind: the short way, refused by it, and refused altogether."""
    for _ in range(count):
        model(x)
        model(x[::2])
        model._call(x, x)
        try:
            model(wrong)
        except ModelError:
            continue
        raise AssertionError("the wrong shape was taken")


def test_calls_keep_no_reference_and_no_memory(model: engine.Model) -> None:
    x, wrong = some(MAX_BATCH), np.zeros((300, 2, 9), np.float32)
    shared = [x, wrong, *model._call.__self__, model._contexts[0]]
    tracemalloc.start()
    try:
        calls(model, x, wrong, 20)
        gc.collect()
        counts = [sys.getrefcount(value) for value in shared]
        before = tracemalloc.get_traced_memory()[0]
        calls(model, x, wrong, 500)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 4000  # eight bytes a round would be as many
    finally:
        tracemalloc.stop()
    # Others share the small integers and NumPy's own objects too: their counts may move a little.
    moved = [abs(sys.getrefcount(value) - count) for value, count in zip(shared, counts, strict=True)]
    assert max(moved) < 50
    assert len(model._contexts) == 1


def test_a_model_and_its_contexts_go_with_their_last_reference() -> None:
    image, x = example("top2_shared", max_batch=64).image, some()

    def use() -> weakref.ref[engine.Model]:
        model = warm(image)
        model(x)
        return weakref.ref(model)

    for _ in range(3):  # until caches have filled
        use()
    tracemalloc.start()
    try:
        use()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(200):
            assert use()() is None
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
        assert kept < 10 * warm(image).context_bytes  # the interpreter keeps small objects of its own, under 100 kB
    finally:
        tracemalloc.stop()
