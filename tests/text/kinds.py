"""Tokenizers of every kind that is supported, trained here on a small corpus, and texts to try them on."""

from __future__ import annotations

import functools
import json
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre

ROOT = Path(__file__).resolve().parents[2]

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NOT_HAN = r"&&[^\p{Han}]]"
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+",
    "llama3": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen3_5": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "kimi": rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{UPPER[:-1]}{NOT_HAN}*{LOWER[:-1]}{NOT_HAN}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER[:-1]}{NOT_HAN}+{LOWER[:-1]}{NOT_HAN}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
DEEPSEEK_V2 = (
    "[\r\n]",
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ]+",
    "\\s?[!-/:-~！-／：-～‘-‟　-。]+",
    "\\s+$",
    "[一-龥ࠀ-一가-퟿]+",
)


def _split(pattern: str) -> Any:
    return pre.Split(Regex(pattern), "isolated")


def _byte_level(size: int, before: Any = None, use_regex: bool = False, prefix: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    last = pre.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)
    tokenizer.pre_tokenizer = last if before is None else pre.Sequence([*before, last])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre.ByteLevel.alphabet(), special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def _byte_fallback(size: int, normalizer: Any, pre_tokenizer: Any, decoder: Any, words: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    # Trained on words, as SentencePiece is, whatever the finished tokenizer cuts.
    if normalizer is None:
        tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme="never")
    elif words:
        tokenizer.pre_tokenizer = _split("▁[^▁]*|[^▁]+")
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, limit_alphabet=400
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    spec = json.loads(tokenizer.to_str())
    vocab = spec["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    if pre_tokenizer is None:
        spec = json.loads(tokenizer.to_str()) | {"pre_tokenizer": None}
        tokenizer = Tokenizer.from_str(json.dumps(spec))
    else:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    return tokenizer


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens(
        [
            AddedToken("|||EMAIL|||", normalized=False),
            AddedToken("<tool>", normalized=True),
            AddedToken("    ", normalized=True),
            AddedToken("caf\u00e9!", normalized=True),
            AddedToken("<word>", single_word=True, normalized=False),
            AddedToken("Éa", single_word=True, normalized=True),
            AddedToken("<think>", normalized=False),
            AddedToken("<thinking>", normalized=False),
        ]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken("<|left|>", lstrip=True, normalized=False),
            AddedToken("<|right|>", rstrip=True, normalized=False),
            AddedToken("<|both|>", lstrip=True, rstrip=True, normalized=False),
        ]
    )
    return tokenizer


def _llama2(size: int) -> Tokenizer:
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = _byte_fallback(size, normalizer, None, decoder)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def _metaspace(scheme: str, split: bool) -> Tokenizer:
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    return _byte_fallback(1200, None, pre.Metaspace(prepend_scheme=scheme, split=split), decoder)


def _phrases() -> Tokenizer:
    """Tokens reach over several words, so that text cannot be cut between them."""
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _byte_fallback(1500, normalizers.Replace(" ", "▁"), None, decoder, words=False)


def _gemma() -> Tokenizer:
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    before = pre.Split(" ", "merged_with_previous")
    return _byte_fallback(1500, normalizers.Replace(" ", "▁"), before, decoder)


def _phi_digits() -> Tokenizer:
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    before = pre.Sequence([pre.Digits(individual_digits=True), _split(r"[ !?]+|\p{Lu}\p{Ll}+")])
    return _byte_fallback(1500, normalizers.Replace(" ", "▁"), before, decoder)


