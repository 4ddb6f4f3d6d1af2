"""LanguageModel: one text that grows, goes back and begins anew, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri
from colibri import exporter
from colibri.errors import ModelError
from colibri.format import spec
from colibri.pipeline import context_length
from colibri.report.evaluate import evaluate
from colibri.runtime.engine import opened
from colibri.runtime.language import LanguageModel
from tests.lm.test_sequence import VARIANTS, image, text
from tests.lm_graphs import encoder_decoder, language_model


def model(max_batch: int = 16, **options: Any) -> LanguageModel:
    return LanguageModel(opened(image(language_model(**options), max_batch)))


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return model()


def evaluated(lm: LanguageModel, ids: Any, **options: Any) -> tuple[int, list[int]]:
    """How many tokens of the prompt were evaluated, and what came."""
    fresh: list[int] = []
    out = lm.generate(ids, on_prompt=fresh.append, **options)
    (count,) = fresh
    return count, out


def test_a_prompt_that_goes_on_is_not_evaluated_again(lm: LanguageModel) -> None:
    lm.reset()
    prompt = text(30).tolist()
    count, out = evaluated(lm, prompt, max_new_tokens=5)
    assert count == 30 and len(out) == 5
    # The last of the five was drawn, but never evaluated.
    longer = prompt + out + [1, 2]
    assert evaluated(lm, longer, max_new_tokens=1)[0] == 3
    assert evaluated(lm, longer, max_new_tokens=1)[0] == 1  # the last, for its logits
    other = [*longer[:10], (longer[10] + 1) % 40, 3]
    assert evaluated(lm, other, max_new_tokens=1)[0] == 2
    assert evaluated(lm, longer[:4], max_new_tokens=1)[0] == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_kept_changes_nothing(variant: str) -> None:
    options, rng = VARIANTS[variant], np.random.default_rng(5)
    kept, prompt = model(4, **options), text(90).tolist()
    for _ in range(6):
        cut = int(rng.integers(1, len(prompt)))
        prompt = prompt[:cut] + rng.integers(0, 40, int(rng.integers(1, 30))).tolist()
        prompt = prompt[:150]
        assert kept.generate(prompt, 8, temperature=1.0, seed=cut) == model(4, **options).generate(
            prompt, 8, temperature=1.0, seed=cut
        )


def test_a_text_rewinds_and_goes_on_the_same(lm: LanguageModel) -> None:
    ids = text(60)
    lm.reset()
    want = lm.logits(ids)
    lm.rewind(20)
    assert lm.position == 20
    assert lm.logits(ids[20:]).tobytes() == want[20:].tobytes()
    with pytest.raises(ModelError, match="REWIND"):
        lm.rewind(61)
    assert lm.position == 60
    lm.reset()
    assert lm.position == 0 and lm.evaluate(ids).tobytes() == want[-1].tobytes()


def test_an_interruption_leaves_a_text_that_can_be_used(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    lm.reset()
    prompt, calls = text(60).tolist(), []

    def interrupt(error: int) -> None:
        calls.append(error)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lm, "_require", interrupt)
        lm.generate(prompt, 4)
    assert lm.position == 32
    count, out = evaluated(lm, prompt, max_new_tokens=4)
    assert count == 60 - 32 and out == model().generate(prompt, 4)


def test_a_stream_that_is_left_can_be_taken_up(lm: LanguageModel) -> None:
    lm.reset()
    prompt = text(10).tolist()
    whole = model().generate(prompt, 12, temperature=1.0, seed=4)
    begun = []
    for token in lm.stream(prompt, 12, temperature=1.0, seed=4):
        begun.append(token)
        if len(begun) == 5:
            break
    assert begun == whole[:5]
    assert lm.generate(prompt, 12, temperature=1.0, seed=4) == whole


def test_generation_ends_where_it_should(lm: LanguageModel) -> None:
    prompt = text(20).tolist()
    free = lm.generate(prompt, 30, temperature=1.0, seed=2)
    stop = free[7]
    assert lm.generate(prompt, 30, temperature=1.0, seed=2, stop=[stop]) == free[: free.index(stop)]
    assert lm.generate(prompt, 0) == []
    assert len(lm.generate(text(190).tolist(), 10**9)) == 200 - 190 + 1  # the last is drawn from a full context
    assert lm.position == lm.context == 200
    with pytest.raises(ModelError, match="do not fit"):
        lm.evaluate([1])


def test_what_is_no_text_is_refused(lm: LanguageModel) -> None:
    for ids, message in (
        ([], "no tokens"),
        ([1.5], "whole numbers"),
        ([[1]], "one row"),
        ([40], "not in the vocabulary"),
        ([-1], "not in the vocabulary"),
    ):
        for run in (lm.generate, lm.evaluate, lm.logits):
            with pytest.raises(ModelError, match=message):
                run(ids)  # type: ignore[operator]
    with pytest.raises(ModelError, match=r"201 tokens, but the context holds 200: .*colibri set"):
        lm.generate([1] * 201)


@pytest.mark.parametrize(
    "option", [{"temperature": -1}, {"temperature": np.nan}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 2},
               {"repetition_penalty": 0}], ids=str,
)  # fmt: skip
def test_sampling_out_of_range_is_refused(lm: LanguageModel, option: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"{next(iter(option))} is .*must be"):
        lm.generate([1], 1, **option)


def test_experts_are_counted_and_recorded(story: Path) -> None:
    lm = colibri.load(story)
    assert isinstance(lm, LanguageModel)
    ids = lm.tokenizer.encode("Once upon a time there was a king")
    want, routes = lm(np.array(ids)[:, None]), lm.routes(np.array(ids)[:, None])
    counts = lm.count_experts()
    lm.evaluate(ids)
    for counted, chosen in zip(counts, routes, strict=True):
        assert counted.tolist() == np.bincount(chosen.reshape(-1), minlength=len(counted)).tolist()
    before = [c.copy() for c in counts]
    lm.reset()
    logits, traced = lm.logits_and_routes(ids)
    assert logits.tobytes() == want.tobytes()
    assert all((a == b[:, 0]).all() for a, b in zip(traced, routes, strict=True))
    assert all((a == b).all() for a, b in zip(counts, before, strict=True))
    lm.count_experts()
    assert not any(c.any() for c in counts)


def test_an_export_carries_its_tokenizer(story: Path, tmp_path: Path) -> None:
    lm = colibri.load(story)
    assert isinstance(lm, LanguageModel) and lm.tokenizer is lm.tokenizer and lm.tokenizer.eos == (0,)
    assert (story / "tokenizer.bin").read_bytes() == lm.tokenizer.write_c()
    (tmp_path / "model.bin").write_bytes((story / "model.bin").read_bytes())
    for source in (tmp_path, (story / "model.bin").read_bytes()):
        bare = colibri.load(source)
        with pytest.raises(ModelError, match="has no tokenizer"):
            bare.tokenizer  # type: ignore[union-attr]  # noqa: B018


def test_a_tokenizer_that_c_does_not_do_is_said_in_one_line(tmp_path: Path) -> None:
    source, said = tmp_path / "source", []
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.bin").write_bytes(b"of another model")
    exporter.export_lm(language_model(context=20), out, dtype="fp32", workers=1, tokenizer=source, say=said.append)
    assert len(said) == 1 and said[0].startswith("tokenizer.bin is not written") and "\n" not in said[0]
    assert not (out / "tokenizer.bin").exists()


# --- another context length ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_changed_context_is_what_an_export_with_it_writes(variant: str, tmp_path: Path) -> None:
    """But for the table of positions, which the longer export has whole."""
    options = VARIANTS[variant] | {"context": 200}
    graph, other = language_model(**options), language_model(**options)
    other.context = 100
    path = tmp_path / "model.bin"
    for max_batch in (1, 7, 150):
        for in_place in (False, True):
            path.write_bytes(image(graph, max_batch))
            context_length.set_context(path, 100, in_place)
            assert path.read_bytes() == image(other, max_batch)
            context_length.set_context(path, 200, in_place)
            assert path.read_bytes() == image(graph, max_batch)


def test_a_context_has_its_limits(tmp_path: Path) -> None:
    exporter.export_lm(language_model(context=200), tmp_path, dtype="fp32", workers=1)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for tokens, message in ((201, "positions for 200 tokens"), (15, "certificate of 16 tokens")):
        with pytest.raises(ModelError, match=message):
            context_length.set_context(tmp_path, tokens)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    changed = context_length.set_context(tmp_path, 16)
    lm = colibri.load(tmp_path)
    lm.selftest()
    assert lm.context_bytes == changed.context_bytes < changed.context_bytes_before
    assert f"CONTEXT_BYTES {lm.context_bytes}u" in (tmp_path / "model.h").read_text()
    assert f"WORST_MACS {lm.package.header['worst_macs']}u" in (tmp_path / "model.h").read_text()
    assert changed.removed == ("model.c",) and {p.name for p in tmp_path.iterdir()} == {"model.bin", "model.h"}


# --- how well a text is predicted ---


def test_perplexity_is_that_of_the_windows(story: Path) -> None:
    lm = colibri.load(story)
    assert isinstance(lm, LanguageModel)
    words = "In the beginning God created the heaven and the earth. " * 60
    ids, found = lm.tokenizer.encode(words), evaluate(lm, words)
    total, windows = 0.0, 0
    for at in range(1, len(ids), lm.context):
        part = ids[at - 1 : at + lm.context]
        x = lm(np.array(part[:-1])[:, None]).astype(np.float64)
        x -= np.log(np.exp(x).sum(1, keepdims=True))
        total -= x[np.arange(len(part) - 1), part[1:]].sum()
        windows += 1
    assert found.windows == windows > 1 and found.tokens == len(ids) - 1
    assert found.perplexity == pytest.approx(np.exp(total / (len(ids) - 1)), rel=1e-9)
    assert found.bytes == len(words) - len(lm.tokenizer.decode(ids[:1]))
    assert found.bits_per_byte == pytest.approx(total / np.log(2) / found.bytes, rel=1e-9)
    assert found.byte_perplexity == pytest.approx(2**found.bits_per_byte)
    few = evaluate(lm, words, 10)
    assert few.tokens == 10 and few.windows == 1


def test_a_model_is_as_good_as_itself_and_near_its_neighbour(story: Path, tmp_path: Path) -> None:
    from colibri.frontends.checkpoints.language_models import load_checkpoint
    from tests.lm.conftest import CHECKPOINT

    exporter.export_lm(load_checkpoint(CHECKPOINT, 100), tmp_path, dtype="int4", workers=1, tokenizer=CHECKPOINT)
    lm, near = colibri.load(story), colibri.load(tmp_path)
    assert isinstance(lm, LanguageModel) and isinstance(near, LanguageModel)
    words = "And it came to pass, when the people removed from their tents, to pass over Jordan. " * 10
    same = evaluate(lm, words, against=lm2(story))
    assert same.against is not None and same.against.flips is not None
    assert same.against.kl_mean == same.against.kl_p99 == max(same.against.flips) == 0 and same.against.agreement == 1
    assert same.perplexity == same.against.perplexity
    other = evaluate(near, words, against=lm)
    assert other.context == 100 and other.against is not None and other.against.flips is not None
    assert 0 < other.against.kl_mean < other.against.kl_p99 < 5
    assert 0 < other.against.agreement <= 1 and len(other.against.flips) == 5 and 0 < max(other.against.flips) < 1


def lm2(path: Path) -> LanguageModel:
    found = colibri.load(path)
    assert isinstance(found, LanguageModel)
    return found


def test_nothing_to_predict_is_said(story: Path) -> None:
    for words in ("", "a"):
        with pytest.raises(ModelError, match="nothing to predict"):
            evaluate(lm2(story), words)


# --- encoder-decoders -------------------------------------------------------------------------------------------------


@pytest.fixture
def exchange(tmp_path: Path) -> LanguageModel:
    graph = encoder_decoder(context=64, capacity=3)
    exporter.export_lm(graph, tmp_path / "model.bin", dtype="fp32", max_batch=32, workers=1)
    lm = colibri.load(tmp_path / "model.bin")
    assert isinstance(lm, LanguageModel)
    return lm


def test_an_encoder_decoder_reads_a_source_text_first(exchange: LanguageModel) -> None:
    assert exchange.start == 1 and exchange.longest_source == 32
    for append in (exchange.logits, exchange.evaluate):
        with pytest.raises(ModelError) as error:
            append([1])
        assert spec.ERRORS[error.value.code][0] == "SOURCE"
    for bad, word in ((text(33), "33 tokens.*32"), ([40], "vocabulary"), ([], "no tokens")):
        with pytest.raises(ModelError, match=word):
            exchange.read(bad)
    exchange.read(text(32))
    assert exchange.position == 0 and exchange.logits([1]).shape == (1, 40)


def test_an_encoder_decoder_answers_the_prompt(exchange: LanguageModel) -> None:
    count, answer = evaluated(exchange, text(20), max_new_tokens=12)
    assert count == 20 and len(answer) == 12
    exchange.reset()
    assert exchange.logits([1, *answer[:-1]]).argmax(axis=1).tolist() == answer
    assert evaluated(exchange, text(20), max_new_tokens=12) == (0, answer)  # the source text is there already
    assert evaluated(exchange, text(21), max_new_tokens=12)[0] == 21
    assert len(exchange.generate(text(5), 1000)) == 64  # until the context is full


def test_what_is_about_one_text_refuses_an_encoder_decoder(exchange: LanguageModel, lm: LanguageModel) -> None:
    with pytest.raises(ModelError, match="source text"):
        evaluate(exchange, "text")
    with pytest.raises(ModelError, match="export the model with --context 32"):
        context_length.set_context(exchange.package.path, 32)
    with pytest.raises(ModelError, match="no encoder"):
        lm.read([1])
    assert lm.start is None and lm.longest_source == 0


def test_an_export_reads_source_texts_as_long_as_its_context(tmp_path: Path) -> None:
    exporter.export_lm(encoder_decoder(context=300), tmp_path / "model.bin", dtype="fp32", workers=1)
    lm = colibri.load(tmp_path / "model.bin")
    assert isinstance(lm, LanguageModel) and lm.longest_source == 300
