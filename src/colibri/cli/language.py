"""The commands for language models: colibri generate | chat | eval | set."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from colibri.cli.terminal import Debug, Json, ModelPath, err, errors, plain, show
from colibri.common.names import printable
from colibri.errors import ColibriError, ModelError
from colibri.format.package import open_package
from colibri.pipeline.context_length import longest_context, set_context
from colibri.report.evaluate import Evaluation, evaluate
from colibri.runtime.engine import KERNELS
from colibri.runtime.language import LanguageModel, load
from colibri.text.answers import Answering

INTERRUPTED = 130  # the exit code of a command that Ctrl-C ended
_LAYERS = 64  # of more, the numbers of experts used are summed up

Most = Annotated[int, typer.Option("--max-new-tokens", "-n", min=0, help="Largest number of tokens of an answer.")]
Temperature = Annotated[float, typer.Option(help="0: always the likeliest token; 1: the model's own probabilities.")]
TopK = Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens with this total probability.")]
MinP = Annotated[
    float, typer.Option(help="Draw from tokens with at least this share of the likeliest one's probability.")
]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="Above 1: tokens seen before are less likely.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same tokens, on every machine.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads; 0: one per processor. The bits are the same.")]
Special = Annotated[
    bool,
    typer.Option("--special/--no-special", help="Read special tokens spelled in the text as tokens, or as plain text."),
]
Kernels = Annotated[str | None, typer.Option(help=f"Instruction set: {', '.join(KERNELS)}. The bits are the same.")]


def _open(path: Path, threads: int, kernels: str | None) -> LanguageModel:
    model = load(path, kernels=kernels, threads=threads)
    if not isinstance(model, LanguageModel):
        raise ModelError(f"{path} is no language model: it maps rows of numbers; use `colibri run`")
    return model


# --- generate ---------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What came of one prompt. `finish` is end (of the text, said the model), length, context or interrupted."""

    prompt_tokens: int
    evaluated: int = 0  # of the prompt: the rest was there already
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = "length"
    prompt_seconds: float = 0.0
    first_seconds: float | None = None
    decoded: int = 0  # tokens drawn after the first
    decode_seconds: float = 0.0

    @property
    def prompt_rate(self) -> float | None:
        return self.evaluated / self.prompt_seconds if self.prompt_seconds else None

    @property
    def rate(self) -> float | None:
        return self.decoded / self.decode_seconds if self.decode_seconds else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text, "finish": self.finish, "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_evaluated": self.evaluated, "tokens": len(self.tokens),
            "prompt_tokens_per_second": _rounded(self.prompt_rate), "tokens_per_second": _rounded(self.rate),
            "seconds_to_first_token": _rounded(self.first_seconds, 6),
        }  # fmt: skip

    def __str__(self) -> str:
        parts = [f"{self.evaluated:,} prompt tokens" + _at(self.prompt_rate)]
        if self.evaluated < self.prompt_tokens and self.prompt_seconds:
            parts[0] += f" ({self.prompt_tokens - self.evaluated:,} more were there already)"
        parts.append(f"{len(self.tokens):,} new tokens" + _at(self.rate))
        if self.first_seconds is not None:
            parts.append(f"the first after {self.first_seconds:.3f} s")
        return ", ".join(parts)


def _rounded(value: float | None, places: int = 2) -> float | None:
    return None if value is None else round(value, places)


def _at(rate: float | None) -> str:
    return "" if rate is None else f" at {rate:,.1f}/s"


Say = Callable[[int | None], str]  # shows what a token adds, or what is left at the end; gives what counts as text


def _answer(lm: LanguageModel, ids: Sequence[int], say: Say, most: int, sampling: dict[str, Any]) -> Answer:
    """Generate until the model ends the text, `most` tokens are there, the context is full, or Ctrl-C."""
    answer, ends = Answer(len(ids)), set(lm.tokenizer.eos)
    start = time.perf_counter()

    def prompt_is_done(evaluated: int) -> None:
        answer.evaluated, answer.prompt_seconds = evaluated, time.perf_counter() - start

    try:
        for token in lm.stream(ids, most, on_prompt=prompt_is_done, **sampling):
            passed = time.perf_counter() - start
            if answer.first_seconds is None:
                answer.first_seconds = passed
            else:
                answer.decoded, answer.decode_seconds = answer.decoded + 1, passed - answer.first_seconds
            if token in ends:
                answer.finish = "end"
                break
            answer.tokens.append(token)
            answer.text += say(token)
        else:
            answer.finish = "context" if len(answer.tokens) < most else "length"
        answer.text += say(None)
    except KeyboardInterrupt:
        answer.finish = "interrupted"
    return answer


