"""Tokens that a checkpoint declares beside tokenizer.json, and the special ones' names, as in transformers 5.24.

tokenizer_config.json, special_tokens_map.json and added_tokens.json may each name tokens that tokenizer.json does not
have, or has with other options. AutoTokenizer adds them in a certain order, which decides their ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colibri.common.names import shown
from colibri.errors import ModelError

STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OPTIONS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"


@dataclass(frozen=True)
class Declared:
    """Special tokens by name, such as `bos_token`, and what to add to the library's tokenizer, in this order."""

    named: dict[str, str]
    added: list[Any]  # tokenizers.AddedToken


def _token(value: Any, where: str, **options: bool) -> Any:
    """The library's AddedToken for an object in JSON; a text stays one."""
    from tokenizers import AddedToken

    content = value.get("content") if isinstance(value, dict) else value
    if isinstance(content, AddedToken):
        return content
    if not isinstance(content, str):
        raise ModelError(f"{where} is {shown(value)}, which is no token: give its text, or an object with `content`")
    if any(0xD800 <= ord(c) < 0xE000 for c in content):
        raise ModelError(f"{where}: the token {shown(content)} holds half of a surrogate pair: correct it")
    if not isinstance(value, dict):
        return content
    options = {name: value[name] for name in _OPTIONS if name in value} | options
    if not all(isinstance(option, bool) for option in options.values()):
        raise ModelError(f"{where}: an option of the token {shown(content)} is neither true nor false")
    return AddedToken(content, **options)


def _is_marked(value: Any) -> bool:
    """Whether an object of tokenizer_config.json says that it is a token, with all its options."""
    return isinstance(value, dict) and value.get("__type") == "AddedToken"


def _content(value: Any) -> str:
    return value if isinstance(value, str) else str(value.content)


class _Reader:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.values = dict(config)
        if not self.values.get(_EXTRA) and _OLD_EXTRA in self.values:
            self.values[_EXTRA] = self.values.pop(_OLD_EXTRA)
        # Names of the model's own, such as image_token.
        self.own = {name: self.values.pop(name) for name, value in config.items() if self._is_own(name, value)}
        self._take_named()
        self.by_id: dict[int, Any] = {}

    @staticmethod
    def _is_own(name: str, value: Any) -> bool:
        return name.endswith("_token") and name not in STANDARD and isinstance(value, str)

    def _take_named(self) -> None:
        if isinstance(self.values.get(_EXTRA), dict):
            self.own |= self.values.pop(_EXTRA)

    def read_decoder(self) -> None:
        listed = self.values["added_tokens_decoder"]
        if not isinstance(listed, dict):
            raise ModelError("added_tokens_decoder of tokenizer_config.json is no object of tokens by their ids")
        for i, value in listed.items():
            if not re.fullmatch("[0-9]{1,9}", i) or not isinstance(value, dict):
                raise ModelError(f"added_tokens_decoder of tokenizer_config.json: {shown(i)} is no id, or has no token")
            self.by_id[int(i)] = _token(value, f"added_tokens_decoder[{i}] of tokenizer_config.json")

    def read_older_files(self, special: Mapping[str, Any], added: Mapping[str, Any], own: Mapping[int, Any]) -> None:
        """special_tokens_map.json, added_tokens.json and tokenizer.json's own, where the configuration has no list."""
        from tokenizers import AddedToken

        for name, value in special.items():
            if name == _EXTRA and isinstance(value, list):
                known = self._listed()
                tokens = [_token(v, f"{name} of special_tokens_map.json", special=True) for v in value]
                value = known + [t for n, t in enumerate(tokens) if t not in known + tokens[:n]]
            elif isinstance(value, dict) and name != _EXTRA:
                value = _token(value, f"{name} of special_tokens_map.json", special=True)
            self.values[name] = value
        self._take_named()
        listed = [self.values.get(name) for name in STANDARD] + self._listed()
        specials = {_content(value) for value in listed if isinstance(value, (str, AddedToken))}
        for content, i in added.items():
            if not isinstance(i, int) or isinstance(i, bool) or i < 0:
                raise ModelError(f"added_tokens.json: the id of {shown(content)} is {shown(i)}")
            is_special = content in specials
            options = {"content": content, "normalized": not is_special, "special": is_special}
            self.by_id[i] = _token(options, "added_tokens.json")
        self.by_id |= own

    def named(self) -> dict[str, Any]:
        """Special tokens by name: texts, or tokens with options."""
        from tokenizers import AddedToken

        known = {_content(token): token for token in self.by_id.values()}
        found: dict[str, Any] = {}
        for name in STANDARD:
            if self.values.get(name) is not None:
                token = _token(self.values[name], name)
                found[name] = known.get(_content(token), token)
        for name, value in self.values.items():
            is_token = isinstance(value, (str, AddedToken)) or _is_marked(value)
            if name.endswith("_token") and name not in STANDARD and is_token:
                found[name] = _token(value, name)
        return found | {name: _token(value, name) for name, value in self.own.items()}

    def _listed(self, name: str = _EXTRA) -> list[Any]:
        found = self.values.get(name) or []
        if not isinstance(found, list):
            raise ModelError(f"{name} is {shown(found)}, neither a list of tokens nor an object of tokens by name")
        return found

    def extra(self) -> list[Any]:
        """Special tokens without a name."""
        name = _EXTRA if _EXTRA in self.values else _OLD_EXTRA
        return [_token(v, name) if _is_marked(v) else _token(v, name, special=True) for v in self._listed(name)]


def declared(
    config: Mapping[str, Any], special: Mapping[str, Any], added: Mapping[str, Any], own: Mapping[int, Any]
) -> Declared:
    """What tokenizer_config.json, special_tokens_map.json and added_tokens.json declare; `own` are tokenizer.json's.

    Raises ModelError where one of them is not of the form expected.
    """
    from tokenizers import AddedToken

    reader = _Reader(config)
    if "added_tokens_decoder" in config:
        reader.read_decoder()
    else:
        reader.read_older_files(special, added, own)
    named = reader.named()
    wanted = [token for _, token in sorted(reader.by_id.items())]
    known = {_content(token) for token in [*own.values(), *wanted]}
    for token in [*named.values(), *reader.extra()]:
        if _content(token) not in known and token not in wanted:
            wanted.append(token)
    names = {name: _content(token) for name, token in named.items()}
    tokens = [AddedToken(token, special=True) if isinstance(token, str) else token for token in wanted]
    for token in tokens:
        token.special = token.special or token.content in names.values()
    return Declared(names, tokens)
