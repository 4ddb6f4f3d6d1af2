"""Reader of a folder that came from elsewhere: regular files inside it, none larger than expected.

A link may lead out of the folder to a private file, which would be copied into an export, or to a device that has no
end. Allowed are links that stay inside, and those of the Hugging Face cache, whose folders `snapshots/REVISION` link to
`blobs` beside `snapshots`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from colibri.common import strict_json
from colibri.common.names import check_name, shown
from colibri.errors import ColibriError, ExportError

JSON_BYTES = 1 << 26  # of a configuration or an index
TEXT_BYTES = 1 << 24  # of a template
TOKENIZER_BYTES = 1 << 28


class Folder:
    """A folder; every method raises `error`, naming the file, for what is no regular file of it or cannot be read."""

    def __init__(self, path: str | Path, error: type[ColibriError] = ExportError) -> None:
        self.path, self.error = Path(path), error

    def has(self, name: str) -> bool:
        """Whether there is something of that name, be it a link that leads nowhere."""
        return os.path.lexists(self._inside(name))

    def names(self, suffix: str | tuple[str, ...]) -> list[str]:
        """The names in the folder that end so, sorted."""
        try:
            return sorted(path.name for path in self.path.iterdir() if path.name.endswith(suffix))
        except OSError:
            return []

    def inner(self, name: str) -> Folder | None:
        """A folder in this one, None where there is none; a link to one is refused."""
        path = self._inside(name)
        if path.is_symlink():
            raise self.error(f"{path} is a link: put the folder itself there")
        return Folder(path, self.error) if path.is_dir() else None

    def file(self, name: str) -> Path:
        """Where the file of that name really lies."""
        path = self._inside(name)
        try:
            real = Path(os.path.realpath(path, strict=True))
            kind = real.lstat().st_mode
        except OSError as error:
            raise self.error(f"{path} cannot be read: {error.strerror}") from None
        if path.is_symlink() and not self._allowed(real):
            raise self.error(
                f"{path} is a link to {shown(str(real))}, outside the folder: put the file itself there (cp, or ln "
                "without -s)"
            )
        if not stat.S_ISREG(kind):
            raise self.error(f"{path} is not a regular file: put the file itself there")
        return real

    def open(self, name: str) -> BinaryIO:
        """The file of that name, opened for reading."""
        path = self.file(name)
        try:
            # Not blocking: the file may have been replaced by a pipe that never sends data.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            file = os.fdopen(descriptor, "rb")
        except OSError as error:
            raise self.error(f"{self.path / name} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            file.close()
            raise self.error(f"{self.path / name} is not a regular file: put the file itself there")
        return file

    def read(self, name: str, most: int = JSON_BYTES) -> bytes:
        """The bytes of a file of at most `most` bytes."""
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise self.error(f"{self.path / name} has {size:,} bytes, where at most {most:,} are expected")
            try:
                return file.read(most)
            except OSError as error:
                raise self.error(f"{self.path / name} cannot be read: {error.strerror}") from None

    def text(self, name: str) -> str:
        """The text of a file in UTF-8."""
        try:
            return self.read(name, TEXT_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{self.path / name} is not text in UTF-8 ({error}): copy it again") from None

    def json(self, name: str, most: int = JSON_BYTES) -> dict[str, Any]:
        """The object of names and values in a file."""
        try:
            found = strict_json.loads(self.read(name, most))
        except strict_json.JsonError as error:
            raise self.error(f"{self.path / name} {error}: correct it, or copy the JSON file again") from None
        if not isinstance(found, dict):
            raise self.error(f"{self.path / name} is not an object of names and values: copy it again")
        return found

    def _inside(self, name: str) -> Path:
        check_name(name, f"a file of {self.path}", self.error)
        if Path(name).name != name or name == "..":
            raise self.error(f"{shown(name)} is not the name of a file in {self.path}: put the file into the folder")
        return self.path / name

    def _allowed(self, real: Path) -> bool:
        folder = Path(os.path.realpath(self.path))
        if real.is_relative_to(folder):
            return True
        snapshots = [parent for parent in (folder, *folder.parents) if parent.parent.name == "snapshots"]
        return bool(snapshots) and real.parent == snapshots[0].parent.parent / "blobs"


__all__ = ["JSON_BYTES", "TEXT_BYTES", "TOKENIZER_BYTES", "Folder"]
