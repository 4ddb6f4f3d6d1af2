"""colibri generate, chat, eval and set as a user meets them, and the same chat in C."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import colibri
from colibri import exporter
from colibri.cli import language as cli_language
from colibri.frontends.checkpoints.language_models import load_checkpoint
from colibri.ir.graph import Router
from colibri.report.evaluate import evaluate
from colibri.runtime.language import LanguageModel
from colibri.text.tokenizer import Tokenizer
from tests.lm.conftest import CHECKPOINT, ROOT
from tests.lm_graphs import encoder_decoder, language_model
from tests.text.test_answers import tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def command(*args: object, given: str | bytes = b"", **options: Any) -> subprocess.CompletedProcess[bytes]:
    given = given.encode() if isinstance(given, str) else given
    return subprocess.run([sys.executable, "-m", "colibri.cli", *map(str, args)], input=given, capture_output=True,
                          check=False, timeout=300, **options)  # fmt: skip


def result(*args: object, **options: Any) -> Any:
    done = command(*args, "--json", **options)
    assert done.returncode == 0, done.stderr.decode() + done.stdout.decode()
    return json.loads(done.stdout)


def refused(*args: object, **options: Any) -> str:
    """The one sentence of a failure."""
    done = command(*args, **options)
    assert done.returncode == 1 and done.stdout == b""
    said = done.stderr.decode()
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


@pytest.fixture(scope="module")
def talker(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same export with a chat template."""
    out = tmp_path_factory.mktemp("talker") / "model"
    shutil.copytree(story, out)
    (out / "chat_template.jinja").write_text(TEMPLATE)
    return out


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context for minutes, which never ends its text, with the storyteller's tokenizer."""
    out = tmp_path_factory.mktemp("endless")
    graph = language_model(3, context=50_000, vocab=2048, width=32, layers=2)
    exporter.export_lm(graph, out, dtype="fp32", workers=1, tokenizer=CHECKPOINT)
    (out / "generation_config.json").write_text("{}")
    for name in ("config.json", "tokenizer_config.json"):
        (out / name).unlink()
    (out / "chat_template.jinja").write_text(TEMPLATE)
    return out


