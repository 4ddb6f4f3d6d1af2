"""Journal of an interrupted export: a text file next to the partial model, one line for each finished piece.

Its first line is the fingerprint of what is being written. A line says a piece's number and checksum; whoever goes on
compares the checksum with what the file holds, so that nothing depends on the order in which writes reached the disk.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from pathlib import Path

from colibri.errors import ExportError


class Journal:
    """The journal at `path`, locked against other processes while it is open; `done` is what it says is finished.

    `discarded` tells whether there was one of something else, which is forgotten. Raises ExportError where another
    export holds it, OSError where it cannot be written.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        self.file = os.fdopen(number, "a+", encoding="ascii", errors="replace")
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            self.file.close()
            raise ExportError(f"{path} is no plain file of an export: remove it")
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.close()
            raise ExportError(f"{path} is in use: another export writes to this directory; wait for it") from None
        self.file.seek(0)
        text = self.file.read()
        first, *lines = text.split("\n")[:-1] or [""]  # a line without its end was cut off
        self.done: dict[int, int] = {}
        self.head = f"colibri export {fingerprint}"
        self.discarded = bool(text) and first != self.head
        if first == self.head:
            for line in lines:
                if match := re.fullmatch(r"(\d+) ([0-9a-f]{8})", line):
                    self.done[int(match[1])] = int(match[2], 16)
        self._rewrite()

    def _rewrite(self) -> None:
        """Written anew, so that no torn line stays in it."""
        self.file.truncate(0)
        self.file.write("\n".join([self.head, *(f"{n} {crc:08x}" for n, crc in self.done.items()), ""]))
        self.file.flush()

    def forget(self) -> None:
        """Nothing is finished: what it told of is gone."""
        self.done = {}
        self._rewrite()

    def add(self, number: int, crc: int) -> None:
        """A piece is finished."""
        self.done[number] = crc
        self.file.write(f"{number} {crc:08x}\n")
        self.file.flush()

    def remove(self) -> None:
        """The export is finished."""
        self.path.unlink()
        self.close()

    def close(self) -> None:
        """Leave it for the next export to go on with."""
        self.file.close()
