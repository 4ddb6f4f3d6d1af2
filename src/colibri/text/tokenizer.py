"""Text to token ids and back in Python, chat templates, and the way to the C tokenizer.

A thin layer over the `tokenizers` library and Jinja, from the files of a Hugging Face checkpoint or an export. Nothing
is downloaded. `write_c` gives the same tokenizer as `tokenizer.bin` for `colibri_tokenizer.h`.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colibri.common.folder import TEXT_BYTES, TOKENIZER_BYTES, Folder
from colibri.common.names import brief
from colibri.errors import ExportError, ModelError
from colibri.text import chat_template, tokenizer_bin
from colibri.text.declared_tokens import declared
from colibri.text.spelled_tokens import Spelled
from colibri.text.tokenizer_bin import write_c

__all__ = ["FILES", "DecodeStream", "Tokenizer", "copy_files", "read_files", "write_all", "write_c"]

# What a tokenizer is made of; all but the first may be missing.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json", "config.json",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"
_MOST_IDS = 1 << 31


class Tokenizer:
    """The tokenizer of a checkpoint.

    bos: the id that begins a text, or None; eos: the ids that end one; size: ids are 0 to size - 1.
    """

    def __init__(self, directory: str | Path) -> None:
        """Load from a directory with a tokenizer.json; raises ModelError where it or a file beside it is malformed.

        Raises ExportError where the `tokenizers` library is not installed.
        """
        try:
            import tokenizers
        except ImportError:
            raise ExportError("the tokenizers library is missing: pip install 'colibri-moe[lm]'") from None
        self.directory = Path(directory)
        self._folder = Folder(directory, ModelError)
        path = self.directory / "tokenizer.json"
        if not self._folder.has("tokenizer.json"):
            raise ModelError(
                f"{self.directory} has no tokenizer.json: pass the directory of a checkpoint or an export; one with "
                "only a tokenizer.model is converted by transformers.AutoTokenizer(…).save_pretrained()"
            )
        try:
            self._library = tokenizers.Tokenizer.from_buffer(self._folder.read("tokenizer.json", TOKENIZER_BYTES))
        except ModelError:
            raise
        except Exception as error:  # the library raises bare exceptions
            raise ModelError(
                f"{path} is not a tokenizer the tokenizers library reads ({brief(error)}): copy it again"
            ) from None
        self._lock = threading.Lock()  # whether special tokens are parsed is a state of the library's object
        self._library.no_truncation()
        self._library.no_padding()
        self._config = self._read("tokenizer_config.json")
        own = self._library.get_added_tokens_decoder()
        found = declared(self._config, self._read("special_tokens_map.json"), self._read("added_tokens.json"), own)
        self._special_names = found.named
        if found.added:
            self._library.add_tokens(found.added)
        self.size: int = max(self._library.get_vocab().values(), default=-1) + 1
        generation, model = self._read("generation_config.json"), self._read("config.json")
        if isinstance(model.get("text_config"), dict):
            model = model["text_config"] | model
        # config.json may name a BOS that begins nothing, as Qwen's does; the tokenizer's own word counts more.
        bos = [*self._named("bos"), *self._listed("bos", generation), *self._listed("bos", model)]
        self.bos = None if "bos_token" in self._config and not self._named("bos") else next(iter(bos), None)
        eos = self._listed("eos", generation) or [*self._listed("eos", model), *self._named("eos")]
        self.eos = tuple(dict.fromkeys(eos))

    def _read(self, name: str) -> dict[str, Any]:
        return self._folder.json(name) if self._folder.has(name) else {}

    def _listed(self, name: str, config: dict[str, Any]) -> list[int]:
        """The ids that a model's configuration gives for `bos` or `eos`: none, one or several."""
        value = config.get(f"{name}_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ModelError(f"{self.directory}: {name}_token_id is {value!r}, neither an id nor a list of ids")
        return ids

    def _named(self, name: str) -> list[int]:
        """The id that the tokenizer's configuration gives for `bos` or `eos`."""
        token = self._special_names.get(f"{name}_token")
        found = None if token is None else self._library.token_to_id(token)
        return [] if found is None else [found]

    def __len__(self) -> int:
        return self.size

    # --- text and ids

    def encode(self, text: str | bytes, special: bool = True, parse: bool = False) -> list[int]:
        """The ids of a text.

        special: add what the model expects around a text, such as BOS (as its post-processor says)
        parse:   take special tokens where the text spells them; not for text of people you do not trust
        Bytes are read as UTF-8, with U+FFFD for what is not valid.
        """
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        try:
            with self._lock:
                self._library.encode_special_tokens = not parse
                ids: list[int] = self._library.encode(text, add_special_tokens=special).ids
        except (UnicodeEncodeError, TypeError):
            raise ModelError("the text holds half of a surrogate pair: encode it with errors='replace' first") from None
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 give U+FFFD, ids without a token nothing.

        A model may have logits of more ids than there are tokens. Raises ModelError where a number is no id at all.
        """
        numbers = [int(i) for i in ids]
        for i in numbers:
            if not 0 <= i < _MOST_IDS:
                raise ModelError(f"{i} is no id of a token: ids are whole numbers from 0 on")
        return str(self._library.decode(numbers, skip_special_tokens=skip_special))

    def stream(self, skip_special: bool = True) -> DecodeStream:
        """A decoder for ids that come one by one."""
        return DecodeStream(self, skip_special)

    def token(self, i: int) -> str:
        """The name of an id in the vocabulary."""
        found = self._library.id_to_token(i) if 0 <= i < self.size else None
        if found is None:
            raise ModelError(f"id {i} is not in the vocabulary of {self.size} tokens: pass an id of this tokenizer")
        return str(found)

    def id(self, token: str) -> int | None:
        """The id of a name in the vocabulary, such as `<|im_end|>`; None where there is none."""
        found: int | None = self._library.token_to_id(token)
        return found

    @property
    def special(self) -> dict[int, str]:
        """The special tokens, which are no text, by id."""
        return {i: str(t.content) for i, t in self._library.get_added_tokens_decoder().items() if t.special}

    # --- chat

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, by the model's chat template; for its ids see `chat_ids`.

        messages:  mappings with `role` and `content`
        template:  the name of one of several templates; by default `tool_use` where there are tools and such a
                   template, else `default`
        variables: what else the template may use (`tools`, `enable_thinking`, …)
        Raises ModelError where there is no template, it is malformed, or it does not accept these messages.
        """
        given = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt} | variables
        values = self._special_names | given
        wanted = self._template(template, values["tools"] is not None)
        try:
            return chat_template.render(wanted, messages, values)
        except ModelError as error:
            raise ModelError(f"{self.directory}: {error}") from None

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """The ids of a conversation. Special tokens are those that the template writes: what messages spell is text.

        Arguments and errors are those of `chat`.
        """
        given = [list(messages), variables]
        with self._lock:
            wanted = self._template(template, variables.get("tools") is not None)
            spelled = Spelled(self._library, wanted, given)
        said, others = spelled.marked(given)
        text = self.chat(said, add_generation_prompt, template=template, **others)
        if [said, others] == given:
            return self.encode(text, special=False, parse=True)
        return spelled.encode(text)

    @property
    def templates(self) -> dict[str, str]:
        """The chat templates by name; that of `chat`, unless told otherwise, is `default`."""
        templates: dict[str, str] = {}
        if self._folder.has("chat_template.jinja"):
            templates["default"] = self._folder.text("chat_template.jinja")
        more = self._folder.inner(_TEMPLATES)
        if more is not None:
            templates |= {name.removesuffix(".jinja"): more.text(name) for name in more.names(".jinja")}
        for config in (self._read("chat_template.json"), self._config):
            found = config.get("chat_template")
            if isinstance(found, str):
                templates.setdefault("default", found)
            elif isinstance(found, dict):
                templates = {str(k): str(v) for k, v in found.items()} | templates
            elif isinstance(found, list):
                templates = {
                    str(t.get("name")): str(t.get("template")) for t in found if isinstance(t, dict)
                } | templates
        return templates

    def _template(self, name: str | None, tools: bool) -> str:
        templates = self.templates
        if not templates:
            raise ModelError(
                f"{self.directory} has no chat template: it may be a base model, which continues text; if not, "
                "put the template of its model card into chat_template.jinja"
            )
        for_tools = name is None and tools and "tool_use" in templates
        wanted = "tool_use" if for_tools else "default" if name is None else name
        if wanted not in templates:
            raise ModelError(
                f"{self.directory} has no chat template {wanted!r}: pass template= one of {sorted(templates)}"
            )
        return templates[wanted]

    # --- files

    def save(self, directory: str | Path) -> None:
        """Copy the tokenizer's files, so that an export can be used without the checkpoint."""
        copy_files(self.directory, directory)

    def write_c(self) -> bytes:
        """The bytes of tokenizer.bin, BOS and EOS included; raises ExportError where C would not give the same ids."""
        return tokenizer_bin.write_c(self._library.to_str().encode(), bos=self.bos, eos=self.eos)


