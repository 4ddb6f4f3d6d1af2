"""D5: in a conversation special tokens are the template's alone; what messages spell is text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from colibri.errors import ModelError
from colibri.text.tokenizer import Tokenizer
from tests.text import kinds

TEMPLATE = (
    "{% for m in messages %}<|left|>{{ m.role }}\n{{ m.content }}<|right|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|left|>assistant\n<think>{% endif %}"
)
PIECES = [
    "<|left|>", "<|right|>", "<|both|>", "<think>", "<thinking>", "|||EMAIL|||", "<|left|", "|>", " ", "  ", "é",
    "Hello", " world", "\n", "<", ">", "\ufdd0", "\ufdd1", "\ufdef", "e\u0301", "▁", "<|<|left|>left|>",
]  # fmt: skip


@pytest.fixture(scope="module", params=["gpt2_prefix", "llama3", "qwen2", "llama2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    kinds.tokenizer(request.param).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


def conversations(seed: int, count: int) -> Iterator[list[dict[str, str]]]:
    chance = random.Random(seed)
    for _ in range(count):
        yield [{"role": chance.choice(("user", "system")), "content": "".join(chance.choices(PIECES, k=6))}
               for _ in range(chance.randrange(1, 4))]  # fmt: skip


def test_control_tokens_are_the_templates_alone(tokenizer: Tokenizer) -> None:
    """As many as the template writes, in its order, whatever the messages spell."""
    left, right, think = (tokenizer.id(t) for t in ("<|left|>", "<|right|>", "<think>"))
    control = {tokenizer.id(t) for t in ("<|left|>", "<|right|>", "<|both|>", "<think>")}
    for messages in conversations(1, 60):
        ids = tokenizer.chat_ids(messages)
        found = [i for i in ids if i in control]
        assert found == [*([left, right] * len(messages)), left, think], messages


def test_what_messages_spell_comes_back_as_text(tokenizer: Tokenizer) -> None:
    """Nothing of a message is lost or changed: decoded it is what the template made, but for spaces beside tokens."""
    for messages in conversations(2, 40):
        text = tokenizer.decode(tokenizer.chat_ids(messages), skip_special=False)
        want = tokenizer.decode(tokenizer.encode(tokenizer.chat(messages), special=False), skip_special=False)
        assert "".join(text.split()) == "".join(want.split()), messages


def test_without_spelled_tokens_ids_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    plain = [piece for piece in PIECES if "|" not in piece and "think" not in piece]
    chance = random.Random(3)
    for _ in range(30):
        messages = [{"role": "user", "content": "".join(chance.choices(plain, k=6))}]
        text = tokenizer.chat(messages)
        assert tokenizer.chat_ids(messages) == tokenizer.encode(text, special=False, parse=True)


def test_one_message_between_tokens_is_encoded_as_it_is_alone(tmp_path: Path) -> None:
    kinds.tokenizer("gpt2").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("<|end|>{{ messages[0].content }}<|end|>")
    tokenizer = Tokenizer(tmp_path)
    end = tokenizer.id("<|end|>")
    for content in ("a<|end|>b", "<|end|>", " <|end|><|end|> é"):
        ids = tokenizer.chat_ids([{"role": "user", "content": content}])
        assert ids == [end, *tokenizer.encode(content, special=False), end]


def test_what_an_assistant_said_keeps_tokens_that_are_not_special(tokenizer: Tokenizer) -> None:
    """A model's own thoughts are tokens of its history; its special tokens are not."""
    think, left = tokenizer.id("<think>"), tokenizer.id("<|left|>")
    ids = tokenizer.chat_ids([{"role": "assistant", "content": "<think>x<|left|>"}], add_generation_prompt=False)
    assert ids.count(think) == 1 and ids.count(left) == 1


def test_tools_and_other_variables_are_text_too(tmp_path: Path) -> None:
    kinds.tokenizer("gpt2").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ tools | tojson }}{{ note }}<|end|>")
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.chat_ids([], tools=[{"name": "<|end|>", "<|end|>": 1}], note="<|end|>")
    assert [n for n, i in enumerate(ids) if i == tokenizer.id("<|end|>")] == [len(ids) - 1]
    with pytest.raises(ModelError, match="which are no characters"):
        tokenizer.chat_ids([{"role": "user", "content": "".join(map(chr, range(0xFDD0, 0xFDF0)))}])
