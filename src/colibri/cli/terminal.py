"""Parts shared by all commands: the two consoles, options, one-line errors, and figures as text or JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from colibri.common.names import brief, printable
from colibri.errors import ColibriError

# With NO_COLOR (no-color.org) no control sequences at all: rich itself would keep bold and dim.
_colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
out, err = Console(color_system=_colors), Console(stderr=True, color_system=_colors)

UNEXPECTED = 70  # exit code of an unexpected error (EX_SOFTWARE of sysexits.h)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the Python traceback of an error.")]
ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="model.bin or the directory of an export.")]


@contextmanager
def errors(as_json: bool, debug: bool) -> Iterator[None]:
    """Turns the package's own errors into one line and exit code 1."""
    try:
        yield
    except (ColibriError, MemoryError) as error:
        if debug:
            raise
        said = str(error)
        if isinstance(error, MemoryError):
            said = (
                f"not enough memory ({said or 'allocation failed'}): ask for a shorter --context or "
                "a smaller --max-batch, or use a machine with more"
            )
        if as_json:
            print(json.dumps({"error": said, "kind": type(error).__name__, "code": getattr(error, "code", None)}))
        else:
            err.print(f"[bold red]error:[/] {plain(said)}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt as stopped:
        if not stopped.args:
            raise
        err.print(plain(str(stopped)), highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None


def guarded(command: Callable[[], object]) -> None:
    """Run a command: an unexpected error is one line too, and names --debug, which shows the traceback.

    Tests call the commands directly, so it hides nothing from them.
    """
    try:
        command()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if "--debug" in sys.argv:
            raise
        said = f"{type(error).__name__}: {brief(error)}"
        err.print(f"[bold red]error:[/] unexpected {plain(said)}: this is a fault of Colibri; please report it with "
                  "what --debug shows", highlight=False, soft_wrap=True)  # fmt: skip
        raise SystemExit(UNEXPECTED) from None


def plain(text: str) -> str:
    """Untrusted text made safe for a terminal: no markup, no escape sequences, line breaks kept."""
    return "\n".join(map(printable, text.split("\n"))).replace("[", r"\[")


def show(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values, indent=1))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            # Long lists are left to --json; equal rows are joined.
            rows = [", ".join(f"{k} {v}" for k, v in row.items() if not isinstance(v, list) or len(v) <= 8)
                    for row in value]  # fmt: skip
            first = 0
            for text, alike in groupby(rows):
                last = first + len(list(alike)) - 1
                table.add_row(f"{key} {first}" if first == last else f"{key} {first}…{last}", plain(text))
                first = last + 1
        else:
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
            table.add_row(key, plain(shown))
    out.print(table)