def read_files(source: str | Path) -> dict[Path, bytes]:
    """The files of a tokenizer, by their places in its directory.

    Raises ModelError for one that is not the directory's own, such as a link to elsewhere (see `Folder`).
    """
    folder = Folder(source, ModelError)
    files = {Path(name): folder.read(name, TOKENIZER_BYTES) for name in FILES if folder.has(name)}
    more = folder.inner(_TEMPLATES)
    if more is not None:
        files |= {Path(_TEMPLATES) / name: more.read(name, TEXT_BYTES) for name in more.names(".jinja")}
    return files


def write_all(files: Mapping[Path, bytes], target: str | Path) -> None:
    """Write what `read_files` gave to another directory, where what an earlier tokenizer left is taken away."""
    target = Path(target)
    for name in FILES:
        (target / name).unlink(missing_ok=True)
    more = target / _TEMPLATES
    if more.is_symlink():
        more.unlink()
    shutil.rmtree(more, ignore_errors=True)
    for place, data in files.items():
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        with (target / place).open("xb") as file:  # not through a link that is there already
            file.write(data)


def copy_files(source: str | Path, target: str | Path) -> None:
    """Copy the files of a tokenizer from one directory to another; raises ModelError like `read_files`."""
    files = read_files(source)
    Path(target).mkdir(parents=True, exist_ok=True)
    if Path(source).resolve() != Path(target).resolve():
        write_all(files, target)


class DecodeStream:
    """Decodes ids that come one by one into whole characters: `text += stream.push(id)`, and at last `stream.end()`.

    All together it gives what `Tokenizer.decode` gives for all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        # Ids that have been given out stay until the next are, because decoding depends on what comes before.
        self._ids: list[int] = []
        self._given = 0

    def push(self, i: int) -> str:
        """The text that is final after `i`; empty inside a character."""
        self._ids.append(i)
        text = self._new()
        if not text or text.endswith("\ufffd"):
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return text

    def end(self) -> str:
        """What is left: U+FFFD for a character that never was completed."""
        text = self._new()
        self._ids, self._given = [], 0
        return text

    def _new(self) -> str:
        decode = self._tokenizer.decode
        return decode(self._ids, self._skip_special)[len(decode(self._ids[: self._given], self._skip_special)) :]
