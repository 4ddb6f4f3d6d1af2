"""Bad files loaded from Python: each is named, with what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from colibri.errors import ModelError
from colibri.format import spec
from colibri.runtime import engine
from tests.hostile.driver import E
from tests.hostile.editor import HEADER, Editor, flipped_weight, image, sealed

FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "TRUNCATED"),
    "short text": (lambda data: b"hello\n", "TRUNCATED"),
    "text": (lambda data: b"This is no model.\n" * 100, "MAGIC"),
    "header alone": (lambda data: data[:HEADER], "TRUNCATED"),
    "last byte missing": (lambda data: data[:-1], "TRUNCATED"),
    "other version": (lambda data: data[:8] + bytes([spec.FORMAT_VERSION + 1]) + data[9:], "VERSION"),
    "flipped header bit": (lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], "HEADER"),
    "flipped metadata bit": (lambda data: data[:300] + bytes([data[300] ^ 1]) + data[301:], "CHECKSUM"),
    "flipped weight bit": (flipped_weight, "CHECKSUM"),
    "flipped expert bit": (lambda data: data[:-64] + bytes([data[-64] ^ 1]) + data[-63:], "CHECKSUM"),
}


@pytest.mark.parametrize("what", FILES)
def test_load_names_the_file_and_what_is_wrong_with_it(tmp_path: Path, what: str) -> None:
    damage, code = FILES[what]
    path = tmp_path / "strange name.bin"
    path.write_bytes(damage(image("top1")))
    with pytest.raises(ModelError, match=r"strange name\.bin") as caught:
        engine.load(path)
    assert caught.value.code == E[code]
    assert spec.error_text(E[code]) in str(caught.value)
    with pytest.raises(ModelError) as caught:
        engine.load(path.read_bytes())
    assert caught.value.code == E[code]


def test_load_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.bin does not exist"):
        engine.load(tmp_path / "absent.bin")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelError, match=r"folder is a directory without a model\.bin"):
        engine.load(tmp_path / "folder")
    (tmp_path / "folder" / "model.bin").mkdir()
    with pytest.raises(ModelError, match="folder"):
        engine.load(tmp_path / "folder")


INFO_TEXTS = {
    "not JSON": b"{",
    "not UTF-8": b'{"\xff": 1}',
    "not an object": b"[1, 2]",
    "deeply nested": b"[" * 100_000,
    "long number": b"1" * 100_000,
    "name of a surprising type": b'{"name": {"a": [1]}}',
}


@pytest.mark.parametrize("what", INFO_TEXTS)
def test_information_text_cannot_break_the_reader(what: str) -> None:
    edit = Editor("dense")
    text = INFO_TEXTS[what].ljust(edit["header.info_bytes"])
    # The text goes to the end of the metadata, which grows by whole alignments; the weights move behind it.
    old, room = edit["header.meta_bytes"], spec.align(len(text), 64)
    edit["header.meta_bytes"] += room
    edit["header.total_bytes"] += room
    edit.records["tensors"]["offset"] += np.uint64(room)
    edit["header.info_offset"], edit["header.info_bytes"] = old, len(text)
    data = sealed(bytearray(bytes(edit.image[:old]) + text.ljust(room) + bytes(edit.image[old:])))
    with pytest.raises(ModelError, match="information text") as caught:
        engine.load(data)
    assert caught.value.code == E["HEADER"]