def _llama3() -> Tokenizer:
    tokenizer = _byte_level(3000, [_split(PATTERNS["llama3"])])
    spec = json.loads(tokenizer.to_str())
    spec["model"]["ignore_merges"] = True
    # A word whose parts never merge, which ignoring merges finds.
    spec["model"]["vocab"]["Ġzyzzyva"] = len(spec["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    template = processors.TemplateProcessing(single="<|end|> $A <|end|>", pair="$A $B", special_tokens=[("<|end|>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def _nfc(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _neox() -> Tokenizer:
    """Without the 13 bytes that UTF-8 never has, as OLMoE's vocabulary is."""
    spec = json.loads(_byte_level(700, use_regex=True).to_str())
    never = {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}  # these stand for themselves
    kept = [token for token in spec["model"]["vocab"] if token not in never]
    assert len(kept) == len(spec["model"]["vocab"]) - 13
    spec["model"]["vocab"] = {token: i for i, token in enumerate(kept)}
    return Tokenizer.from_str(json.dumps(spec))


def _removed() -> Tokenizer:
    tokenizer = _byte_level(600, [pre.Split(Regex(r"\p{L}+|\p{N}"), "removed", invert=True), pre.Split(",", "removed")])
    return tokenizer


def _merged() -> Tokenizer:
    cuts = [
        pre.Split(" ", "merged_with_next"),
        pre.Split(Regex(r"[aeiou]"), "merged_with_previous"),
        pre.Split(Regex(r"\d"), "contiguous"),
        pre.Split("ß", "isolated"),
        pre.Digits(individual_digits=False),
    ]
    return _byte_level(900, cuts)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: _byte_level(1000, use_regex=True),
    "gpt2_prefix": lambda: _with_added(_byte_level(500, use_regex=True, prefix=True)),
    "cl100k": lambda: _byte_level(2000, [_split(PATTERNS["cl100k"])]),
    "llama3": lambda: _with_added(_llama3()),
    "qwen2": lambda: _with_added(_nfc(_byte_level(8000, [_split(PATTERNS["qwen2"])]))),
    "qwen3_5": lambda: _nfc(_byte_level(400, [_split(PATTERNS["qwen3_5"])])),
    "o200k": lambda: _byte_level(4000, [_split(PATTERNS["o200k"])]),
    "kimi": lambda: _byte_level(700, [_split(PATTERNS["kimi"])]),
    "deepseek_v2": lambda: _byte_level(900, [*map(_split, DEEPSEEK_V2), pre.Digits(individual_digits=True)]),
    "deepseek_v3": lambda: _with_added(_byte_level(2500, [*map(_split, DEEPSEEK_V3)])),
    "granite": lambda: _byte_level(1000, [pre.Digits(individual_digits=True)], use_regex=True),
    "olmoe": lambda: _with_added(_nfc(_byte_level(3000, use_regex=True))),
    "neox": _neox,
    "removed": _removed,
    "merged": _merged,
    "llama2": lambda: _with_added(_llama2(4000)),
    "metaspace_first": lambda: _metaspace("first", True),
    "metaspace_always": lambda: _metaspace("always", False),
    "metaspace_never": lambda: _metaspace("never", True),
    "gemma": _gemma,
    "phrases": _phrases,
    "phi_digits": _phi_digits,
}
BYTE_LEVEL = [
    k for k in KINDS if k not in ("llama2", "gemma", "phrases", "phi_digits", "removed") and "metaspace" not in k
]


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """The library's tokenizer of one kind."""
    return KINDS[kind]()


# --- texts ------------------------------------------------------------------------------------------------------------


@functools.cache
def corpus() -> tuple[str, ...]:
    """What the tokenizers are trained on: documents and code, by paragraphs."""
    files = [*sorted((ROOT / "docs").glob("*.md"))[:6], *sorted((ROOT / "src/colibri").glob("*.py"))[:6]]
    text = "\n\n".join(path.read_text(encoding="utf-8")[:20_000] for path in files) + SCRIPTS * 20
    return tuple(text.split("\n\n"))


SCRIPTS = """
The quick brown fox doesn't jump; it's THEY'LL who've jumped, I'm sure they'd say. DON'T! 3.14159 1234567 ½ Ⅷ ١٢٣
Falsches Üben von Xylophonmusik quält jeden größeren Zwerg. Pchnąć w tę łódź jeża. Příliš žluťoučký kůň. Iñtërnâtiôn
Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Ιʼm ʼn ŉ
視野無限廣，窗外有藍天。いろはにほへと ちりぬるを カタカナ ﾊﾝｶｸ。 키스의 고유조건은 입술끼리 만나야 하고 각 한글
نص حكيم له سر قاطع וְהָיָה דג סקרן שט בים ऋषियों को सताने वाले दुष्ट राक्षसों เป็นมนุษย์สุดประเสริฐ தமிழ் আমার ខ្មែរ ལྷ་ས ⰀⰁ
👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️ 𝒳𝕐 𐍈 a\u0301 e\u0323\u0302 Å Å \u1100\u1161\u11a8 \u0958 \u0344 \u2126 ﬁ Ⅳ ß ẞ ſ İı
"""
FRAGMENTS = [
    "<|", "|>", "<|end|>", "<|left|>", "<|right|>", "<|both|>", "|||EMAIL|||", "<tool>", "    ", "caf\u00e9!",
    "cafe\u0301!",
    "<word>", "Éa", "E\u0301a", "<think>", "<thinking>", "<s>", "</s>", "<unk>", "<0x41>", "▁", " ", "  ", "\n", "\r\n",
    "\t", "\u00a0", "\u3000", "\u200d", "é", "e\u0301", "\u0301\u0323", "a\u0323\u0301", "가", "\u1100\u1161\u11a8",
    "각",
    "\ufffd", " hello", "ing", "'s", "'LL", "ſ", "'ſ", "12345", " zyzzyva", "x", "_", ",", ".", "!?", "\x00", "\x7f",
    "\x1f",
    "\u0378", "\U000e0001", "\U0010ffff", "ß", "数据", "🏳️‍🌈", "٣", "²", "ǅ", "ʰ", "\u0903",
]  # fmt: skip


def random_text(chance: random.Random, length: int) -> str:
    """Characters from all over Unicode."""
    limits = (0x80, 0x800, 0x3000, 0x10000, 0x20000, 0x110000)
    points = (chance.randrange(chance.choice(limits)) for _ in range(length))
    return "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)


def texts(seed: int, size: int) -> Iterator[str]:
    """Varied texts of about `size` bytes together."""
    chance = random.Random(seed)
    yield from ("", " ", "  ", "\n", "a", " a", "a ", "▁", "▁a", "a" * 300, " " * 300, SCRIPTS, "\u0301", "<|end|>")
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code = library[chance.randrange(len(library))].read_text(encoding="utf-8", errors="replace")
    made = 0
    while made < size:
        kind = chance.randrange(4)
        if kind == 0:
            text = random_text(chance, chance.randrange(80))
        elif kind == 1:
            text = "".join(chance.choices(FRAGMENTS, k=chance.randrange(25)))
        elif kind == 2:
            begin = chance.randrange(len(SCRIPTS))
            text = SCRIPTS[begin : begin + chance.randrange(400)]
        else:
            begin = chance.randrange(max(1, len(code) - 2000))
            text = code[begin : begin + 2000]
            if chance.random() < 0.1:
                code = chance.choice(library).read_text(encoding="utf-8", errors="replace")
        made += len(text.encode())
        yield text
