"""Reader of compiler output: the sections and symbols of ELF files (little-endian), the sections of WebAssembly."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

_SYMTAB, _DYNSYM = 2, 11
_FUNCTION = 2
_LOCAL = 0
_WASM_NAMES = {10: ".text", 11: ".data"}  # of the sections with code and with constants


@dataclass
class Elf:
    """An object, library or program: bytes by section, global symbols, and the bytes of every function by name."""

    sections: dict[str, int] = field(default_factory=dict)
    defined: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)
    functions: dict[str, int] = field(default_factory=dict)

    def bytes_of(self, *prefixes: str) -> int:
        """Bytes of the sections with these names, or with these names and a dot before more."""
        return sum(
            size for name, size in self.sections.items() if any(f"{name}.".startswith(f"{p}.") for p in prefixes)
        )


def read(path: Path) -> Elf:
    """Raises ValueError where the file is neither little-endian ELF nor WebAssembly."""
    data = path.read_bytes()
    if data[:4] == b"\0asm":
        return Elf(_wasm_sections(data))
    if data[:4] != b"\x7fELF" or data[5] != 1:
        raise ValueError(f"{path} is no little-endian ELF file")
    wide = data[4] == 2
    table, entry_size, count, names_at = struct.unpack_from("<40xQ10xHHH" if wide else "<32xI10xHHH", data)
    # name, type, offset, size, link, entsize
    shape = struct.Struct("<II16xQQI12xQ" if wide else "<II8xIII8xI")
    headers = [shape.unpack_from(data, table + n * entry_size) for n in range(count)]
    found = Elf()
    names = headers[names_at][2]
    for name, kind, offset, size, link, step in headers:
        text = _text(data, names + name)
        if text:
            found.sections[text] = found.sections.get(text, 0) + size
        if kind in (_SYMTAB, _DYNSYM):
            for at in range(offset + step, offset + size, step):
                _symbol(found, data, at, headers[link][2], wide)
    return found


def _symbol(found: Elf, data: bytes, at: int, names: int, wide: bool) -> None:
    if wide:
        name, info, section, size = struct.unpack_from("<IBxH8xQ", data, at)
    else:
        name, size, info, section = struct.unpack_from("<I4xIBxH", data, at)
    text = _text(data, names + name)
    if info >> 4 != _LOCAL and text:
        (found.defined if section else found.undefined).add(text)
    if info & 15 == _FUNCTION and section:
        found.functions[text] = size


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _wasm_sections(data: bytes) -> dict[str, int]:
    sections: dict[str, int] = {}
    at = 8
    while at < len(data):
        kind, at = data[at], at + 1
        size = shift = 0
        while True:  # LEB128
            size |= (data[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 128:
                break
        name = _WASM_NAMES.get(kind, f".wasm.{kind}")
        sections[name] = sections.get(name, 0) + size
        at += size
    return sections
