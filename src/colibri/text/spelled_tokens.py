"""Special tokens in the words of a conversation: they stay text, also in the output of a chat template.

Before a template runs, control tokens in messages are put between two marks. After it, one without marks is the
template's own. Those get brackets, the marks go, and a copy of the tokenizer that knows the control tokens with
brackets only encodes the whole text at once, so that nothing else about it changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from colibri.errors import ModelError

# Code points that stand for no character, for ever.
_NONCHARACTERS = [*map(chr, range(0xFDD0, 0xFDF0))]


def _strings(x: Any) -> Iterator[str]:
    if isinstance(x, str):
        yield x
    elif isinstance(x, Mapping):
        for key, value in x.items():
            yield from (*_strings(key), *_strings(value))
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from _strings(item)


class Spelled:
    """The control tokens of one template, and how they are told from those that messages spell.

    Control tokens are the special ones and, but in what an assistant said, those that the template itself writes:
    some checkpoints do not call `<｜User｜>` special.
    """

    def __init__(self, library: Any, template: str, said: Any) -> None:
        self._library = library
        added = [token for token in library.get_added_tokens_decoder().values() if token.content]
        self._special = [t.content for t in added if t.special]
        self._control = [t for t in added if t.special or (t.content in template and not t.content.isspace())]
        taken = set("".join(_strings(said))) | set(template) | set("".join(t.content for t in added))
        free = [c for c in _NONCHARACTERS if c not in taken]
        if len(free) < 3:
            raise ModelError("the messages hold nearly all of U+FDD0 to U+FDEF, which are no characters: take them out")
        self._begin, self._end, self._bracket = free[:3]

    def marked(self, x: Any, assistant: bool = False) -> Any:
        """Messages, or anything else a template is given, with marks around the control tokens they spell."""
        if isinstance(x, str):
            names = self._special if assistant else [token.content for token in self._control]
            return re.sub(_any_of(names), rf"{self._begin}\g<0>{self._end}", x)
        if isinstance(x, Mapping):
            said = assistant or x.get("role") == "assistant"
            return {self.marked(key, said): self.marked(value, said) for key, value in x.items()}
        if isinstance(x, (list, tuple)):
            return [self.marked(item, assistant) for item in x]
        return x

    def encode(self, text: str) -> list[int]:
        """The ids of a text that a template made of what was marked."""
        token = _any_of([token.content for token in self._control])

        def replaced(found: re.Match[str]) -> str:
            own = found["own"]
            return found[0] if own is None else self._bracket + own + self._bracket

        text = re.sub(f"{self._begin}(?:{token}){self._end}|(?P<own>{token})", replaced, text)
        ids: list[int] = []
        copy = self._copy()
        control = {token.content for token in self._control}
        for i in copy.encode(re.sub(f"[{self._begin}{self._end}]", "", text), add_special_tokens=False).ids:
            name = copy.id_to_token(i)
            if name in control:
                raise ModelError(f"a message spells {name!r}, which this tokenizer reads as the token even as text: "
                                 "take it out")  # fmt: skip
            ids.append(self._library.token_to_id(name.strip(self._bracket)))
        return ids

    def _copy(self) -> Any:
        """The tokenizer with control tokens in brackets only. Its ids are its own."""
        from tokenizers import AddedToken, Tokenizer

        spec = json.loads(self._library.to_str())
        control = {token.content for token in self._control}
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in control]
        copy = Tokenizer.from_str(json.dumps(spec))
        copy.add_tokens(
            [
                AddedToken(self._bracket + t.content + self._bracket, lstrip=t.lstrip, rstrip=t.rstrip,
                           single_word=t.single_word, normalized=t.normalized, special=t.special)
                for t in self._control
            ]
        )  # fmt: skip
        return copy


def _any_of(names: Sequence[str]) -> str:
    """A pattern for any of these texts, the longest first; for none, one that never matches."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
