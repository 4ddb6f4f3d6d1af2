"""A language model in the C engine: token ids in, logits or new tokens out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from colibri._engine import ffi, lib
from colibri.errors import ModelError
from colibri.format import spec
from colibri.format.package import Package
from colibri.ir.graph import ENDLESS, Array
from colibri.runtime.engine import Model, Recorded, opened
from colibri.runtime.streaming import StreamModel
from colibri.text.tokenizer import Tokenizer

Ids = Sequence[int] | np.ndarray[Any, Any]
Routes = np.ndarray[Any, np.dtype[np.int32]]
_SOURCE = 512  # tokens: see colibri_lm_source


class LanguageModel(Model):
    """A loaded language model. It holds one text; `position` of its tokens have been evaluated.

    Of an encoder-decoder model the text answers a source text, which `read` gives it; the text then begins with the
    token `start`, and `generate` and `stream` take the source text as their prompt.

    Calling it like any other model runs rows of ids (n, 1) as a text of their own (each its own source text) and leaves
    the held text alone. Not to be used from several threads at once, but for such calls.
    """

    def __init__(
        self, package: Package, verify: bool | None = None, kernels: str | None = None, threads: int = 1
    ) -> None:
        super().__init__(package, verify, kernels, threads)
        self.vocabulary = self._output_size
        self._text = self._context()
        # The tokens evaluated; behind `position`, what an interruption kept from being evaluated.
        self._held: list[int] = []
        self._row = np.empty(self.vocabulary, np.float32)  # logits of the last token
        self._scratch = np.empty(self.vocabulary, np.int32)
        self._tokenizer: Tokenizer | None = None
        self._counts = np.zeros(len(package.experts), np.uint64)
        self._counting: Any = None
        self._source: list[int] = []
        self._encoder_layers = len(spec.named_all(package.ops[: self._encoder_ops], "moe"))

    @property
    def context(self) -> int:
        """Most tokens of a text."""
        return int(self.package.header["context_tokens"])

    @property
    def position(self) -> int:
        """Tokens of the text evaluated so far."""
        return int(self._text[1].position)

    @property
    def start(self) -> int | None:
        """The token that the texts of an encoder-decoder model begin with; None of other models."""
        return int(self.package.info.get("start", 0)) if self._encoder_ops else None

    @property
    def longest_source(self) -> int:
        """Most tokens of a source text, which is read at once; 0 where a model reads none."""
        return min(self.max_batch, self.context, _SOURCE) if self._encoder_ops else 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the export carries, loaded when first asked for.

        Raises ModelError where there is none, ExportError where the `tokenizers` library is not installed.
        """
        if self._tokenizer is None:
            path = Path(self.package.path)
            if not path.is_file():
                raise ModelError("a model loaded from bytes has no tokenizer: use colibri.text.tokenizer.Tokenizer")
            if not (path.parent / "tokenizer.json").is_file():
                raise ModelError(f"{path.parent} has no tokenizer: copy tokenizer.json and the files beside it there "
                                 "from the checkpoint, or export the model again")  # fmt: skip
            self._tokenizer = Tokenizer(path.parent)
        return self._tokenizer

    def count_experts(self) -> list[np.ndarray[Any, np.dtype[np.uint64]]]:
        """Start counting how often the held text's tokens choose each expert, from zero.

        One array (experts,) a layer, which go on counting; `package.numbers(layer)` has the experts' original numbers.
        """
        if self._counting is None:
            self._counting = ffi.new("route_counts *")
            lib.count_routes(self._text[1], self._counting, ffi.from_buffer("uint64_t[]", self._counts))
        self._counts[:] = 0
        return [self._counts[int(layer["first_expert"]) :][: int(layer["experts"])] for layer in self.package.layers]

    def read(self, source_ids: Ids) -> None:
        """Give an encoder-decoder model its source text, and start a new text.

        Raises ModelError where an id is none of the model's, where there are more than `longest_source`, and of a model
        that has no encoder.
        """
        if not self._encoder_ops:
            raise ModelError(f"{self.package.path} has no encoder: append the tokens to its text")
        ids = self._checked(source_ids, room=False)
        if len(ids) > self.longest_source:
            raise ModelError(f"the source text has {len(ids):,} tokens, but the model reads {self.longest_source:,} at "
                             "once: shorten it, or export with a larger --max-batch and --context")  # fmt: skip
        self.reset()
        self._source.clear()
        self._require(lib.colibri_lm_source(self._text[1], ffi.from_buffer("int32_t[]", ids), len(ids)))
        self._source.extend(ids.tolist())

    def reset(self) -> None:
        """Start a new text; it answers the same source text as before, where there is one."""
        self._text[1].position = 0
        self._held.clear()

    def rewind(self, position: int) -> None:
        """Take the text back to its first `position` tokens; raises ModelError where the cache does not reach back."""
        error = lib.colibri_lm_rewind(self._text[1], position)
        if error:
            raise ModelError(spec.error_text(error), error)
        del self._held[position:]

    def logits(self, token_ids: Ids) -> Array:
        """Append tokens to the text; the logits (n, vocabulary) float32 that follow each of them.

        The bits do not depend on how a text is cut into calls. Raises ModelError where an id is none of the model's, or
        the text would become longer than its context.
        """
        return self._logits(token_ids, None)

    def logits_and_routes(self, token_ids: Ids) -> tuple[Array, list[Routes]]:
        """`logits`, and for each MoE layer the experts these tokens chose, (n, k), best first, by original numbers.

        They are not counted by `count_experts`.
        """
        pieces: list[Recorded] = []
        out = self._logits(token_ids, pieces)
        return out, [choices[:, 0] for choices, _ in self._by_layer(pieces, logits=False, begin=self._encoder_layers)]

    def _logits(self, token_ids: Ids, recorded: list[Recorded] | None) -> Array:
        ids = self._checked(token_ids)
        self._require(spec.error_code("SOURCE") if self._encoder_ops and not self._source else 0)
        rows = ids.astype(np.float32)
        out = np.empty((len(ids), self.vocabulary), np.float32)
        for first in range(0, len(ids), self.max_batch):
            part, into = rows[first : first + self.max_batch], out[first : first + self.max_batch]
            self._hold(ids[first : first + self.max_batch])
            x, y = ffi.from_buffer("float[]", part), ffi.from_buffer("float[]", into)
            if recorded is None:
                lib.colibri_forward(self._text[1], x, y, len(part))
            else:
                recorded.append(self._recording(self._text[1], x, y, len(part), logits=False))
            self._require(self._text[1].status)
        return out

    def evaluate(self, token_ids: Ids) -> Array:
        """Append tokens to the text; the logits (vocabulary,) float32 that follow the last of them, valid until the
        next call. Raises ModelError like `logits`."""
        ids = self._checked(token_ids)
        for first in range(0, len(ids), self.max_batch):  # a call each, between which Ctrl-C is heard
            part = ids[first : first + self.max_batch]
            self._hold(part)
            self._require(lib.colibri_lm_evaluate(self._text[1], ffi.from_buffer("int32_t[]", part), len(part),
                                                  ffi.from_buffer("float[]", self._row)))  # fmt: skip
        return self._row

    def _hold(self, ids: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        self._held[self.position :] = ids.tolist()

    def generate(self, token_ids: Ids, max_new_tokens: int = 128, **sampling: Any) -> list[int]:
        """The tokens that `stream` yields."""
        return list(self.stream(token_ids, max_new_tokens, **sampling))

    def stream(
        self,
        token_ids: Ids,
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: Sequence[int] = (),
        on_prompt: Callable[[int], None] | None = None,
    ) -> Iterator[int]:
        """Yield up to `max_new_tokens` tokens that continue the text `token_ids`, which is the whole text; of an
        encoder-decoder model, that answer this source text.

        What of it the model has evaluated already is not evaluated again. A temperature of 0 takes the likeliest token;
        otherwise the k likeliest, those that make up `top_p`, and those at least `min_p` times as likely as the first
        are drawn from. The same seed gives the same tokens on every target. Ends before a token of `stop`, and where
        the context is full, and by nothing else: a model's own end tokens are `tokenizer.eos`. `on_prompt(n)` is called
        once, when the prompt has been evaluated, with the tokens of it that were new. Raises ModelError where the
        prompt is empty or does not fit, and where a number is out of its range.
        """
        _check_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        prompt = self._checked(token_ids, room=False).tolist()
        read = 0  # tokens of a source text
        if self._encoder_ops:
            if prompt != self._source:
                self.read(prompt)
                read = len(prompt)
            prompt = [self.start or 0]
        if len(prompt) > self.context:
            raise ModelError(f"the prompt has {len(prompt):,} tokens, but the context holds {self.context:,}: shorten "
                             "it, or give the model a longer context (colibri set --context)")  # fmt: skip
        fresh = self._return_to(prompt)
        logits = self.evaluate(prompt[len(prompt) - fresh :])
        if on_prompt is not None:
            on_prompt(read if self._encoder_ops else fresh)
        max_new_tokens = min(max_new_tokens, self.context - len(prompt) + 1)  # the last is not evaluated
        history = np.array(prompt + [0] * max_new_tokens, np.int32)
        sampler = ffi.new("colibri_sampler_t *")
        sampler.history = ffi.from_buffer("int32_t[]", history)
        sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p = temperature, top_k, top_p, min_p
        sampler.repetition_penalty, sampler.seed = repetition_penalty, seed % (1 << 64)
        for n in range(max_new_tokens):
            sampler.history_count = len(prompt) + n
            token = lib.colibri_lm_sample(sampler, ffi.from_buffer("float[]", logits), self.vocabulary,
                                          ffi.from_buffer("int32_t[]", self._scratch))  # fmt: skip
            if token in stop:
                return
            history[len(prompt) + n] = token
            yield token
            if n + 1 == max_new_tokens or self.position == self.context:
                return
            logits = self.evaluate([token])

    def _return_to(self, prompt: list[int]) -> int:
        """Rewind to the longest part that the held text and `prompt` begin with; how many tokens are then new."""
        held = self._held[: self.position]
        same = next((n for n, pair in enumerate(zip(held, prompt, strict=False)) if pair[0] != pair[1]),
                    min(len(held), len(prompt)))  # fmt: skip
        same = min(same, len(prompt) - 1)  # the last is evaluated again, for its logits
        try:
            self.rewind(same)
        except ModelError:
            self.reset()
        return len(prompt) - self.position

    def _checked(self, token_ids: Ids, room: bool = True) -> np.ndarray[Any, np.dtype[np.int32]]:
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ModelError(f"token ids are whole numbers in one row, not {ids.dtype} of shape {ids.shape}")
        if not ids.size:
            raise ModelError("there are no tokens: pass at least one (a model's begin-of-text token, say)")
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary:
            bad = int(ids[(ids < 0) | (ids >= self.vocabulary)][0])
            raise ModelError(f"token id {bad} is not in the vocabulary of {self.vocabulary:,}: encode the text with "
                             "the model's own tokenizer")  # fmt: skip
        if room and len(ids) > self.context - self.position:
            raise ModelError(f"{len(ids):,} tokens do not fit: {self.position:,} of {self.context:,} are in use; "
                             "reset, rewind, or give the model a longer context (colibri set --context)")  # fmt: skip
        return np.ascontiguousarray(ids, np.int32)

    def _require(self, error: int) -> None:
        if error:
            raise ModelError(f"{self.package.path}: {spec.error_text(error)}", error)
        self.package.check_unchanged()


def _check_sampling(temperature: float, top_k: int, top_p: float, min_p: float, penalty: float) -> None:
    for name, value, good, range_ in (
        ("temperature", temperature, 0 <= temperature < np.inf, "0 (the likeliest token) or more"),
        ("top_k", top_k, 0 <= top_k < 1 << 31, "0 (all tokens) or more"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        ("min_p", min_p, 0 <= min_p <= 1, "between 0 and 1"),
        ("repetition_penalty", penalty, 0 < penalty < np.inf, "above 0; 1 changes nothing"),
    ):
        if not good:
            raise ModelError(f"{name} is {value}: it must be {range_}")


def load(
    path: str | Path | bytes,
    verify: bool | None = None,
    kernels: str | None = None,
    threads: int = 1,
    most_work: int | None = None,
) -> Model | LanguageModel:
    """`colibri.runtime.engine.load`, for any model: a language model is a `LanguageModel`."""
    package = opened(path, most_work)
    tokens = int(package.header["context_tokens"])
    kind = StreamModel if tokens == ENDLESS else LanguageModel if tokens else Model
    return kind(package, verify, kernels, threads)


__all__ = ["LanguageModel", "load"]
