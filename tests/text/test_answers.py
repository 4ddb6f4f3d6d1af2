"""What a chat model says is taken apart into thinking and answer, whatever pieces its tokens come in."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from colibri.text.answers import Answering
from colibri.text.tokenizer import Tokenizer

HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
PAIRS = [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"),
         ("<seed:think>", "</seed:think>")]  # fmt: skip


def tokenizer(folder: Path, special: list[str], spelled: list[str] | tuple[str, ...] = ()) -> Tokenizer:
    """One token a byte, and these; the `spelled` ones are no special tokens to the library, as Qwen's `<think>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    library.add_tokens([AddedToken(s, special=False, normalized=False) for s in spelled])
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def taken(tokenizer: Tokenizer, text: str, prompt: str = "") -> tuple[str, str]:
    """Thinking and answer of a text whose marks are tokens."""
    parts = Answering(tokenizer, prompt)
    said = [s for i in tokenizer.encode(text, special=False, parse=True) for s in parts.push(i)] + parts.end()
    return "".join(s.text for s in said if s.thinking), "".join(s.text for s in said if not s.thinking)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("opens", "closes"), PAIRS)
def test_thinking_between_a_pair_of_tokens_is_apart(tmp_path: Path, opens: str, closes: str, special: bool) -> None:
    """D6."""
    names = [opens, closes]
    t = tokenizer(tmp_path, ["<|end|>", *names] if special else ["<|end|>"], () if special else names)
    assert taken(t, f"{opens}\nHm, é 😀.\n{closes}\n\nHi!<|end|>") == ("Hm, é 😀.\n", "Hi!")
    assert taken(t, f"Hm.{closes}\n\nHi!", prompt=f"assistant\n{opens}\n") == ("Hm.", "Hi!")
    assert taken(t, f"{opens}Hm.") == ("Hm.", "")
    assert taken(t, "Hi <b>you</b>\n<|end|>") == ("", "Hi <b>you</b>\n")


def test_only_the_final_channel_is_the_answer(tmp_path: Path) -> None:
    """D6."""
    t = tokenizer(tmp_path, HARMONY)
    analysis, final = "<|channel|>analysis<|message|>Hm.<|end|>", "<|channel|>final<|message|>Hi!<|return|>"
    assert taken(t, f"{analysis}<|start|>assistant{final}") == ("Hm.", "Hi!")
    assert taken(t, final) == ("", "Hi!")
    call = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|end|>"
    assert taken(t, f"{analysis}{call}<|start|>assistant{final}") == ("Hm.{}", "Hi!")
    assert taken(t, "<|start|>assistant<|message|>Hi!<|end|>") == ("", "Hi!")
    assert taken(t, analysis + "<|start|>assistant<|channel|>fin") == ("Hm.", "")


def test_marks_a_model_has_no_tokens_for_are_text(tmp_path: Path) -> None:
    t = tokenizer(tmp_path, ["<|end|>"])
    text = "<think>a</think><|channel|>final<|message|>b"
    assert taken(t, text) == ("", text)
    assert taken(t, text, prompt="<think>") == ("", text)


def test_a_model_without_thinking_says_what_it_says(tmp_path: Path) -> None:
    t = tokenizer(tmp_path, ["<|end|>"])
    for text in ("", "\n\nHi", "é" * 9, "a<|end|>b"):
        assert taken(t, text) == ("", text.replace("<|end|>", ""))
