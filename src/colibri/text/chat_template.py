"""Chat templates: messages as transformers gives them to a template, rendered within limits of time and memory."""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colibri.errors import ExportError, ModelError

__all__ = ["SECONDS", "normalized", "render"]

SECONDS = 10.0  # a template may take

_WORKER = Path(__file__).with_name("template_worker.py")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's thinking


class _Worker:
    """The process that renders, started when it is needed first, and again where it had to be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a fork must not speak into its parent's pipes

    def ask(self, line: bytes, seconds: float) -> dict[str, str]:
        """The worker's answer to a line; {"error": "failed", …} where it takes too long or dies."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = self._line(process, time.monotonic() + seconds)
            except BrokenPipeError:
                answer = b""
            except BaseException:
                self._end()
                raise
            if answer is None:
                self._end()
                return {"error": "failed", "message": f"it is not done after {seconds:g} seconds"}
            if not answer.endswith(b"\n"):
                self._end()
                return {"error": "failed", "message": "it ended the process that renders it"}
            found: dict[str, str] = json.loads(answer)
            return found

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            # -P: the package's own folder is not where the script's imports are looked for.
            command = [sys.executable, "-P", str(_WORKER)]
            try:
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                                 start_new_session=True)  # fmt: skip
            except OSError as error:
                raise ModelError(f"the process that renders chat templates cannot be started ({error.strerror}): raise "
                                 "the limit on processes (ulimit -u), or free memory") from None  # fmt: skip
            self._owner = os.getpid()
        return self._process

    @staticmethod
    def _line(process: subprocess.Popen[bytes], end: float) -> bytes | None:
        """The next line, what came of it where the process ends, or None where it takes too long."""
        assert process.stdout is not None
        parts: list[bytes] = []
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while not parts or not parts[-1].endswith(b"\n"):
                if not ready.select(max(end - time.monotonic(), 0)):
                    return None
                parts.append(os.read(process.stdout.fileno(), 1 << 16))
                if not parts[-1]:
                    break
        return b"".join(parts)

    def _end(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None

    def close(self) -> None:
        with self._lock:
            self._end()


_worker = _Worker()
atexit.register(_worker.close)


def render(
    template: str, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], *, seconds: float = SECONDS
) -> str:
    """The text of a conversation.

    messages: mappings with `role` and `content`; values: what else the template may use. Both are plain data: text,
    numbers, lists and mappings. Raises ModelError where the template is malformed, does not accept these messages,
    fails, or passes a limit; ExportError where Jinja is missing.
    """
    try:
        import jinja2  # noqa: F401  # the worker's
    except ImportError:
        raise ExportError("chat templates need jinja2: pip install 'colibri-moe[lm]'") from None
    try:
        asked = {"template": template, "values": {**values, "messages": normalized(messages)}}
        line = json.dumps(asked).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"messages and template variables must be plain data, as JSON has it: {error}") from None
    found = _worker.ask(line, seconds)
    if "text" in found:
        return found["text"]
    if found["error"] == "syntax":
        raise ModelError(f"the chat template is malformed ({found['message']}): copy it again")
    if found["error"] == "refused":
        raise ModelError(f"the chat template does not take these messages: {found['message']}")
    raise ModelError(f"the chat template fails on these messages ({found['message']}): copy it again, or mend it")


def normalized(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as transformers hands them to a template: keys without a value go, and thinking has its names.

    Raises ModelError where one is no mapping.
    """
    new = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise ModelError(f"a message is a mapping with `role` and `content`, not {message!r}")
        kept = {key: value for key, value in message.items() if value is not None}
        thinking = next((kept[name] for name in _REASONING if name in kept), None)
        new.append(kept if thinking is None else {"thinking": thinking, **kept, "reasoning_content": thinking})
    return new
