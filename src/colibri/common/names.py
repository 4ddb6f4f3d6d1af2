"""Names and texts from files: which are valid, and how others are displayed.

A terminal obeys escape sequences, an archive's entry may say `../..`: so what a file calls its tensors and its inputs
is checked where it is read, and what is shown of a file is shown with all else escaped.
"""

from __future__ import annotations

from collections.abc import Sequence

from colibri.errors import ColibriError, ExportError

NAME = 512  # characters of a tensor's or file's name
_SHOWN = 120  # characters of a value in a message
_SAID = 400  # of another library's message


def printable(text: str) -> str:
    """The text, with an escape in place of every character that is not shown as itself."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: object) -> str:
    """A value in a message: how Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def brief(said: object) -> str:
    """What another library says, as it may be shown: printable, and cut where it repeats a file."""
    text = printable(str(said))
    return text if len(text) <= _SAID else f"{text[: _SAID - 1]}…"


def check_name(name: object, what: str, error: type[ColibriError] = ExportError) -> str:
    """A name of something in a file; raises `error` where it is empty, too long, or not printable."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME or not name.isprintable():
        raise error(f"{what} is called {shown(name)}: a name is a printable text of 1 to {NAME} characters")
    return name


def check_port(name: object, what: str, error: type[ColibriError] = ExportError) -> str:
    """A name of an input or output, by which an archive of arrays (.npz) has it; raises `error` like `check_name`."""
    found = check_name(name, what, error)
    if found.strip(". ") != found or {*found} & {*"/\\:"}:
        raise error(f"{what} is called {shown(name)}, which an archive of arrays takes for a path: rename it")
    return found


def port_names(names: Sequence[str], room: int) -> list[bytes]:
    """Names cut to at most `room` bytes of UTF-8 and kept distinct, even if they share a long prefix."""
    found: list[bytes] = []
    for name in names:
        short, n = _cut(name, room), 1
        while short in found:
            n += 1
            end = f"~{n}"
            short = _cut(name, room - len(end)) + end.encode()
        found.append(short)
    return found


def _cut(name: str, room: int) -> bytes:
    return name.encode()[:room].decode("utf-8", "ignore").rstrip(". ").encode()


__all__ = ["NAME", "brief", "check_name", "check_port", "port_names", "printable", "shown"]