def interrupted(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Ctrl-C once text has come; the rest of both streams."""
    assert process.stdout is not None
    process.stdout.read(1)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=60)


def start(*args: object) -> subprocess.Popen[bytes]:
    def listen() -> None:  # a shell's background job ignores Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return subprocess.Popen(list(map(str, args)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, preexec_fn=listen)  # fmt: skip


PYTHON = (sys.executable, "-m", "colibri.cli")


# --- export and generate ---


def test_export_carries_the_tokenizer(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = command("export", "-m", CHECKPOINT, "-o", out, "--dtype", "fp16", "--workers", 1)
    assert done.returncode == 0, done.stderr
    names = {p.name for p in out.iterdir()}
    assert {"model.bin", "model.h", "tokenizer.json", "tokenizer.bin", "generation_config.json"} <= names
    assert result("generate", out, "Once", "-n", 3)["tokens"] <= 3


def test_generate_answers_a_source_text(tmp_path: Path) -> None:
    graph = encoder_decoder(context=64, vocab=2048, width=32)
    exporter.export_lm(graph, tmp_path, dtype="fp32", workers=1, tokenizer=CHECKPOINT)
    lm = colibri.load(tmp_path)
    assert isinstance(lm, LanguageModel)
    prompt = lm.tokenizer.encode("Once upon a time")
    answer = result("generate", tmp_path, "Once upon a time", "-n", 9)
    assert answer["text"] == lm.tokenizer.decode(lm.generate(prompt, 9, stop=lm.tokenizer.eos))
    assert answer["prompt_tokens"] == answer["prompt_tokens_evaluated"] == len(prompt)
    assert "the source text has" in refused("generate", tmp_path, "word " * 200)


def test_generate_prints_text_and_says_how_it_went(story: Path) -> None:
    lm = colibri.load(story)
    assert isinstance(lm, LanguageModel)
    prompt = lm.tokenizer.encode("Once upon a time")
    sampling = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 5}
    ids = lm.generate(prompt, 30, stop=lm.tokenizer.eos, **sampling)  # type: ignore[arg-type]
    options = [f"--{k.replace('_', '-')}={v}" for k, v in sampling.items()]
    done = command("generate", story, "Once upon a time", "-n", 30, *options)
    assert done.returncode == 0 and done.stdout.decode() == lm.tokenizer.decode(ids) + "\n"
    figures, experts = done.stderr.decode().splitlines()
    assert f"{len(prompt)} prompt tokens at " in figures and "the first after" in figures
    assert experts.startswith("experts used in each layer: ") and "the busiest: expert" in experts
    found = result("generate", story, "Once upon a time", "-n", 30, *options, "--threads", 1, "--kernels", "plain")
    assert found["text"] == lm.tokenizer.decode(ids) and found["tokens"] == len(ids)
    assert found["prompt_tokens"] == found["prompt_tokens_evaluated"] == len(prompt)
    assert [e["experts"] for e in found["experts"]] == [16] * 5 and all(2 <= e["used"] <= 16 for e in found["experts"])


def test_a_prompt_may_come_from_stdin_and_be_anything(story: Path) -> None:
    given = result("generate", story, "-", "-n", 4, given="Once upon a time\n")
    told = result("generate", story, "Once upon a time", "-n", 4)
    assert given["text"] == told["text"] and given["experts"] == told["experts"]
    for odd in (b"\xff\xfe broken \xc3", "€ 🐦 中文".encode(), b"\x00\x01"):
        done = command("generate", story, "-", "-n", 20, "--temperature", 2, given=odd)
        assert done.returncode == 0
        done.stdout.decode()  # whole characters only


def test_an_empty_prompt_needs_a_token_that_begins_a_text(story: Path, tmp_path: Path) -> None:
    assert "the prompt is empty, and the model has no token" in refused("generate", story, "")
    assert "with --raw nothing is put before it" in refused("generate", story, "", "--raw")
    begins = tmp_path / "model"
    shutil.copytree(story, begins)
    (begins / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>"}')
    assert result("generate", begins, "", "-n", 2)["prompt_tokens"] == 1
    assert "with --raw" in refused("generate", begins, "", "--raw")


def test_a_full_context_is_said_and_is_no_error(story: Path, endless: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(endless, small)
    assert command("set", small, "--context", 40).returncode == 0
    done = command("generate", small, "Once upon a time", "-n", 1000)
    assert done.returncode == 0 and "the context of 40 tokens is full" in done.stderr.decode()
    found = result("generate", small, "Once upon a time", "-n", 1000)
    assert found["finish"] == "context" and found["tokens"] + found["prompt_tokens"] == 41
    said = refused("generate", small, "Once upon a time " * 20)
    assert "but the context holds 40: shorten it" in said and "colibri set --context" in said


def test_the_model_ends_its_text(story: Path, tmp_path: Path) -> None:
    lm = colibri.load(story)
    assert isinstance(lm, LanguageModel)
    ids = lm.generate(lm.tokenizer.encode("Once"), 20, temperature=1.0, seed=1)
    ends = tmp_path / "model"
    shutil.copytree(story, ends)
    (ends / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[9], 5]}))
    found = result("generate", ends, "Once", "--temperature", 1, "--seed", 1)
    assert found["finish"] == "end" and found["text"] == lm.tokenizer.decode(ids[: ids.index(ids[9])])


def test_ctrl_c_ends_generation_with_its_figures(endless: Path) -> None:
    process = start(*PYTHON, "generate", endless, "Once", "-n", 49_000)
    _, said = interrupted(process)
    assert process.returncode == 130 and "Traceback" not in said.decode()
    assert "new tokens at" in said.decode() and "experts used" in said.decode()


def test_what_cannot_be_run_is_said_in_one_sentence(story: Path, tmp_path: Path) -> None:
    from tests.pipeline.test_export import moe_graph

    assert "does not exist" in refused("generate", tmp_path / "nowhere", "x")
    assert "without a model.bin" in refused("generate", tmp_path, "x")
    exporter.write(exporter.build(moe_graph(Router(3, 2, "softmax", "sum"))), tmp_path / "block")
    assert "is no language model" in refused("generate", tmp_path / "block", "x")
    assert "is no language model" in refused("set", tmp_path / "block", "--context", 5)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(story / "model.bin", bare)
    assert "has no tokenizer" in refused("generate", bare, "x")
    assert "has no tokenizer" in refused("chat", bare)
    assert "has no tokenizer" in refused("eval", bare, "--text", ROOT / "README.md")
    (bare / "tokenizer.json").write_text("{")
    assert "is not a tokenizer" in refused("generate", bare, "x")
    assert "top_p is 3.0: it must be" in refused("generate", story, "x", "--top-p", 3)
    assert "kernels" in refused("generate", story, "x", "--kernels", "abacus")
    assert command("generate", story, "x", "-n", -1).returncode == 2
    assert "error" in json.loads(command("generate", bare, "x", "--json").stdout)


# --- chat ---


def test_chat_keeps_the_conversation_and_evaluates_only_what_is_new(talker: Path) -> None:
    lm = colibri.load(talker)
    assert isinstance(lm, LanguageModel)
    messages, want = [], ""
    for line in ("Hello there", "And then?", "Go on"):
        messages.append({"role": "user", "content": line})
        ids = lm.tokenizer.encode(lm.tokenizer.chat(messages), special=False, parse=True)
        text = lm.tokenizer.decode(lm.generate(ids, 12, stop=lm.tokenizer.eos))
        messages.append({"role": "assistant", "content": text})
        want += text + "\n"
    done = command("chat", talker, "-n", 12, given="Hello there\n\nAnd then?\nGo on\n/exit\nnever read\n")
    assert done.returncode == 0 and done.stdout.decode() == want
    figures = done.stderr.decode().splitlines()
    assert len(figures) == 3 and "were there already" not in figures[0]
    assert all("were there already" in line for line in figures[1:])


def test_chat_forgets_on_request_and_ends_with_its_input(talker: Path) -> None:
    alone = command("chat", talker, "-n", 8, given="Hello").stdout
    done = command("chat", talker, "-n", 8, given="Hello\nWhat?\n/reset\nHello")
    assert done.returncode == 0 and done.stdout.startswith(alone) and done.stdout.endswith(alone)
    assert "the conversation is forgotten" in done.stderr.decode() and done.stderr.count(b"new tokens") == 3


def test_chat_lets_the_oldest_turns_go_where_the_context_is_full(talker: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(talker, small)
    assert command("set", small, "--context", 80).returncode == 0
    lines = "\n".join(f"Tell me of the king number {n}" for n in range(6)) + "\n" + "long " * 100 + "\nAgain\n"
    done = command("chat", small, "-n", 15, "--system", "You are a bard", given=lines)
    said = done.stderr.decode()
    assert done.returncode == 1 and "Traceback" not in said  # a message of a pipe had no answer
    assert "the context of 80 tokens is full: the oldest" in said and "forgotten" in said
    assert "but the context holds 80: shorten it" in said
    assert said.count("new tokens") == 7


def test_chat_says_once_that_a_template_takes_no_system_message(talker: Path, tmp_path: Path) -> None:
    """D7."""
    strict = tmp_path / "strict"
    shutil.copytree(talker, strict)
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    (strict / "chat_template.jinja").write_text(refusing + TEMPLATE)
    said = refused("chat", strict, "--system", "Be brief", given="Hello\nHello\n")
    assert "System role not supported" in said and "leave out --system" in said
    done = command("chat", strict, "-n", 3, given="Hello\n")
    assert done.returncode == 0 and done.stdout


def test_chat_ends_with_a_failure_where_a_template_fails(talker: Path, tmp_path: Path) -> None:
    """D6."""
    failing = tmp_path / "failing"
    shutil.copytree(talker, failing)
    (failing / "chat_template.jinja").write_text("{{ 1 // (messages | length - 1) }}" + TEMPLATE)
    done = command("chat", failing, "-n", 3, given="Hello\n")
    assert done.returncode == 1 and b"ZeroDivisionError" in done.stderr and b"Traceback" not in done.stderr


def test_chat_shows_thinking_apart_and_does_not_take_it_for_the_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """D6."""
    thinker = tokenizer(tmp_path, ["<|end|>", "<think>", "</think>"])
    say = cli_language._thinking_apart(SimpleNamespace(tokenizer=thinker), "")  # type: ignore[arg-type]
    ids = thinker.encode("<think>\nHm [b].\n</think>\n\nHi!<|end|>", special=False, parse=True)
    assert "".join(map(say, [*ids, None])) == "Hi!"
    shown = capfd.readouterr()
    assert shown.out == "Hi!" and shown.err == "thinking: Hm [b].\n\n"


def test_chat_needs_a_template(story: Path) -> None:
    assert "has no chat template" in refused("chat", story) and "colibri generate" in refused("chat", story)


def test_ctrl_c_stops_an_answer_and_not_the_chat(endless: Path) -> None:
    process = start(*PYTHON, "chat", endless, "-n", 49_000)
    assert process.stdin is not None
    process.stdin.write(b"Hello\n")
    process.stdin.flush()
    _, said = interrupted(process)  # and its input ends
    assert process.returncode == 0 and "new tokens at" in said.decode() and "Traceback" not in said.decode()


# --- eval and set ---


def test_eval_reports_for_people_and_programs(story: Path, tmp_path: Path) -> None:
    text = ROOT / "examples/storyteller/validation.txt"
    found = result("eval", story, "--text", text, "--tokens", 700, "--against", story)
    assert found["tokens"] == 700 and found["windows"] == 2 and 0 < found["bits_per_byte"] < 4
    assert found["against"]["kl_mean"] == 0 and found["against"]["agreement"] == 1
    assert found["against"]["flips"] == [0.0] * 5
    shown = command("eval", story, "--text", text, "--tokens", 50).stdout.decode()
    assert "perplexity of a token" in shown and "bits a byte" in shown and "KL" not in shown
    assert "cannot be read" in refused("eval", story, "--text", tmp_path / "nowhere.txt")
    (tmp_path / "empty.txt").write_text("")
    assert "nothing to predict" in refused("eval", story, "--text", tmp_path / "empty.txt")


def test_eval_of_the_storyteller_is_what_its_readme_says(tmp_path: Path) -> None:
    """D5: special tokens of the text are parsed, so that its perplexity is the model's."""
    out = tmp_path / "model"
    exporter.export_lm(load_checkpoint(CHECKPOINT), out, dtype="fp32", workers=1, tokenizer=CHECKPOINT)
    text = ROOT / "examples/storyteller/validation.txt"
    found = result("eval", out, "--text", text)
    readme = (ROOT / "examples/storyteller/README.md").read_text(encoding="utf-8")
    assert f"prints {found['perplexity']:.2f} for `validation.txt`" in readme
    assert f"as bytes, {found['bytes']:,} altogether" in readme
    lm = colibri.load(out)
    assert isinstance(lm, LanguageModel)
    for special in (True, False):
        ids = lm.tokenizer.encode("The end.<|endoftext|>Once", parse=special)
        assert evaluate(lm, "The end.<|endoftext|>Once", special=special).tokens == len(ids) - 1


def test_a_prompt_holds_special_tokens_unless_told_otherwise(story: Path, chat_in_c: Path) -> None:
    """D5: as other engines read it, in Python and in C."""
    prompt = "The end.<|endoftext|>Once"
    tokenizer = Tokenizer(story)
    for option, parse in (("--special", True), ("--no-special", False)):
        found = result("generate", story, prompt, "-n", 12, option)
        assert found["prompt_tokens"] == len(tokenizer.encode(prompt, parse=parse))
        in_words = in_c(chat_in_c, "-n", 12, *([] if parse else [option]), story, prompt)
        assert in_words.stdout.decode() == found["text"] + "\n"
    assert result("generate", story, prompt, "-n", 1)["prompt_tokens"] == len(tokenizer.encode(prompt, parse=True))


def test_chat_never_takes_special_tokens_from_a_message(talker: Path) -> None:
    """D5: what a user spells stays text."""
    lm = colibri.load(talker)
    assert isinstance(lm, LanguageModel)
    line = "Hello<|endoftext|>there"
    want = lm.tokenizer.encode(lm.tokenizer.chat([{"role": "user", "content": line}]), special=False)
    said = command("chat", talker, "-n", 4, given=line).stderr.decode()
    assert f"{len(want)} prompt tokens" in said


def test_ids_without_a_token_are_generated_as_nothing(story: Path, chat_in_c: Path, tmp_path: Path) -> None:
    """D3: a model with more logits than its tokenizer has tokens goes on, in Python and in C."""
    padded = tmp_path / "model"
    shutil.copytree(story, padded)
    spec = json.loads((padded / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = {token: i for token, i in spec["model"]["vocab"].items() if i < 600}
    kept = [m for m in spec["model"]["merges"] if all(part in vocab for part in (*m, "".join(m)))]
    spec["model"] |= {"vocab": vocab, "merges": kept}
    (padded / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    (padded / "tokenizer.bin").write_bytes(Tokenizer(padded).write_c())
    options = ("-n", 60, "--temperature", 1.5, "--seed", 4)
    lm = colibri.load(padded)
    assert isinstance(lm, LanguageModel) and len(lm.tokenizer) == 600
    ids = lm.generate(lm.tokenizer.encode("Once"), 60, temperature=1.5, seed=4)
    assert any(i >= 600 for i in ids)
    text = lm.tokenizer.decode([i for i in ids if i < 600])
    assert result("generate", padded, "Once", *options)["text"] == text
    assert in_c(chat_in_c, *options, padded, "Once").stdout.decode() == text + "\n"


def test_set_changes_the_context(story: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    shutil.copytree(story, out)
    assert result("set", out)["context_at_most"] == 512
    assert "positions for 512 tokens" in refused("set", out, "--context", 513)
    before = result("generate", out, "Once upon a time", "-n", 20)["text"]
    changed = result("set", out, "--context", 100)
    assert changed["context_bytes"] < changed["context_bytes_before"]
    assert result("verify", out)["verified"] and result("inspect", out)["context_bytes"] == changed["context_bytes"]
    assert result("generate", out, "Once upon a time", "-n", 20)["text"] == before
    done = command("set", out, "--context", 512, "--in-place")
    assert done.returncode == 0 and "no program may have it open" in done.stderr.decode()
    assert (out / "model.bin").read_bytes() == (story / "model.bin").read_bytes()


def test_an_export_may_be_given_a_longer_context_later(tmp_path: Path) -> None:
    for name, context in (("short", 100), ("long", 300)):
        options = ["--context", context, "--workers", 1, "--dtype", "int8"]
        assert command("export", "-m", CHECKPOINT, "-o", tmp_path / name, *options).returncode == 0
    assert result("set", tmp_path / "short")["context_at_most"] == 400
    assert command("set", tmp_path / "short", "--context", 300).returncode == 0
    short, long = (colibri.load(tmp_path / name) for name in ("short", "long"))
    ids = np.random.default_rng(0).integers(0, 2048, (300, 1))
    assert short(ids).tobytes() == long(ids).tobytes() and short.context_bytes == long.context_bytes


# --- the same in C ---


@pytest.fixture(scope="module")
def chat_in_c(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("chat")
    flags = "-O2 -Wall -Wextra -Werror"
    done = subprocess.run(["make", "-s", "-C", ROOT / "examples/chat", f"BUILD={build}", f"CFLAGS={flags}"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return build / "chat"


def in_c(program: Path, *args: object, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([program, *map(str, args)], input=given, capture_output=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("Once upon a time", []),
        ("Naïve 🐦 – 中文", ["--temperature=1.2", "--seed=7", "--top-k=50"]),
        ("The king", ["--temperature=0.9", "--top-p=0.9", "--min-p=0.02", "--repetition-penalty=1.2", "--seed=99"]),
        ("a", ["--temperature=3", "--seed=1", "--max-new-tokens=600", "--raw"]),
        ("x", ["--max-new-tokens=0"]),
    ],
)
def test_c_writes_the_same_bytes(story: Path, chat_in_c: Path, prompt: str, options: list[str]) -> None:
    apart = [part for option in options for part in option.split("=")]
    want, found = command("generate", story, prompt, *options), in_c(chat_in_c, *apart, story, prompt)
    assert want.returncode == found.returncode == 0, found.stderr
    assert found.stdout == want.stdout
    assert (b"context of 512 tokens is full" in found.stderr) == (b"context of 512 tokens is full" in want.stderr)
    assert b"new tokens" in found.stderr


def test_c_ends_where_the_model_says(story: Path, chat_in_c: Path, tmp_path: Path) -> None:
    from colibri.text.tokenizer import Tokenizer

    ends = tmp_path / "model"
    shutil.copytree(story, ends)
    (ends / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(200, 1000))}))
    (ends / "tokenizer.bin").write_bytes(Tokenizer(ends).write_c())
    options = ("--temperature", "1.5", "--seed", "3")
    assert in_c(chat_in_c, *options, ends, "One").stdout == command("generate", ends, "One", *options).stdout


def test_c_reads_prompts_from_its_input(story: Path, chat_in_c: Path) -> None:
    one, two = (in_c(chat_in_c, "-n", 5, story, p).stdout for p in ("Once", "upon a"))
    assert in_c(chat_in_c, "-n", 5, story, "-", given=b"Once\n").stdout == one
    done = in_c(chat_in_c, "-n", 5, story, given=b"Once\n\nupon a")
    assert done.returncode == 0 and done.stdout == one + two


def test_c_says_what_is_wrong(story: Path, chat_in_c: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for message, code, *args in (
        ("which export?", 2),
        ("no option --warp", 2, "--warp", story),
        ("--top-p takes a number", 2, "--top-p", "2", story, "x"),
        ("more than one prompt", 2, story, "x", "y"),
        ("cannot be opened or read", 1, bad, "x"),
        ("the prompt is empty", 1, story, ""),
        ("but the context holds 512: shorten it", 1, story, "word " * 2000),
    ):
        done = in_c(chat_in_c, *args)
        assert done.returncode == code and message in done.stderr.decode() and done.stdout == b"", message
    (bad / "model.bin").write_bytes(b"COLIBRI\0" + bytes(1000))
    assert "model.bin: " in in_c(chat_in_c, bad, "x").stderr.decode()
    shutil.copy(story / "model.bin", bad)
    assert "tokenizer.bin cannot be read" in in_c(chat_in_c, bad, "x").stderr.decode()
    (bad / "tokenizer.bin").write_bytes(b"x" * 500)
    done = in_c(chat_in_c, bad, "x")
    assert done.returncode == 1 and "not a tokenizer.bin" in done.stderr.decode()


def test_ctrl_c_ends_the_answer_in_c(endless: Path, chat_in_c: Path) -> None:
    process = start(chat_in_c, "-n", 49_000, endless, "Once")
    _, said = interrupted(process)
    assert process.returncode == 130 and "new tokens at" in said.decode()


def test_there_is_no_traceback_where_the_reader_goes_away(endless: Path) -> None:
    process = start(*PYTHON, "generate", endless, "Once", "-n", 2000)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    said = process.stderr.read().decode()
    assert process.wait(60) != 0 and "Traceback" not in said
