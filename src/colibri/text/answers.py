"""Answers of chat models, told from what the model thought before it gave one.

Models mark their thinking with tokens of their own. Some put it between a pair of tokens (`<think>` … `</think>`);
those of the GPT-OSS family send messages on channels, `<|channel|>analysis<|message|>…<|end|>` and at last
`<|channel|>final<|message|>…<|return|>`. Thinking is no part of the answer that goes into the next prompt, as the
models' own templates have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from colibri.text.tokenizer import Tokenizer

__all__ = ["Answering", "Said"]

_PAIRS = {
    "<think>": "</think>",  # Qwen, DeepSeek, GLM, MiniMax, Nemotron
    "[THINK]": "[/THINK]",  # Mistral
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command
    "<seed:think>": "</seed:think>",
}
_CHANNEL, _START, _MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
_FINAL = "final"

Where = Literal["answer", "thinking", "header"]


@dataclass(frozen=True)
class Said:
    """A piece of text, and whether it belongs to the answer or to the thinking before it."""

    text: str
    thinking: bool


class Answering:
    """Takes an answer's tokens one by one: `for said in answering.push(id)`, at last `answering.end()`.

    prompt: the text that the model goes on from; a template may open the thinking in it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str = "") -> None:
        self._stream = tokenizer.stream(skip_special=False)
        self._marks = dict(tokenizer.special)
        named = [*_PAIRS, *_PAIRS.values(), _CHANNEL, _START, _MESSAGE]
        self._marks |= {i: name for name in named if (i := tokenizer.id(name)) is not None}
        names = self._marks.values()
        self._channels = _CHANNEL in names and _MESSAGE in names
        self._channel: str | None = None  # of the message that begins; None: its header names none
        self._begins = False  # what follows a mark begins with line ends that are not meant to be read
        opened = any(prompt.rstrip().endswith(name) for name in _PAIRS if name in names)
        self._where: Where = "thinking" if opened else "answer"

    def push(self, token: int) -> list[Said]:
        """The text that is final after `token`."""
        text = self._stream.push(token)
        mark = self._marks.get(token)
        if mark is None:
            return self._say(text)
        # A mark is complete when it arrives; the text before it was held back until then.
        said = self._say(text[: text.rfind(mark)] if mark in text else text)
        self._move(mark)
        return said

    def end(self) -> list[Said]:
        """What is left."""
        return self._say(self._stream.end())

    def _say(self, text: str) -> list[Said]:
        if self._where == "header":
            self._channel = None if self._channel is None else self._channel + text
            return []
        if self._begins:
            text = text.lstrip("\n")
            self._begins = not text
        return [Said(text, self._where == "thinking")] if text else []

    def _move(self, mark: str) -> None:
        if mark in _PAIRS:
            self._where, self._begins = "thinking", True
        elif mark in _PAIRS.values():
            self._where, self._begins = "answer", True
        elif self._channels and mark in (_CHANNEL, _START):
            self._where, self._channel = "header", "" if mark == _CHANNEL else None
        elif self._channels and mark == _MESSAGE:
            answers = self._channel is None or self._channel.split()[:1] == [_FINAL]
            self._where = "answer" if answers else "thinking"