def _as_it_comes(lm: LanguageModel, write: Callable[[str], None]) -> Say:
    stream = lm.tokenizer.stream()

    def say(token: int | None) -> str:
        text = stream.end() if token is None else stream.push(token)
        write(text)
        return text

    return say


def _write(text: str) -> None:
    if sys.stdout.isatty():
        text = "".join(c if c in "\n\t" else printable(c) for c in text)  # a terminal obeys what a token may spell
    sys.stdout.buffer.write(text.encode())  # UTF-8, whatever the locale says
    sys.stdout.buffer.flush()


def _note(text: str) -> None:
    err.print(plain(text), style="dim", highlight=False, soft_wrap=True)


def _bytes_of(prompt: str) -> bytes:
    """The prompt as it was given; `-` stands for the standard input, without the end of its last line."""
    if prompt == "-":
        return sys.stdin.buffer.read().removesuffix(b"\n")
    return prompt.encode(errors="surrogateescape")


def _prompt_ids(lm: LanguageModel, prompt: bytes, raw: bool, special: bool) -> list[int]:
    ids = lm.tokenizer.encode(prompt, special=not raw, parse=special)
    if ids:
        return ids
    if raw or lm.tokenizer.bos is None:
        why = "with --raw nothing is put before it" if raw else "the model has no token that begins a text"
        raise ModelError(f"the prompt is empty, and {why}: give it some text to go on from")
    return [lm.tokenizer.bos]


@dataclass(frozen=True)
class _LayerUse:
    layer: int
    experts: int
    used: int
    busiest: int  # its number in the original model
    share: float  # of the layer's tokens that chose the busiest


def _uses(lm: LanguageModel, counts: list[Any]) -> Iterator[_LayerUse]:
    for n, of in enumerate(counts):
        total, top = int(of.sum()), int(of.argmax())
        tokens = total / int(lm.package.layers[n]["k"])
        share = int(of[top]) / tokens if total else 0.0
        yield _LayerUse(n, len(of), int((of > 0).sum()), int(lm.package.numbers(n)[top]), round(share, 4))


def _describe(uses: Sequence[_LayerUse]) -> str:
    most = max(uses, key=lambda u: u.share)
    used, sizes = [u.used for u in uses], {u.experts for u in uses}
    shown = " ".join(map(str, used)) if len(uses) <= _LAYERS else f"{min(used)} to {max(used)}"
    return (f"experts used in each layer: {shown} of {'/'.join(map(str, sorted(sizes)))}; the busiest: expert "
            f"{most.busiest} of layer {most.layer}, chosen by {most.share:.0%} of the tokens")  # fmt: skip


