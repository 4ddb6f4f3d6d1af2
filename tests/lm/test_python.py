"""The Python tokenizer: files, ids, streams and chat templates as in transformers, and errors that say what to do."""

from __future__ import annotations

import builtins
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.errors import ExportError, ModelError
from colibri.text.tokenizer import Tokenizer, write_c
from tests.text import kinds

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "blocks": """
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}{{ tool | tojson }}
    {%- endfor %}
{%- endif %}
{{ bos_token }}
{% for message in messages %}
    {% if message.role == 'skipped' %}
        {% continue %}
    {% endif %}
    {% if message.role == 'last' %}
        {% break %}
    {% endif %}
    [{{ message.role }}] {{ message.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
[assistant]
{% endif %}
""",
    "namespace": "{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}:{{ m['content'] }} "
    "{% endfor %}{{ dict(a=1)['a'] }}{{ messages[-1]['content'].split()[0] | upper }}",
    "generation": "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
    "year": "{{ strftime_now('%Y') }}{{ messages | length }}",
}
MESSAGES = [
    {"role": "system", "content": "Be brief, <b>\"brief\"</b> & 'kind'."},
    {"role": "skipped", "content": "nothing"},
    {"role": "user", "content": "  Grüße, 世界 \n"},
    {"role": "last", "content": "end of it"},
]
TOOLS = [{"name": "f", "text": "ü<>&'", "args": {"x": [1, 2.5, None, True]}}]


def directory(path: Path, kind: str = "gpt2", **files: Any) -> Path:
    """A checkpoint's directory; `files` by their names, with `_` for the dot, as objects or as text."""
    kinds.tokenizer(kind).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / re.sub("_(json|jinja)$", r".\1", name)).write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_is_what_transformers_makes(tmp_path: Path, name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    config = {"bos_token": "<|end|>", "eos_token": {"content": "<|end|>"}, "tokenizer_class": "PreTrainedTokenizerFast"}
    directory(tmp_path, tokenizer_config_json=config, chat_template_jinja=TEMPLATES[name])
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|end|>", eos_token="<|end|>"
    )
    ours = Tokenizer(tmp_path)
    for prompt in (False, True):
        for tools in (None, TOOLS):
            want = theirs.apply_chat_template(
                MESSAGES, tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=prompt, tokenize=False
            )
            assert ours.chat(MESSAGES, prompt, tools=tools) == want


