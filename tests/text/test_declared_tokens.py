"""Tokens declared beside tokenizer.json have the ids, the options and the names that transformers gives them."""

from __future__ import annotations

import ctypes
import functools
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models
from tokenizers import pre_tokenizers as pre

from colibri.errors import ModelError
from colibri.text.tokenizer import Tokenizer
from tests.text.c_tokenizer import SPECIAL, CTokenizer
from tests.text.c_tokenizer import load as load_c

STANDARD = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token")
OWN = ("image_token", "think_token", "odd_token")
TOKENS = ("<a>", "<b>", "<c d>", "<é>", "f", "<|end|>", "<s>", "gh", "<|x|>")


@functools.cache
def base() -> str:
    """A byte-level vocabulary with two added tokens."""
    alphabet = sorted(pre.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "gh"])}, merges=[("g", "h")])
    )
    library.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([tokenizers.AddedToken("<|end|>", normalized=False)])
    library.add_tokens([tokenizers.AddedToken("<s>", lstrip=True)])
    return library.to_str()


def options(chance: random.Random, content: str) -> dict[str, Any]:
    names = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return {"content": content} | {name: chance.random() < 0.4 for name in names if chance.random() < 0.8}


def named(chance: random.Random, marked: bool) -> Any:
    """A token as a text or, in tokenizer_config.json marked as one, an object."""
    content = chance.choice(TOKENS)
    if chance.random() < 0.6:
        return content
    return options(chance, content) | ({"__type": "AddedToken"} if marked else {})


def declare(folder: Path, chance: random.Random) -> None:
    """Random files of a checkpoint's tokenizer."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    special: dict[str, Any] = {}
    for name in chance.sample(STANDARD, chance.randrange(5)):
        config[name] = named(chance, True) if chance.random() < 0.9 else None
    for name in chance.sample(OWN, chance.randrange(3)):
        config[name] = named(chance, chance.random() < 0.8)  # an object that is not marked is no token
    if chance.random() < 0.3:
        config["extra_special_tokens"] = chance.choice(([], ["<a>", "<|x|>"], {"image_token": "<b>", "z_token": "<é>"}))
    if chance.random() < 0.3:
        config["additional_special_tokens"] = [*chance.sample(TOKENS, 2), named(chance, True)]
    if chance.random() < 0.4:
        first = chance.choice((257, 259, 259, 300))
        contents = chance.sample(TOKENS, chance.randrange(4))
        config["added_tokens_decoder"] = {str(first + n): options(chance, c) for n, c in enumerate(contents)}
    if chance.random() < 0.3:
        config |= {"add_bos_token": chance.random() < 0.5, "add_eos_token": chance.random() < 0.5}
    for name in chance.sample((*STANDARD, "mine_token"), chance.randrange(3)):
        special[name] = named(chance, False)
    if chance.random() < 0.3:
        special["additional_special_tokens"] = chance.sample(TOKENS, 2)
    if chance.random() < 0.2:
        special["extra_special_tokens"] = chance.choice((["<b>", options(chance, "<c d>")], {"y_token": "<a>"}))
    files = {"tokenizer.json": base(), "config.json": '{"model_type": "olmoe"}', "tokenizer_config.json": config}
    if chance.random() < 0.5:
        files["special_tokens_map.json"] = special
    if chance.random() < 0.4:
        files["added_tokens.json"] = {t: 259 + n for n, t in enumerate(chance.sample(TOKENS, 3))}
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def texts(chance: random.Random) -> list[str]:
    pieces = [*TOKENS, " ", "  ", "x", "fgh", "é", "<", "f"]
    return ["".join(chance.choices(pieces, k=8)) for _ in range(12)]


def compare(folder: Path, chance: random.Random) -> Tokenizer | None:
    """The loaded tokenizer, equal to transformers'; None where transformers refuses the files."""
    import transformers

    declare(folder, chance)
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
    except (TypeError, ValueError, AttributeError):
        return None
    ours = Tokenizer(folder)
    for text in texts(chance):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text, parse=True) == ids, text
        assert ours.encode(text) == theirs(text, split_special_tokens=True)["input_ids"], text
        for skip in (False, True):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)
    template = "".join(f"[{{{{ {name} }}}}]" for name in (*STANDARD, *OWN, "y_token", "z_token", "mine_token"))
    (folder / "chat_template.jinja").write_text(template)
    message = [{"role": "user", "content": ""}]
    want = theirs.apply_chat_template(message, chat_template=template, tokenize=False)
    assert ours.chat(message, add_generation_prompt=False) == want
    assert len(ours) == len(theirs)
    return ours


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_declared_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """D2: every file and field that names tokens, in any combination."""
    accepted = 0
    for seed in range(120):
        folder = tmp_path / str(seed)
        folder.mkdir()
        accepted += compare(folder, random.Random(seed)) is not None
    assert accepted > 60


@pytest.mark.slow
def test_many_declared_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    for seed in range(1000, 4000):
        folder = tmp_path / str(seed)
        folder.mkdir()
        compare(folder, random.Random(seed))


def test_declared_tokens_are_in_c_too(tmp_path: Path) -> None:
    """D2: tokenizer.bin has them, with their options."""
    library: ctypes.CDLL = load_c(tmp_path)
    done = 0
    for seed in range(400, 420):
        chance = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        ours = compare(folder, chance)
        if ours is None or done == 5:
            continue
        done += 1
        c = CTokenizer(library, ours.write_c())
        for text in texts(chance):
            assert c.encode(text, SPECIAL) == ours.encode(text, special=False, parse=True), text
            assert c.encode(text) == ours.encode(text, special=False), text
    assert done == 5


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"bos_token": 3}),
        ("tokenizer_config.json", {"eos_token": {"text": "<a>"}}),
        ("tokenizer_config.json", {"extra_special_tokens": 5}),
        ("tokenizer_config.json", {"extra_special_tokens": [7]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"x_token": None}}),
        ("tokenizer_config.json", {"added_tokens_decoder": ["<a>"]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<a>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"260": "<a>"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"260": {"content": "<a>", "lstrip": "yes"}}}),
        ("special_tokens_map.json", {"bos_token": {"lstrip": True}}),
        ("special_tokens_map.json", {"additional_special_tokens": "<a>"}),
        ("added_tokens.json", {"<a>": "260"}),
        ("added_tokens.json", {"<a>": -1}),
        ("added_tokens.json", {"\ud800": 260}),
        ("tokenizer_config.json", {"bos_token": "\udfff"}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "<a>"}}}),
        ("added_tokens.json", ["<a>"]),
    ],
)
def test_malformed_declarations_are_refused(tmp_path: Path, name: str, content: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(base())
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ModelError):
        Tokenizer(tmp_path)
