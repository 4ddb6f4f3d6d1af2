"""C12: whatever stands in the JSON of a checkpoint's or an export's folder, a command ends well or says why not."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import colibri
from colibri.cli.app import app
from colibri.pipeline import language as language_export
from colibri.pipeline import stages
from tests.frontends.checkpoints import mutations
from tests.frontends.checkpoints.variants import VARIANTS, VOCABULARY, make

FAMILIES = {"mixtral": "yarn", "deepseek_v3": "groups", "gpt_oss": "", "switch_transformers": "",
            "hunyuan_v1_moe": "alpha",
            "llama4": "still layer", "phimoe": "longrope, short", "lfm2_moe": ""}  # fmt: skip
FAST, SLOW = 15, 1250  # mutations of each family
SECONDS, BYTES = 60, 3 << 30  # that one command may take, and memory beyond what is in use
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{{ bos_token }}"


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of as many tokens as the models have, and the files beside it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = " abcdefghijklmnopqrstuvwxyz.:ABCDEFGHIJKLM"
    tokenizer = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>", "<pad>")])
    names = [f"<{n}>" for n in range(VOCABULARY - tokenizer.get_vocab_size())]
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "<pad>"}
    for name, content in {
        "tokenizer_config.json": {**special, "add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast",
                                  "model_max_length": 10**30, "extra_special_tokens": {},
                                  "added_tokens_decoder": {"42": {"content": "<s>", "special": True}}},
        "special_tokens_map.json": special, "generation_config.json": {"bos_token_id": 42, "eos_token_id": [43, 44]},
        "chat_template.json": {"chat_template": TEMPLATE},
    }.items():  # fmt: skip
        (directory / name).write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    return prepared(request.param, tmp_path_factory.mktemp(request.param))


def prepared(family: str, work: Path) -> tuple[str, Path, Path]:
    """A family, its checkpoint in several files with an index, and its export."""
    source, export = work / "source", work / "export"
    source.mkdir()
    model = make(family, source, VARIANTS[family][FAMILIES[family]])
    (source / "model.safetensors").unlink()
    model.module.save_pretrained(source, max_shard_size="30KB")
    write_tokenizer(source)
    done = command("export", "-m", source, "-o", export, "--dtype", "fp32", "--workers", "1")
    assert done.exit_code == 0, done.output
    return family, source, export


@contextmanager
def limits() -> Iterator[None]:
    """A hang ends in a TimeoutError, a memory bomb in a MemoryError."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, most = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, most)
        resource.setrlimit(resource.RLIMIT_AS, before)


def command(*args: object, given: str = "") -> Any:
    with limits():
        return CliRunner().invoke(app, [*map(str, args)], input=given)


def ends_well(*args: object, given: str = "") -> bool:
    """Whether a command succeeded; raises AssertionError where it ended otherwise than with an error of its own."""
    done = command(*args, given=given)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise AssertionError(f"{args[0]}: {done.exception!r}") from done.exception
    text = done.output
    assert done.exit_code in (0, 1), (args, text)
    assert "\x1b" not in text or args[0] in ("generate", "chat"), (args, text)  # there the model's tokens are shown
    assert "more memory than there is" not in text, text
    assert "Traceback" not in text and len(text) < 20_000, text[:2000]
    if done.exit_code:
        assert "error: " in text or args[0] == "chat", text[:2000]  # which says what each line came to
    return bool(done.exit_code == 0)


def use(export: Path, family: str, rng: random.Random) -> None:
    """What is done with an export whose text files may be anything."""
    reads = family == "switch_transformers"
    match rng.randrange(4):
        case 0:
            ends_well("generate", export, "ab cd", "-n", "4", "--threads", "1")
        case 1:
            ends_well("chat", export, "-n", "3", "--threads", "1", given="abc\n")
        case 2 if not reads:
            text = export.parent / "text.txt"
            text.write_text("a b c d e f g " * 4)
            ends_well("eval", export, "--text", text)
        case _:
            ends_well("set", export)
            ends_well("inspect", export)


def mutate_source(source: Path, rng: random.Random) -> Path:
    """Change one file, config.json half of the time; its path."""
    names = sorted(p.name for p in source.iterdir() if p.name != "config.json")
    path = source / ("config.json" if rng.random() < 0.5 else rng.choice(names))
    data = path.read_bytes()
    how = {".safetensors": mutations.header, ".jinja": mutations.template}.get(path.suffix, mutations.mutated)
    path.write_bytes(how(data, rng))
    return path


@contextmanager
def cheap() -> Iterator[None]:
    """Exports with a short text for the certificate, by the engine alone, and without C source: what these cost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "ROWS", 16)
        patch.setattr(language_export, "_REFERENCE_BYTES", 0)
        patch.setattr(language_export, "_GENERATED_BYTES", 0)
        yield


class Bench:
    """Copies of a family's checkpoint and export, of which one file at a time is mutated."""

    def __init__(self, base: tuple[str, Path, Path], work: Path) -> None:
        self.family, self.source, self.export = base
        self.here, self.out, self.used = work / "source", work / "out", work / "used"
        shutil.copytree(self.source, self.here)
        shutil.copytree(self.export, self.used)

    def one(self, n: int) -> bool:
        """Run mutation `n`; whether a mutated checkpoint was exported."""
        rng = random.Random(f"{self.family} {n}")
        mutate = self.of_source if rng.random() < 0.8 else self.of_export
        with cheap():
            return mutate(rng)

    def of_source(self, rng: random.Random) -> bool:
        path = mutate_source(self.here, rng)
        try:
            if not ends_well("export", "-m", self.here, "-o", self.out, "--dtype", "fp32", "--workers", "1"):
                return False
            assert ends_well("verify", self.out) and ends_well("inspect", self.out)
            if self.family != "switch_transformers":
                lm = colibri.load(self.out)
                assert np.isfinite(lm.logits([1, 2, 3][: lm.context])).all()  # a mutation may shorten the context
            if path.name != "config.json":
                use(self.out, self.family, rng)
            return True
        finally:
            shutil.rmtree(self.out, ignore_errors=True)
            shutil.copyfile(self.source / path.name, path)

    def of_export(self, rng: random.Random) -> bool:
        path = self.used / rng.choice(sorted(p.name for p in self.used.iterdir() if p.suffix in (".json", ".jinja")))
        how = mutations.template if path.suffix == ".jinja" else mutations.mutated
        try:
            path.write_bytes(how(path.read_bytes(), rng))
            use(self.used, self.family, rng)
            return False
        finally:
            shutil.copyfile(self.export / path.name, path)


def run(base: tuple[str, Path, Path], work: Path, numbers: range) -> None:
    bench = Bench(base, work)
    succeeded = 0
    for n in numbers:
        try:
            succeeded += bench.one(n)
        except BaseException as error:
            raise AssertionError(f"{bench.family}, mutation {n}: {error}") from error
    assert succeeded


def test_a_mutated_folder_is_refused_by_name_or_gives_finite_logits(
    base: tuple[str, Path, Path], tmp_path: Path
) -> None:
    """C12: no traceback, no recursion, no hang, no memory bomb, from any command."""
    run(base, tmp_path, range(FAST))


@pytest.mark.slow
def test_ten_thousand_mutated_folders(base: tuple[str, Path, Path], tmp_path: Path) -> None:
    run(base, tmp_path, range(SLOW))