def test_templates_are_found_wherever_checkpoints_keep_them(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = Tokenizer(directory(tmp_path / "one", tokenizer_config_json={"chat_template": "A{{ messages | length }}"}))
    assert one.chat([]) == "A0"
    (tmp_path / "two").mkdir()
    named = [{"name": "default", "template": "B"}, {"name": "tool_use", "template": "C{{ tools }}"}]
    two = Tokenizer(directory(tmp_path / "two", tokenizer_config_json={"chat_template": named}))
    assert (two.chat([]), two.chat([], template="tool_use", tools=1)) == ("B", "C1")
    with pytest.raises(ModelError, match=r"no chat template 'rag'.*default.*tool_use"):
        two.chat([], template="rag")
    (tmp_path / "two/chat_template.jinja").write_text("D", encoding="utf-8")
    assert Tokenizer(tmp_path / "two").chat([]) == "D"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "malformed"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content }}", "does not take these messages"),
        ("{{ ''.__class__.__mro__ }}", "does not take these messages"),
        ("{{ messages.append(1) }}", "does not take these messages"),
    ],
)
def test_bad_templates_are_refused(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = Tokenizer(directory(tmp_path, chat_template_jinja=template))
    with pytest.raises(ModelError, match=message):
        tokenizer.chat([])


def test_a_missing_template_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no chat template.*chat_template\.jinja"):
        Tokenizer(directory(tmp_path)).chat([])


@pytest.mark.parametrize("name", ["tokenizer_json", "tokenizer_config_json", "generation_config_json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"a": '])
def test_malformed_files_are_refused_by_name(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(ModelError, match=re.sub("_json$", r"\\.json", name)):
        Tokenizer(directory(tmp_path, **{name: content}))


def test_a_directory_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json: pass the directory"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(("library", "call"), [("tokenizers", "load"), ("jinja2", "chat"), ("tokenizers", "write")])
def test_a_missing_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, call: str
) -> None:
    tokenizer = Tokenizer(directory(tmp_path, chat_template_jinja="x"))
    real = builtins.__import__

    def missing(name: str, *more: Any) -> Any:
        if name == library:
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ExportError, match=rf"{library}.*pip install 'colibri-moe\[lm\]'"):
        {"load": lambda: Tokenizer(tmp_path), "chat": lambda: tokenizer.chat([]),
         "write": lambda: write_c(tmp_path / "tokenizer.json")}[call]()  # fmt: skip


def test_begin_and_end_come_from_the_files(tmp_path: Path) -> None:
    base = {"tokenizer_config_json": {"bos_token": "<s>", "eos_token": "</s>"}}
    assert Tokenizer(directory(tmp_path, "llama2", **base)).eos == (2,)
    directory(tmp_path, "llama2", config_json={"eos_token_id": 7, "bos_token_id": 5})
    assert (Tokenizer(tmp_path).bos, Tokenizer(tmp_path).eos) == (1, (7, 2))
    directory(tmp_path, "llama2", generation_config_json={"eos_token_id": [9, 8, 9]})
    assert Tokenizer(tmp_path).eos == (9, 8)
    directory(tmp_path, "llama2", tokenizer_config_json={"bos_token": None})
    assert Tokenizer(tmp_path).bos is None
    directory(tmp_path, "llama2", generation_config_json={"eos_token_id": "x"})
    with pytest.raises(ModelError, match="eos_token_id is 'x'"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["llama2", "gpt2"])  # whose post-processor adds BOS, and none
def test_flags_for_begin_and_end_change_nothing_as_in_transformers(tmp_path: Path, kind: str) -> None:
    """D2: where there is a tokenizer.json, transformers 5.24 does not look at add_bos_token and add_eos_token."""
    from transformers import AutoTokenizer

    names = {"bos_token": "<s>", "eos_token": "</s>"} if kind == "llama2" else {"bos_token": "<|end|>"}
    plain = Tokenizer(directory(tmp_path, kind, tokenizer_config_json=names)).encode("hello")
    for bos in (None, False, True):
        for eos in (None, False, True):
            flags = {"add_bos_token": bos, "add_eos_token": eos}
            flags = {name: flag for name, flag in flags.items() if flag is not None}
            config = names | flags | {"tokenizer_class": "PreTrainedTokenizerFast"}
            directory(tmp_path, kind, tokenizer_config_json=config, config_json={"model_type": "olmoe"})
            assert Tokenizer(tmp_path).encode("hello") == plain
            assert AutoTokenizer.from_pretrained(tmp_path)("hello")["input_ids"] == plain


def test_special_tokens_are_parsed_only_when_asked(tmp_path: Path) -> None:
    tokenizer = Tokenizer(directory(tmp_path))
    end = tokenizer.id("<|end|>")
    assert end is not None and tokenizer.token(end) == "<|end|>"
    assert end not in tokenizer.encode("a<|end|>")
    assert tokenizer.encode("a<|end|>", parse=True)[-1] == end
    assert tokenizer.decode([end]) == "" and tokenizer.decode([end], skip_special=False) == "<|end|>"


def test_what_is_no_text_and_no_token_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(directory(tmp_path))
    assert tokenizer.encode(b"a\xff") == tokenizer.encode("a\ufffd")
    with pytest.raises(ModelError, match="surrogate"):
        tokenizer.encode("\ud800")
    for bad in (-1, 1 << 31, 1 << 40):
        with pytest.raises(ModelError, match="is no id of a token"):
            tokenizer.decode([bad])
    for bad in (-1, len(tokenizer)):
        with pytest.raises(ModelError, match="not in the vocabulary"):
            tokenizer.token(bad)


def test_ids_without_a_token_have_no_text(tmp_path: Path) -> None:
    """D3: alone, between others, and in a stream."""
    tokenizer = Tokenizer(directory(tmp_path))
    absent = (len(tokenizer), len(tokenizer) + 99, (1 << 31) - 1)
    ids = tokenizer.encode("Grüße, 世界")
    for chance in map(random.Random, range(20)):
        mixed = list(ids)
        for _ in range(4):
            mixed.insert(chance.randrange(len(mixed) + 1), chance.choice(absent))
        stream = tokenizer.stream()
        assert tokenizer.decode(mixed) == "".join(map(stream.push, mixed)) + stream.end() == "Grüße, 世界"


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "metaspace_first", "qwen2", "llama3"])
def test_a_stream_gives_whole_characters_and_all_of_them(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer(directory(tmp_path, kind))
    chance = random.Random(4)
    texts = [kinds.SCRIPTS, *(kinds.random_text(chance, 30) for _ in range(40))]
    for text in texts:
        text = text.replace("\ufffd", "")
        ids = tokenizer.encode(text, parse=True)
        stream = tokenizer.stream()
        parts = [stream.push(i) for i in ids]
        assert not any("\ufffd" in part for part in parts)
        assert "".join(parts) + stream.end() == tokenizer.decode(ids)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_a_stream_of_any_ids_is_what_decoding_gives(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    chance = random.Random(seed)
    for kind in ("gpt2", "llama2"):
        if kind not in LOADED:
            LOADED[kind] = Tokenizer(directory(tmp_path_factory.mktemp(kind), kind))
        tokenizer = LOADED[kind]
        ids = [chance.randrange(len(tokenizer) if chance.random() < 0.5 else 300) for _ in range(12)]
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.end() == tokenizer.decode(ids)


LOADED: dict[str, Tokenizer] = {}


def test_saved_files_are_enough(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    directory(source, "llama2", tokenizer_config_json={"bos_token": "<s>"}, chat_template_jinja=CHATML,
              generation_config_json={"eos_token_id": 2})  # fmt: skip
    Tokenizer(source).save(tmp_path / "export")
    Tokenizer(source).save(source)
    first, second = Tokenizer(source), Tokenizer(tmp_path / "export")
    assert first.chat(MESSAGES) == second.chat(MESSAGES)
    assert (first.bos, first.eos, first.write_c()) == (second.bos, second.eos, second.write_c())
