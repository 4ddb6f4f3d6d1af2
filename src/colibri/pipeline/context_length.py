"""Change of the context length of an exported language model: the result of a new export, without the weights.

Of a model file only the caches, what lies behind them, and the figures in the header depend on the context's length.
Tables of positions end somewhere, and no context goes beyond them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.emit.files import HEADER, MODEL, write_files
from colibri.emit.model_bin import sealed
from colibri.errors import ModelError
from colibri.format import spec
from colibri.format.layouts import attention_macs, cache_pages, delay_slots, page_bytes
from colibri.format.package import Package, find, open_package
from colibri.ir.graph import ENDLESS
from colibri.lowering.plan import place_kept

_REFLINK = 0x40049409  # FICLONE: share the blocks, where the file system can


@dataclass(frozen=True)
class Changed:
    """What became of a model, and which files beside it could not follow."""

    path: Path
    context_bytes: int
    context_bytes_before: int
    removed: tuple[str, ...]


def longest_context(package: Package) -> int:
    """Most tokens that the tables of a language model hold positions for; raises ModelError for another model."""
    if int(package.header["context_tokens"]) in (0, ENDLESS):
        raise ModelError(f"{package.path} is no language model: it has no context length")
    rows = [int(package.tensors[op["table"]]["cols"]) // int(op["turned"])
            for op in spec.named_all(_main(package), "rope")]  # fmt: skip
    return min(rows, default=spec.LIMIT)


def set_context(path: str | Path, tokens: int, in_place: bool = False) -> Changed:
    """Give an exported language model a context of `tokens`; its weights stay as they are.

    The file is copied, without taking space where the file system can, and replaced by rename: a program that has the
    old one mapped keeps it. With `in_place` a few pages of it are overwritten instead: no program may have it mapped,
    and what is cut off leaves a file that is refused. model.h follows. Raises ModelError where the tables hold fewer
    positions, or the certificate's text is longer.
    """
    image = find(path)
    package = open_package(image)
    if int(package.header["encoder_ops"]):
        raise ModelError(f"{image} has biases for the distances in texts of {int(package.header['context_tokens']):,} "
                         f"tokens: export the model with --context {tokens}")  # fmt: skip
    most, least = longest_context(package), max(1, int(package.header["golden_rows"]))
    if tokens > most:
        raise ModelError(
            f"{image} has positions for {most:,} tokens: export the model with --context {tokens} for more"
        )
    if tokens < least:
        raise ModelError(f"{image} has a certificate of {least} tokens, which would not fit a context of {tokens}")
    if not in_place and int(package.header["context_tokens"]) == tokens:
        size = int(package.header["context_bytes"])
        return Changed(image, size, size, ())
    head, header = _head(package, tokens)
    try:
        removed = _write(image, head, header, in_place)
    except OSError as error:
        raise ModelError(f"{image} cannot be written: {error.strerror}: free some space, or pass --in-place") from None
    return Changed(image, int(header["context_bytes"]), int(package.header["context_bytes"]), removed)


def _main(package: Package) -> Any:
    return package.ops[: int(package.header["main_ops"])]


def _head(package: Package, tokens: int) -> tuple[bytes, Any]:
    """Header and metadata for a context of `tokens`, and the header's record."""
    header, ops = package.header.copy(), package.ops.copy()
    main = ops[: int(header["main_ops"])]
    before = main.copy()
    first = min((int(op["work"]["offset"]) for op in _kept(main)), default=None)
    here = int(header["context_tokens"])
    end = int(header["context_bytes"])
    if first is not None:
        ends = int(header["cleared_bytes"]), end
        if _arrange(main, here, int(header["max_batch"]), first) != ends or (main != before).any():
            raise ModelError(f"{package.path} is arranged otherwise than this version does: export it again")
        header["cleared_bytes"], end = _arrange(main, tokens, int(header["max_batch"]), first)
    for field in ("worst_macs", "worst_work"):
        header[field] = int(header[field]) - _macs(main, here) + _macs(main, tokens)
    header["context_bytes"], header["context_tokens"] = end, tokens
    meta = bytearray(package.data[: int(header["meta_bytes"])].tobytes())
    at = int(header["ops_offset"])
    meta[at : at + ops.nbytes] = ops.tobytes()
    return sealed(meta, header), header


def _kept(ops: Any) -> list[Any]:
    """What keeps something of the text from one run to the next."""
    return [op for op in ops if _known(op).view in RESIZE]


