"""Writer of model.bin on disk, one piece at a time and in several processes: no model is too large for it.

The file grows as `model.bin.partial` with its journal beside it, and takes its name when it is complete. An export that
was interrupted goes on where it stopped, after comparing every finished piece with its checksum.
"""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from typing import Any

import numpy as np

from colibri.emit import model_bin
from colibri.emit.crc import combine
from colibri.emit.files import write_files
from colibri.emit.journal import Journal
from colibri.emit.pieces import Piece, cut
from colibri.errors import ExportError
from colibri.format import spec
from colibri.lowering.program import Program
from colibri.reference.certificate import Certificate, Golden

OnProgress = Callable[[int, int, str], None]  # bytes done, bytes in all, the piece just finished
_READ = 1 << 22  # bytes read at once where finished pieces are checked
_WATCH = 0.5  # seconds between looks at whether the parent is alive


def write(
    program: Program,
    path: Path,
    certify: Callable[[Path], Certificate],
    *,
    info: Mapping[str, Any] | None = None,
    golden_rows: int = 0,
    expert_align: int = spec.ALIGN_EXPERT,
    workers: int = 1,
    key: str = "",
    companions: Callable[[Path], Mapping[Path, bytes]] = lambda file: {},
    on_progress: OnProgress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Write a planned program to `path`, in `workers` processes (1: in this one).

    `certify` gets the file once all weights are in it, with golden rows of zeros, and gives `golden_rows` golden rows.
    `companions` gets the complete file, and gives the files that take their places together with it.
    `key` stands for everything the weights depend on besides the program: an interrupted export whose program or key
    was another is not gone on with, and `say` gets a sentence about it.

    Raises ExportError where a weight cannot be read or the file not be written, KeyboardInterrupt on Ctrl-C, with a
    sentence; what is finished by then is kept.
    """
    info = info or {}
    at = model_bin.arrange(program, golden_rows, info, expert_align)
    pieces = cut(program, at)
    blank = [Golden(np.zeros(program.input_floats, np.float32), np.zeros(at.choices, np.uint16), 0)] * golden_rows
    nothing = model_bin.head(program, at, info, blank, (), 0, [0] * len(program.experts))
    what = (key, spec.VERSION, nothing, [(p.name, p.offset, p.size) for p in pieces])
    fingerprint = hashlib.sha256(repr(what).encode()).hexdigest()
    partial = path.with_name(path.name + ".partial")
    with _writing(partial):
        path.parent.mkdir(parents=True, exist_ok=True)
        journal = Journal(path.with_name(path.name + ".journal"), fingerprint)
    try:
        with _opened(partial, at.total, journal, say) as file:
            _weights(file, pieces, journal, workers, on_progress or (lambda done, total, name: None))
            crcs = _sections(pieces, journal.done)
            checksums = crcs.get(-1, 0), [crcs.get(n, 0) for n in range(len(program.experts))]
            with _writing(partial):
                _put(file, 0, model_bin.head(program, at, info, blank, (), *checksums))
            found = certify(partial)
            with _writing(partial):
                _put(file, 0, model_bin.head(program, at, info, found.golden, found.frequencies, *checksums))
                os.fsync(file)
            write_files({path: partial, **companions(partial)}, path)
            with _writing(partial):
                journal.remove()
    finally:
        journal.close()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}: free some space, or choose another output "
                          "directory; then run the same export again to go on with it") from None  # fmt: skip


@contextmanager
def _opened(partial: Path, total: int, journal: Journal, say: Callable[[str], None]) -> Iterator[int]:
    """The partial file at its full size, the one an earlier export left where the journal tells of it."""
    if journal.discarded:
        say("an unfinished export of another model or with other options is discarded")
    if partial.is_symlink() or not (partial.is_file() and partial.stat().st_size == total):
        journal.forget()
    with _writing(partial):
        if not journal.done:  # a new file, for a worker of a killed export may still be writing to the old one
            partial.unlink(missing_ok=True)
        else:
            say(f"going on with an unfinished export: {len(journal.done)} parts are there")
        new = os.O_CREAT | os.O_EXCL if not journal.done else 0
        file = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | new, 0o666)
    try:
        with _writing(partial):
            _allocate(file, total)
        yield file
    finally:
        os.close(file)


def _allocate(file: int, total: int) -> None:
    """Have the disk set the bytes aside, so that it is not full after hours."""
    try:
        os.posix_fallocate(file, 0, total)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(error.errno, f"{error.strerror}, {total:,} bytes are needed") from None
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(file, total)  # a file system that sets nothing aside


def _put(file: int, offset: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        offset, view = offset + written, view[written:]


# --- the pieces -------------------------------------------------------------------------------------------------------

_work: tuple[int, Sequence[Piece], Mapping[int, int]] | None = None  # file, pieces, checksums; inherited by workers


def _weights(file: int, pieces: Sequence[Piece], journal: Journal, workers: int, on_progress: OnProgress) -> None:
    """Every piece into the file and the journal."""
    global _work
    before = dict(journal.done)
    total, done = sum(piece.size for piece in pieces), 0
    order = sorted(range(len(pieces)), key=lambda n: n not in before)  # what is to be checked first

    def finished(number: int, crc: int) -> None:
        nonlocal done
        if before.get(number) != crc:
            journal.add(number, crc)
        done += pieces[number].size
        on_progress(done, total, pieces[number].name)

    _work = file, pieces, before
    try:
        if workers > 1:
            _in_processes(order, workers, finished)
        else:
            for number in order:
                finished(*_compute(number))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted after {done:,} of {total:,} bytes: run the same export again to go on "
                                "with it") from None  # fmt: skip
    finally:
        _work = None


def _in_processes(order: Sequence[int], workers: int, finished: Callable[[int, int], None]) -> None:
    context = multiprocessing.get_context("fork")  # the weights are closures, which no other way would take along
    with ProcessPoolExecutor(workers, context, _enter, (os.getpid(),)) as pool:
        futures: set[Future[tuple[int, int]]] = set()
        told: set[Future[tuple[int, int]]] = set()
        try:
            futures.update(pool.submit(_compute, number) for number in order)
            for future in as_completed(futures):
                result = future.result()
                told.add(future)
                finished(*result)
        except BrokenProcessPool:
            raise ExportError("a worker process was killed, perhaps for lack of memory: run the same export again with "
                              "fewer workers to go on with it") from None  # fmt: skip
        except BaseException:
            # What is being computed is waited for and kept.
            pool.shutdown(wait=True, cancel_futures=True)
            for future in futures - told:
                if not future.cancelled() and future.exception() is None:
                    finished(*future.result())
            raise


def _enter(parent: int) -> None:
    """A worker leaves Ctrl-C to its parent, and goes when that is gone."""
    signal(SIGINT, SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _compute(number: int) -> tuple[int, int]:
    """Write a piece, unless it is there already; its number and checksum."""
    assert _work is not None
    file, pieces, before = _work
    piece = pieces[number]
    if number in before and _crc(file, piece) == before[number]:
        return number, before[number]
    crc, at = 0, piece.offset
    for block in piece.data():
        crc = zlib.crc32(block, crc)
        with _writing(Path(piece.name)):
            _put(file, at, block)
        at += len(block)
    if at != piece.offset + piece.size:
        raise ExportError(f"{piece.name} takes {at - piece.offset} bytes, not {piece.size}: please report this model")
    return number, crc


def _crc(file: int, piece: Piece) -> int:
    crc, at, end = 0, piece.offset, piece.offset + piece.size
    while at < end:
        data = os.pread(file, min(_READ, end - at), at)
        if not data:
            break
        crc, at = zlib.crc32(data, crc), at + len(data)
    return crc


def _sections(pieces: Sequence[Piece], crcs: Mapping[int, int]) -> dict[int, int]:
    """The checksum of every section from those of its pieces."""
    sections: dict[int, int] = {}
    for number, piece in enumerate(pieces):
        crc = crcs[number]
        before = sections.get(piece.section)
        sections[piece.section] = crc if before is None else combine(before, crc, piece.size)
    return sections
