"""Chat templates are somebody else's programs: what they get is what transformers gives them, and they have limits."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from colibri.errors import ModelError
from colibri.text import chat_template
from colibri.text.tokenizer import Tokenizer
from tests.lm.test_python import directory

transformers = pytest.importorskip("transformers")

SHOWN = "{{ messages | tojson }}{{ tools | tojson }}"
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "no content": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    "no calls": [{"role": "assistant", "content": "hi", "tool_calls": None, "name": None}],
    "thinking": [{"role": "assistant", "content": "hi", "thinking": "hm"}],
    "reasoning": [{"role": "assistant", "content": "hi", "reasoning": "hm", "reasoning_content": None}],
    "blocks": [{"role": "user", "content": [{"type": "text", "text": "hi", "more": None}]}],
    "half a pair": [{"role": "user", "content": "\ud800"}],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_template_sees_the_messages_that_transformers_shows_it(tmp_path: Path, name: str) -> None:
    """D6."""
    directory(tmp_path, tokenizer_config_json={"tokenizer_class": "PreTrainedTokenizerFast"}, chat_template_jinja=SHOWN)
    theirs, messages = transformers.AutoTokenizer.from_pretrained(tmp_path), CONVERSATIONS[name]
    assert Tokenizer(tmp_path).chat(messages, False) == theirs.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("tools", [None, [], [CALL]])
def test_tools_take_their_own_template(tmp_path: Path, tools: list[Any] | None) -> None:
    """D6."""
    named = [{"name": "default", "template": "D" + SHOWN}, {"name": "tool_use", "template": "T" + SHOWN}]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": named}
    directory(tmp_path, tokenizer_config_json=config)
    theirs, messages = transformers.AutoTokenizer.from_pretrained(tmp_path), [{"role": "user", "content": "hi"}]
    want = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    assert Tokenizer(tmp_path).chat(messages, False, tools=tools) == want
    assert Tokenizer(tmp_path).chat(messages, False, tools=tools, template="default").startswith("D")


FAILING = {
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    "division": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "range": ("{% for i in range(1000000) %}{% endfor %}", "OverflowError"),
    "one long text": ("{{ 'x' * 99999999999999 }}", "memory"),
    "memory": ("{% set n = namespace(x='x') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}", "memory"),
    "many texts": ("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "longer than"),
    "format": ("{{ '%999999999d' % 1 }}", "memory"),
    "type": ("{{ messages + 1 }}", "TypeError"),
    "sandbox": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "does not take"),
    "its own": ("{{ raise_exception('no such role') }}", "no such role"),
    "syntax": ("{% if %}", "malformed"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING)
def test_a_template_that_fails_is_a_named_error_and_the_next_one_works(name: str) -> None:
    """C10, D6."""
    template, said = FAILING[name]
    with pytest.raises(ModelError, match=said):
        chat_template.render(template, [], {})
    assert chat_template.render("{{ messages[0].content }}", [{"content": "ü"}], {}) == "ü"


LOOPS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize("template", [LOOPS, "{{ 9 ** (9 ** 99) }}"])
def test_a_template_that_does_not_end_is_ended(template: str) -> None:
    """C10."""
    start = time.monotonic()
    with pytest.raises(ModelError, match="not done after"):
        chat_template.render(template, [], {}, seconds=0.5)
    assert time.monotonic() - start < 5
    assert chat_template.render("a", [], {}) == "a"


def test_what_is_no_plain_data_is_refused() -> None:
    for messages, values in (([{"content": object()}], {}), ([], {"tools": [print]}), (["hi"], {})):
        with pytest.raises(ModelError, match=r"plain data|mapping"):
            chat_template.render("a", messages, values)  # type: ignore[arg-type]


def test_a_fork_renders_in_a_process_of_its_own() -> None:
    assert chat_template.render("a", [], {}) == "a"
    child = os.fork()
    if child == 0:
        os._exit(0 if chat_template.render("b", [], {}) == "b" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert chat_template.render("c", [], {}) == "c"