def _known(op: Any) -> spec.Operation:
    return spec.OPERATIONS[int(op["code"])]


def _resize_delay(op: Any, tokens: int, samples: int) -> int:
    op["slots"] = delay_slots(tokens, int(op["steps"]), samples)
    return 4 * int(op["width"]) * int(op["slots"])


def _resize_cache(op: Any, tokens: int, samples: int) -> int:
    pages = cache_pages(tokens, int(op["window"]), samples)
    op["positions"] = pages * spec.PAGE
    page = page_bytes(spec.ENUMS["cache"][int(op["func"])], int(op["key"]), int(op["value"]))
    return int(op["key_heads"]) * pages * page


def _resize_delta(op: Any, tokens: int, samples: int) -> int:
    return 4 * int(op["rows"]) * int(op["key"]) * int(op["value"])


# How an operation that keeps something is set to a context, and the bytes that it then keeps, by its view.
RESIZE: dict[str, Callable[[Any, int, int], int]] = {
    "delay": _resize_delay, "delta": _resize_delta, "attention": _resize_cache,
}  # fmt: skip


def _arrange(ops: Any, tokens: int, samples: int, first: int) -> tuple[int, int]:
    """Set the sizes of what is kept as `lower` does, and the places; the ends of the delays and of the caches."""
    sizes: dict[int, int] = {}  # by old place
    kept = _kept(ops)
    for op in kept:
        size = RESIZE[_known(op).view](spec.named(op), tokens, samples)
        sizes.setdefault(int(op["work"]["offset"]), spec.align(size, spec.ALIGN_BUFFER))
    caches = {int(op["work"]["offset"]) for op in kept if "keeps_cache" in _known(op).traits}
    places, cleared, end = place_kept(sizes, caches, first)
    for op in kept:
        op["work"]["offset"] = places[int(op["work"]["offset"])]
    return cleared, end


def _macs(ops: Any, tokens: int) -> int:
    """Multiply-accumulates of attention at the end of a full context."""
    return sum(attention_macs(int(op["rows"]), int(op["key"]), int(op["value"]), int(op["window"]), tokens)
               for op in spec.named_all(ops, "attention"))  # fmt: skip


def _write(image: Path, head: bytes, header: Any, in_place: bool) -> tuple[str, ...]:
    """The model with its new head, and model.h with its figures; model.c, which holds the model itself, goes."""
    directory, whole = image.parent, image.name == MODEL  # a file of another name is no export's
    removed = tuple(name for name in ("model.c", "experts.ld") if whole and (directory / name).is_file())
    figures = directory / HEADER
    files: dict[Path, bytes | Path] = {}
    if whole and figures.is_file():
        files[figures] = _figures(figures.read_text(encoding="utf-8"), header).encode()
    staged = None if in_place else _copied(image, head)
    for name in removed:
        (directory / name).unlink()
    if staged is None:
        if files:
            figures.unlink()
        with image.open("r+b") as file:
            file.write(head)
            os.fsync(file.fileno())
    else:
        files = {image: staged, **files}
    if files:
        write_files(files, directory)
    return removed


def _copied(image: Path, head: bytes) -> Path:
    """A copy of the file with another head, beside it and on disk."""
    with tempfile.NamedTemporaryFile(dir=image.parent, prefix=f".{image.name}.", delete=False) as new:
        target = Path(new.name)
        try:
            with image.open("rb") as old:
                try:
                    fcntl.ioctl(new.fileno(), _REFLINK, old.fileno())
                except OSError:
                    shutil.copyfileobj(old, new, 1 << 24)
            new.seek(0)
            new.write(head)
            new.flush()
            os.fsync(new.fileno())
            shutil.copymode(image, target)
        except BaseException:
            with suppress(OSError):
                target.unlink()
            raise
    return target


def _figures(text: str, header: Any) -> str:
    """model.h with the figures that depend on the context's length, and the digest of its model."""
    for name, key in (("CONTEXT_BYTES", "context_bytes"), ("WORST_MACS", "worst_macs"), ("WORST_WORK", "worst_work")):
        text = re.sub(rf"(#define \w+_MODEL_{name}) \d+u", rf"\1 {int(header[key])}u", text)
    digest = f"{int(header['header_crc']):#010x}u"
    return re.sub(r"(#define \w+_MODEL_DIGEST) 0x[0-9a-f]{8}u", rf"\1 {digest}", text)


__all__ = ["Changed", "longest_context", "set_context"]
