"""Operations that look at positions: reference = C, bit for bit, however a text is cut, on every set of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri import exporter
from colibri.emit import model_bin
from colibri.errors import ExportError, ModelError
from colibri.format import spec
from colibri.ir.graph import Graph
from colibri.lowering.lower import lower
from colibri.lowering.plan import plan
from colibri.passes.fold import fold_constants
from colibri.quantize import formats
from colibri.reference import sequence
from colibri.reference.interpreter import Trace, run
from colibri.runtime.engine import KERNELS, opened
from colibri.runtime.language import LanguageModel
from tests.lm_graphs import encoder_decoder, language_model

FORMATS = {
    "fp32": None,
    "fp16": formats.fp16,
    "int8": lambda m: formats.int8(m, share=0),
    "int4": lambda m: formats.int4(m, share=0),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16 cache": {"cache": "fp16"},
    "int8 cache": {"cache": "int8"},
    "one head each": {"kv": 4},
    "window": {"window": 70},
    "narrow window": {"window": 3, "cache": "fp16"},
    "sinks": {"sinks": True, "window": 66},
    "soft cap": {"softcap": 1.5},
    "one latent": {"kv": 1, "key": 20, "value": 72, "heads": 5},
    "one latent in int8": {"kv": 1, "key": 20, "value": 12, "heads": 9, "cache": "int8"},
    "delay": {"delay": 2, "layers": 1},
    "long delay": {"delay": 90, "layers": 1},
    "delta": {"delta": True, "layers": 1},
    "wide delta": {"delta": True, "heads": 6, "key": 20, "value": 37, "delay": 1},
}


def image(graph: Graph, max_batch: int) -> bytes:
    program = lower(graph, max_batch)
    plan(program)
    return model_bin.write(program)


def text(count: int, vocab: int = 40) -> np.ndarray[Any, Any]:
    return np.random.default_rng(count).integers(0, vocab, count)


def reference(graph: Graph, ids: Any) -> Any:
    return run(graph, [np.asarray(ids, np.float32)[:, None]])[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_engine_gives_the_references_bits_however_a_text_is_cut(variant: str) -> None:
    graph, ids = language_model(**VARIANTS[variant]), text(150)
    want = reference(graph, ids)
    for max_batch, kernels, threads in (
        (1, KERNELS[0], 1),
        (7, KERNELS[-1], 1),
        (150, KERNELS[0], 2),
        (64, KERNELS[0], 1),
    ):
        lm = LanguageModel(opened(image(graph, max_batch)), kernels=kernels, threads=threads)
        assert lm.logits(ids).tobytes() == want.tobytes(), (max_batch, kernels, threads)
        lm.reset()
        cut = [lm.logits(part) for part in np.split(ids, [1, 2, 66, 131])]
        assert np.concatenate(cut).tobytes() == want.tobytes()


EXCHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no biases": {"biases": False},
    "full experts": {"capacity": 9},
    "two layers, fp16": {"layers": 2, "cache": "fp16", "capacity": 1},
    "int8": {"cache": "int8", "width": 32, "dim": 16, "encode": FORMATS["int8"]},
}


@pytest.mark.parametrize("source", [1, 8, 64, 131])
@pytest.mark.parametrize("variant", EXCHANGES)
def test_a_decoder_answers_a_source_text_with_the_references_bits(variant: str, source: int) -> None:
    graph, read, ids = encoder_decoder(**EXCHANGES[variant]), text(source), text(150)
    want = run(graph, [ids[:, None]], source=[read[:, None]])[0]
    for max_batch, kernels, threads in ((131, KERNELS[0], 2), (150, KERNELS[-1], 1)):
        lm = LanguageModel(opened(image(graph, max_batch)), kernels=kernels, threads=threads)
        lm.read(read)
        assert lm.logits(ids).tobytes() == want.tobytes()
        lm.reset()  # the source text stays
        cut = [lm.logits(part) for part in np.split(ids, [1, 2, 66, 131])]
        assert np.concatenate(cut).tobytes() == want.tobytes()
        lm.rewind(70)
        assert lm.evaluate(ids[70:]).tobytes() == want[-1].tobytes()
        lm.read(text(7))
        assert lm.position == 0 and lm.logits(ids[:3]).tobytes() != want[:3].tobytes()


def test_rows_of_an_encoder_decoder_are_each_their_own_source_text() -> None:
    graph, ids = encoder_decoder(layers=2), text(9)
    model = LanguageModel(opened(image(graph, 16)))
    want = run(graph, [ids[:, None]], trace := Trace())[0]
    assert model(ids[:, None]).tobytes() == want.tobytes()
    for have, there in zip(model.routes(ids[:, None]), trace.routes, strict=True):
        assert np.array_equal(have, there)


def test_the_routes_of_a_text_are_the_decoders() -> None:
    graph, ids, read = encoder_decoder(layers=2, capacity=2), text(30), text(11)
    lm = LanguageModel(opened(image(graph, 16)))
    run(graph, [ids[:, None]], trace := Trace(), [read[:, None]])
    assert (trace.routes[0] < 0).any()  # some of the source text's tokens were dropped
    lm.read(read)
    routes = lm.logits_and_routes(ids)[1]
    assert len(routes) == 2
    for have, there in zip(routes, trace.routes[2:], strict=True):
        assert np.array_equal(have, there[:, 0])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("stored", FORMATS)
def test_weights_of_every_format_are_looked_up_and_multiplied(stored: str, kernels: str) -> None:
    graph, ids = language_model(width=32, key=16, value=16, encode=FORMATS[stored], cache="int8", layers=1), text(70)
    lm = LanguageModel(opened(image(graph, 32)), kernels=kernels)
    assert lm.logits(ids).tobytes() == reference(graph, ids).tobytes()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape_of_attention_is_bit_exact(data: st.DataObject) -> None:
    draw = data.draw
    kv = draw(st.integers(1, 3))
    shape = {"kv": kv, "heads": kv * draw(st.integers(1, 9)), "key": 4 * draw(st.integers(1, 9)),
             "value": draw(st.integers(1, 40)), "width": draw(st.integers(3, 20))}  # fmt: skip
    graph = language_model(
        draw(st.integers(0, 99)), context=100, window=draw(st.integers(0, 100)), sinks=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 2.0])), cache=draw(st.sampled_from(["fp32", "fp16", "int8"])), layers=1,
        delay=draw(st.integers(0, 5)), delta=draw(st.booleans()), **shape,
    )  # fmt: skip
    ids = text(draw(st.integers(1, 80)))
    lm = LanguageModel(opened(image(graph, draw(st.integers(1, 80)))), kernels=draw(st.sampled_from(KERNELS)))
    assert lm.logits(ids).tobytes() == reference(graph, ids).tobytes()


SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -3e38, 104.0, -104.0)


def memory(rng: np.random.Generator, kv: int, group: int, key: int, width: int, strange: float) -> Graph:
    """The delta rule on what a table has for each token, some of it strange numbers."""
    g, heads = Graph("memory", context=100), kv * group
    shapes = [(kv, key), (kv, key), (heads, width), (heads,), (heads,)]
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    table = rng.standard_normal((heads * width, ends[-1]))
    table = np.where(rng.random(table.shape) < strange, rng.choice(SPECIAL, table.shape), table)
    x = g.add("embed", g.add_input("token", (1,)), g.add_constant("table", table))
    parts = [g.add("reshape", g.add("slice", x, axis=0, start=int(end - np.prod(shape)), stop=int(end), step=1),
                   shape=shape) for shape, end in zip(shapes, ends, strict=True)]  # fmt: skip
    y = g.add("delta", *parts, scale=float(rng.random()))
    g.outputs = [g.add("reshape", y, shape=(heads * width,), output="logits")]
    return g


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_shape_of_the_delta_rule_is_bit_exact(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    kv, group, key, width = (draw(st.integers(1, most)) for most in (3, 4, 40, 40))
    graph = memory(rng, kv, group, key, width, draw(st.sampled_from([0.0, 0.003])))
    ids = rng.integers(0, kv * group * width, draw(st.integers(2, 60)))
    want = reference(graph, ids)
    threads, kernels = draw(st.integers(1, 2)), draw(st.sampled_from(KERNELS))
    lm = LanguageModel(opened(image(graph, draw(st.integers(1, 60)))), kernels=kernels, threads=threads)
    assert lm.logits(ids).tobytes() == want.tobytes()
    lm.rewind(0)
    cut = [lm.logits(part) for part in np.split(ids, [draw(st.integers(1, len(ids) - 1))])]
    assert np.concatenate(cut).tobytes() == want.tobytes()


def _memory(op: str) -> Graph:
    """The operation on constants alone, which gives another result at every position."""
    rng = np.random.default_rng(3)
    graph = Graph("memory", context=9)
    graph.add_input("token", (1,))
    shapes = {"delta": [(1, 3), (1, 3), (2, 5), (2,), (2,)], "delay": [(4,)], "rope": [(4,), (9, 4)]}[op]
    inputs = [graph.add_constant(f"x{n}", rng.standard_normal(shape)) for n, shape in enumerate(shapes)]
    attributes: dict[str, dict[str, Any]] = {"delta": {"scale": 1.0}, "delay": {"steps": 2}, "rope": {}}
    graph.outputs = [graph.add(op, *inputs, **attributes[op])]
    return graph


@pytest.mark.parametrize(("op", "different"), [("delta", 9), ("delay", 2), ("rope", 9)])
def test_a_constant_differs_by_position_where_positions_count(op: str, different: int) -> None:
    graph = fold_constants(_memory(op))
    want = reference(graph, text(9, 4))
    assert len(np.unique(want, axis=0)) == different
    assert LanguageModel(opened(image(graph, 4))).logits(text(9, 4)).tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 3), (2, 3), (4, 5), (4,)], "needs q, k, v"),
        ([(2, 3), (2, 3), (4, 5), (4,), (4, 1)], "needs q, k, v"),
        ([(2, 3), (2, 4), (4, 5), (4,), (4,)], "do not serve"),
        ([(3, 3), (3, 3), (4, 5), (4,), (4,)], "do not serve"),
        ([(2, 3), (2, 3), (4, 5), (2,), (4,)], "are not one for each"),
        ([(2, 3), (2, 3), (4, 5), (4,), (5,)], "are not one for each"),
    ],
)
def test_a_delta_rule_of_shapes_that_do_not_fit_is_refused(shapes: list[tuple[int, ...]], message: str) -> None:
    graph = Graph("memory", context=9)
    inputs = [graph.add_input(f"x{n}", shape) for n, shape in enumerate(shapes)]
    with pytest.raises(ExportError, match=message):
        graph.add("delta", *inputs, scale=1.0)


def test_a_delta_rule_is_refused_in_an_encoder_and_in_a_recurrence() -> None:
    for read in (True, False):
        g = Graph("exchange", context=9)
        sizes = [(2, 4)] * 3 + [(2,)] * 2
        parts = [g.add_input(f"x{n}", shape) for n, shape in enumerate(sizes)]
        if read:
            y = g.add("delta", *parts, scale=1.0)
            g.outputs = [g.add("attention", parts[0], y, y, scale=1.0, mask="cross")]
        else:
            state = g.add("state", g.add_constant("start", np.zeros((2, 4))))
            g.outputs = [g.add("collect", g.add("delta", state, state, *parts[2:], scale=1.0), state, steps=3)]
        with pytest.raises(ExportError, match="source text" if read else "inside a recurrence"):
            g.validate()


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_shape_of_an_encoder_decoder_is_bit_exact(data: st.DataObject) -> None:
    draw = data.draw
    graph = encoder_decoder(
        draw(st.integers(0, 99)), context=100, heads=draw(st.integers(1, 9)), dim=4 * draw(st.integers(1, 9)),
        width=draw(st.integers(3, 20)), cache=draw(st.sampled_from(["fp32", "fp16", "int8"])),
        capacity=draw(st.integers(0, 30)), biases=draw(st.booleans()),
    )  # fmt: skip
    read, ids = text(draw(st.integers(1, 80))), text(draw(st.integers(1, 80)))
    most = draw(st.integers(len(read), 100))
    lm = LanguageModel(opened(image(graph, most)), kernels=draw(st.sampled_from(KERNELS)))
    lm.read(read)
    assert lm.logits(ids).tobytes() == run(graph, [ids[:, None]], source=[read[:, None]])[0].tobytes()


def test_the_last_row_alone_has_the_bits_of_all() -> None:
    graph, ids = language_model(), text(150)
    lm = LanguageModel(opened(image(graph, 40)))
    want = lm.logits(ids)
    lm.reset()
    assert lm.evaluate(ids).tobytes() == want[-1].tobytes()


@pytest.mark.parametrize("variant", ["plain", "narrow window", "delay", "delta", "int8 cache"])
def test_a_text_goes_back_as_far_as_the_cache_reaches_and_no_further(variant: str) -> None:
    graph, ids, other = language_model(**VARIANTS[variant]), text(150), text(149)
    lm = LanguageModel(opened(image(graph, 4)))
    refused = 0
    for back in range(0, 150, 7):
        lm.reset()
        lm.logits(ids)
        try:
            lm.rewind(back)
        except ModelError as error:
            refused += 1
            assert spec.ERRORS[error.code][0] == "REWIND"  # type: ignore[attr-defined]
            assert lm.position == 150
            continue
        mixed = np.concatenate([ids[:back], other[back:]])
        want = reference(graph, mixed) if back in (0, 140, 147) else None
        have = lm.logits(mixed[back:])
        if want is not None:
            assert have.tobytes() == want[back:].tobytes()
    assert (refused > 0) == (variant in ("narrow window", "delay", "delta"))


def test_an_id_that_is_none_gives_nan_and_a_full_context_an_error() -> None:
    graph = language_model(context=64)
    lm = LanguageModel(opened(image(graph, 8)))
    assert np.isnan(lm(np.array([[99.0]], np.float32))).all() and np.isnan(lm(np.array([[-1.0]], np.float32))).all()
    with pytest.raises(ModelError, match="40"):
        lm.logits([40])
    lm.logits(text(64))
    with pytest.raises(ModelError, match="64 of 64 are in use"):
        lm.logits([1])
    with pytest.raises(ModelError, match="not fit") as full:
        lm(np.zeros((65, 1), np.float32))
    assert spec.ERRORS[full.value.code or 0][0] == "CONTEXT"
    with pytest.raises(ModelError, match="no tokens"):
        lm.logits([])


def test_a_cached_number_is_the_nearest_one() -> None:
    x = np.array([[1.0, -127.0, 0.4, 63.5]], np.float32)
    q, scale = sequence.cached(x, "int8")
    assert q.tolist() == [[1, -127, 0, 64]] and scale.tolist() == [[1]]
    assert sequence.cached(np.array([[65519.0, 1e-8, 6e-8]], np.float32), "fp16")[0].tolist() == [[65504, 0, 2**-24]]


def test_float16_keys_round_like_numpy() -> None:
    rng = np.random.default_rng(0)
    graph = language_model(cache="fp16", layers=1, key=4, value=4, width=8)
    for scale in (1e-7, 1e-5, 1.0, 1e4, 3e5):
        bits = {name: value * np.float32(scale) for name, value in graph.constants.items() if name in ("0.k", "0.v")}
        graph.constants.update(bits)  # type: ignore[arg-type]
        ids = rng.integers(0, 40, 30)
        lm = LanguageModel(opened(image(graph, 30)))
        assert lm.logits(ids).tobytes() == reference(graph, ids).tobytes()
        graph.constants.update({name: value / np.float32(scale) for name, value in bits.items()})


def test_exporting_proves_the_engine_equal_and_certifies_a_text() -> None:
    rows = [text(100).astype(np.float32)[:, None]]
    export = exporter.build(language_model(), max_batch=16, calibration=rows)
    lm = LanguageModel(opened(export.image))
    lm.logits(text(5))
    LanguageModel(opened(export.image)).selftest()
    golden = export.certificate.golden
    assert [g.input.item() for g in golden] == text(100)[: len(golden)].tolist()
