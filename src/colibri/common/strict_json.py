"""Strict reader of JSON files from elsewhere: extensions that Python's own reader accepts are refused.

So are repeated names, numbers that are not finite, half surrogate pairs, and what is nested deeper than anything
meant: Python's functions on nested values recurse.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from colibri.common.names import shown

DEPTH = 64  # objects and lists inside one another
_DIGITS = 64  # of a whole number; tokenizers are released with lengths of 31
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """What is wrong with a text, to be put behind the name of its file."""


def loads(data: bytes) -> Any:
    """The value of a JSON text in UTF-8; raises JsonError for all but the strict standard."""
    try:
        found = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except JsonError:
        raise
    except RecursionError:
        raise JsonError(f"is nested more than {DEPTH} deep") from None
    except ValueError as error:
        raise JsonError(f"is not JSON ({error})") from None
    _check(found, bool(_SURROGATE.search(data)))
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise JsonError(f"says {shown(twice)} twice")
    return found


def _constant(text: str) -> NoReturn:
    raise JsonError(f"has the number {text}, which is not finite")


def _float(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise JsonError(f"has the number {shown(text)}, which is too large")
    return found


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        raise JsonError(f"has a whole number of {len(text)} digits")
    return int(text)


def _check(found: Any, surrogates: bool) -> None:
    """Depth, and that every text is one that UTF-8 can write; level by level, not by recursion."""
    level = [found]
    for _ in range(DEPTH):
        if surrogates and any(_broken(value) for value in level):
            raise JsonError("has a text with half of a surrogate pair")
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += [*value, *value.values()] if surrogates else value.values()
            elif isinstance(value, list):
                inner += value
        kinds = (dict, list, str) if surrogates else (dict, list)
        level = [value for value in inner if isinstance(value, kinds)]
        if not level:
            return
    raise JsonError(f"is nested more than {DEPTH} deep")


def _broken(value: Any) -> bool:
    return isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value)


__all__ = ["DEPTH", "JsonError", "loads"]
