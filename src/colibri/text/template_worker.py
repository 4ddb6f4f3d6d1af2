"""Renderer of chat templates in a separate process: a template is untrusted code.

`chat_template` starts this file as a script, which imports nothing of the package. A line of JSON in asks for a
template to be rendered, a line of JSON out says what came of it. The process limits its memory, its parent the time.
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any, NoReturn

MEMORY = 1 << 30  # bytes of address space
CHARACTERS = 1 << 24  # of a rendered text


def environment() -> Any:
    """A sandbox with the functions and filters that the templates of checkpoints use."""
    import jinja2
    from jinja2 import ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """`{% generation %} … {% endgeneration %}` marks what the model said, for training; here it says nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own escapes for HTML.
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    made.globals["dict"] = lambda *parts, **named: dict(*parts, **named)  # without the class's attributes
    return made


def rendered(sandbox: Any, template: str, values: dict[str, Any]) -> dict[str, str]:
    """{"text": …}, or {"error": what kind, "message": …} with the kinds `syntax`, `refused` and `failed`."""
    import jinja2

    try:
        pieces, size = [], 0
        for piece in sandbox.from_string(template).generate(**values):
            pieces.append(piece)
            size += len(piece)
            if size > CHARACTERS:
                return {"error": "failed", "message": f"its text is longer than {CHARACTERS:,} characters"}
        return {"text": "".join(pieces)}
    except jinja2.TemplateSyntaxError as error:
        return {"error": "syntax", "message": str(error)}
    except jinja2.TemplateError as error:
        return {"error": "refused", "message": str(error)}
    except MemoryError:
        return {"error": "failed", "message": f"it takes more than {MEMORY >> 20:,} MB of memory"}
    except RecursionError:
        return {"error": "failed", "message": "it calls itself without end"}
    except Exception as error:
        return {"error": "failed", "message": f"{type(error).__name__}: {error}"}


def limit_memory() -> None:
    """Take no more than MEMORY, where the system has such limits."""
    try:
        import resource
    except ImportError:
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    least = MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (least, most))


def main() -> None:
    """Answer line after line until the input ends."""
    limit_memory()
    sandbox = environment()
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        answer = json.dumps(rendered(sandbox, asked["template"], asked["values"]))
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
