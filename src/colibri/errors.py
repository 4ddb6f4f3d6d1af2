"""The exceptions of the package: each message says what failed, where, and what to do next."""

from __future__ import annotations

from typing import Any

_MOST = 8000  # characters of a message: it may quote a file


class ColibriError(Exception):
    """Base of every error this package raises on purpose; its text is meant for the user as it stands."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


class ExportError(ColibriError):
    """The model cannot be exported faithfully; the message names the part and a way out.

    `report` is what recognising its blocks found until then, where it is a PyTorch module.
    """

    report: Any = None


class ExportWarning(UserWarning):
    """The model was exported faithfully, but at a cost or with a conversion the user should know of."""


class ModelError(ColibriError):
    """A model file, or a call of a loaded model, is not valid.

    `code` is the engine's error code (see `colibri.format.spec.ERRORS`), or None where the engine was not asked.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code