def generate(
    model: ModelPath,
    prompt: Annotated[str, typer.Argument(help="The text to continue; -: standard input.")],
    max_new_tokens: Most = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    threads: Threads = 0,
    kernels: Kernels = None,
    raw: Annotated[bool, typer.Option("--raw", help="Only the prompt's tokens: add none, such as BOS.")] = False,
    special: Special = True,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a text with a language model; the text is printed to stdout as it is generated, figures to stderr."""
    with errors(as_json, debug):
        lm = _open(model, threads, kernels)
        ids = _prompt_ids(lm, _bytes_of(prompt), raw, special)
        counts = lm.count_experts()
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
                    "repetition_penalty": repetition_penalty, "seed": seed}  # fmt: skip
        say = _as_it_comes(lm, (lambda text: None) if as_json else _write)
        answer = _answer(lm, ids, say, max_new_tokens, sampling)
        uses = list(_uses(lm, counts))
        if as_json:
            print(json.dumps(answer.to_dict() | {"experts": [vars(u) for u in uses]}, indent=1))
        else:
            _write("\n")
            if answer.finish == "context":
                _note(f"the context of {lm.context:,} tokens is full")
            _note(str(answer))
            if uses:
                _note(_describe(uses))
    if answer.finish == "interrupted":
        raise typer.Exit(INTERRUPTED)


# --- chat -------------------------------------------------------------------------------------------------------------


class _Conversation:
    """A conversation; the oldest messages are dropped when the context is too short for all."""

    def __init__(self, lm: LanguageModel, system: str | None, room: int) -> None:
        self.lm, self.system = lm, system
        self.room = min(room, lm.context // 4)  # tokens kept free for an answer
        self.messages: list[dict[str, str]] = []
        self.prompt = ""  # the text of the conversation, as the template has it

    def ids(self) -> list[int]:
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.prompt = self.lm.tokenizer.chat(head + self.messages)
        return self.lm.tokenizer.chat_ids(head + self.messages)

    def require_system(self) -> None:
        """Raises ModelError where the template takes messages, but no system message before them."""
        probe = [{"role": "user", "content": "a"}]
        try:
            self.lm.tokenizer.chat([{"role": "system", "content": self.system}, *probe])
        except ModelError as error:
            self.lm.tokenizer.chat(probe)
            raise ModelError(f"{error}: leave out --system, and say it in the first message") from None

    def ask(self, text: str) -> list[int]:
        """The tokens of the conversation with a new message at its end.

        Raises ModelError, and forgets the message, where it alone does not fit.
        """
        self.messages.append({"role": "user", "content": text})
        dropped = 0
        try:
            ids = self.ids()
            while len(ids) > self.lm.context - self.room and len(self.messages) > 1:
                del self.messages[:2]
                dropped += 1
                ids = self.ids()
            if len(ids) > self.lm.context:
                raise ModelError(f"this message has {len(ids):,} tokens with what the template puts around it, but the "
                                 f"context holds {self.lm.context:,}: shorten it")  # fmt: skip
        except ModelError:
            self.messages.pop()
            raise
        finally:
            if dropped:
                turns = "the oldest turn is" if dropped == 1 else f"the oldest {dropped} turns are"
                _note(f"the context of {self.lm.context:,} tokens is full: {turns} forgotten")
        return ids


def chat(
    model: ModelPath,
    system: Annotated[str | None, typer.Option(help="A system message, always kept in the context.")] = None,
    max_new_tokens: Most = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    threads: Threads = 0,
    kernels: Kernels = None,
    debug: Debug = False,
) -> None:
    """Talk to a language model that has a chat template. A line is a message; /reset forgets, /exit and Ctrl-D end.

    What the model thinks before it answers goes to stderr, and is not part of the conversation.
    """
    with errors(False, debug):
        lm = _open(model, threads, kernels)
        if not lm.tokenizer.templates:
            raise ModelError(f"{model} has no chat template: it may be a base model, which continues text; use "
                             "`colibri generate`, or put its card's template into chat_template.jinja")  # fmt: skip
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
                    "repetition_penalty": repetition_penalty, "seed": seed}  # fmt: skip
        talk = _Conversation(lm, system, max_new_tokens)
        if system is not None:
            talk.require_system()
        terminal, refused = sys.stdin.isatty(), False
        if terminal:
            import readline  # noqa: F401  # history and editing for input()

            _note("/reset forgets the conversation, Ctrl-C stops an answer, /exit or Ctrl-D ends")
        while (line := _line(terminal)) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                talk.messages.clear()
                _note("the conversation is forgotten")
            elif line:
                refused |= not _turn(talk, line, max_new_tokens, sampling)
    if refused and not terminal:
        raise typer.Exit(1)


def _turn(talk: _Conversation, line: str, most: int, sampling: dict[str, Any]) -> bool:
    """Answers a message; False where it cannot be asked."""
    try:
        ids = talk.ask(line)
    except ModelError as error:
        err.print(plain(str(error)), highlight=False, soft_wrap=True)
        return False
    answer = _answer(talk.lm, ids, _thinking_apart(talk.lm, talk.prompt), most, sampling)
    _write("\n")
    if not answer.text and answer.finish == "length":
        _note(f"no answer within {most:,} tokens: pass a larger --max-new-tokens")
    talk.messages.append({"role": "assistant", "content": answer.text})
    if answer.finish == "context":
        _note(f"the context of {talk.lm.context:,} tokens is full; the next message lets the oldest turns go")
    _note(str(answer))
    return True


def _thinking_apart(lm: LanguageModel, prompt: str) -> Say:
    """Shows the answer on stdout, and what the model thinks before it on stderr."""
    parts, thinking = Answering(lm.tokenizer, prompt), False

    def say(token: int | None) -> str:
        nonlocal thinking
        text = ""
        for said in parts.end() if token is None else parts.push(token):
            if said.thinking != thinking:
                err.print("" if thinking else "thinking: ", style="dim", end="\n" if thinking else "")
                thinking = said.thinking
            if thinking:
                err.print(plain(said.text), style="dim", end="", highlight=False, soft_wrap=True)
            else:
                _write(said.text)
                text += said.text
        if token is None and thinking:
            err.print()
        return text

    return say


def _line(terminal: bool) -> str | None:
    """The next line without the spaces around it, None at the end; on a terminal Ctrl-C only gives up the line."""
    if not terminal:
        found = sys.stdin.buffer.readline()
        return found.decode(errors="replace").strip() if found else None
    while True:
        try:
            return input("> ").strip()
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return None


# --- eval -------------------------------------------------------------------------------------------------------------


def eval_command(
    model: ModelPath,
    text: Annotated[Path, typer.Option(help="The text to predict, UTF-8.")],
    against: Annotated[
        Path | None, typer.Option(help="Another export, the reference; show how MODEL's predictions differ from it.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Number of tokens to predict; default: all.")] = None,
    special: Special = True,
    threads: Threads = 0,
    kernels: Kernels = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how well a language model predicts a text, and how it differs from another export of the model."""
    with errors(as_json, debug):
        lm = _open(model, threads, kernels)
        other = None if against is None else _open(against, threads, kernels)
        try:
            content = text.read_bytes()
        except OSError as error:
            raise ColibriError(f"{text} cannot be read: {error.strerror}: pass a text file") from None
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=err, transient=True, disable=as_json or not err.is_terminal) as bar:
            task = bar.add_task("tokens", total=None)

            def progress(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            try:
                found = evaluate(lm, content, tokens, other, progress, special)
            except KeyboardInterrupt:
                raise KeyboardInterrupt("interrupted: use --tokens for a part of the text") from None
        if as_json:
            print(json.dumps(found.to_dict(), indent=1))
            return
        _print_evaluation(found)


def _print_evaluation(found: Evaluation) -> None:
    figures: dict[str, Any] = {
        "tokens predicted": found.tokens, "of bytes": found.bytes,
        "windows": f"{found.windows} of {found.context} tokens",
        "perplexity of a token": f"{found.perplexity:.4f}", "of a byte": f"{found.byte_perplexity:.4f}",
        "bits a byte": f"{found.bits_per_byte:.4f}",
    }  # fmt: skip
    if found.against is not None:
        a = found.against
        figures |= {
            "the reference: perplexity of a token": f"{a.perplexity:.4f}", "its bits a byte": f"{a.bits_per_byte:.4f}",
            "KL divergence, mean": f"{a.kl_mean:.3e}", "99th percentile": f"{a.kl_p99:.3e}",
            "same likeliest token": f"{a.agreement:.2%}",
        }  # fmt: skip
        if a.flips is not None:
            figures["tokens routed otherwise, by layer"] = " ".join(f"{share:.2%}" for share in a.flips)
    show(figures, False)


# --- set --------------------------------------------------------------------------------------------------------------


def set_command(
    model: ModelPath,
    context: Annotated[
        int | None, typer.Option(min=1, help="The new context length, tokens; without it, show the present one.")
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Change the file instead of writing a new one: for models too large to copy."),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Change an exported language model's context length without exporting it again."""
    with errors(as_json, debug):
        if context is None:
            package = open_package(model)
            show({"context": int(package.header["context_tokens"]), "context_at_most": longest_context(package),
                  "context_bytes": int(package.header["context_bytes"])}, as_json)  # fmt: skip
            return
        if in_place:
            _note("changing the file in place: no program may have it open, and an interruption leaves it broken")
        changed = set_context(model, context, in_place)
        show({"path": str(changed.path), "context": context, "context_bytes": changed.context_bytes,
              "context_bytes_before": changed.context_bytes_before}, as_json)  # fmt: skip
        if changed.removed:
            _note(f"{', '.join(changed.removed)} held the old context and is gone: export again for firmware")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(generate)
    app.command()(chat)
    app.command("eval")(eval_command)
    app.command("set")(set_command)


__all__ = ["register"]
