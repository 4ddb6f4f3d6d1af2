"""The C header and the document tables of tokenizer.bin, for tools/generate.py."""

from __future__ import annotations

from colibri.format import tokenizer_spec as spec
from colibri.format.spec import Record, field_dtype
from tools.c_text import aligned, comment, macro

_C_TYPES = {"u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t"}


def c_format() -> str:
    """The content of engine/lm/tokenizer_format.h."""
    lines = [
        *comment("The bytes of tokenizer.bin. Generated from colibri.format.tokenizer_spec; see docs/format.md."),
        "#ifndef COLIBRI_LM_TOKENIZER_FORMAT_H", "#define COLIBRI_LM_TOKENIZER_FORMAT_H", "",
        '#include "format/format.h"', "",
        f'#define TOKENIZER_MAGIC "{spec.MAGIC.decode()}"', f"#define TOKENIZER_VERSION {spec.FORMAT_VERSION}u",
    ]  # fmt: skip
    lines += _constants("Limits.", {n: str(value) for n, (value, _) in spec.LIMITS.items()}, spec.LIMITS)
    lines += _constants("Hashes.", {n: f"0x{value:08X}" for n, (value, _) in spec.HASHES.items()}, spec.HASHES)
    for field, names in spec.NAMES.items():
        lines += ["", *comment(f"{'Bits' if names.bits else 'Values'} {names.doc}."), f"enum clb_tok_{field} {{"]
        rows = [f"    {field.upper()}_{n.upper()} = {names[n]}," for n in names.meanings]
        last = f"ALL = {names.most}" if names.bits else f"COUNT = {names.most + 1}"
        lines += [*aligned(rows, list(names.meanings.values())), f"    {field.upper()}_{last}", "};"]
    for r in spec.RECORDS.values():
        lines += ["", *comment(r.doc), "typedef struct {", *_members(r), f"}} CLB_ALIAS clb_tok_{r.name};"]
        lines += [f'_Static_assert(sizeof(clb_tok_{r.name}) == {r.bytes}, "no padding");']
    lines += ["", *comment("Fields of the header that have a range: name, least, most.")]
    lines += macro("CLB_TOK_RANGES(RANGE)", [f"RANGE({n}, {least}u, {most}u)"
                                              for n, (least, most) in spec.RANGES.items()])  # fmt: skip
    lines += ["", *comment("Sections in their order: name, type of an element, the flag they belong to or 0, number "
                            "of elements by `head`, whose fields are in their ranges.")]  # fmt: skip
    lines += macro("CLB_TOK_SECTIONS(SECTION)", [_section(s) for s in spec.SECTIONS])
    return "\n".join([*lines, "", "#endif", ""])


def _constants(title: str, values: dict[str, str], table: dict[str, tuple[int, str]]) -> list[str]:
    rows = [f"#define {name} {value}u" for name, value in values.items()]
    return ["", f"/* {title} */", *aligned(rows, [meaning for _, meaning in table.values()], "")]


def _members(record: Record) -> list[str]:
    rows = [f"    {_C_TYPES[f.type]} {f.name}{f'[{f.count}]' if f.count > 1 else ''};" for f in record.fields]
    return aligned(rows, [f.doc.replace("`", "").replace("−", "-") for f in record.fields])


def _section(section: spec.Section) -> str:
    kind = _C_TYPES.get(section.type, f"clb_tok_{section.type}")
    flag = f"FLAG_{section.flag.upper()}" if section.flag else "0"
    count = " + ".join(f"head->{name}" for name in section.counts)
    count += f" * {section.times}" if section.times > 1 else ""
    count = " + ".join(part for part in (count, str(section.plus) if section.plus else "") if part)
    return f"SECTION({section.name}, {kind}, {flag}, {count})"


def doc_records() -> str:
    """The tables of docs/format.md on tokenizer.bin."""
    parts = []
    for r in spec.RECORDS.values():
        parts += [f"### {r.name} of tokenizer.bin ({r.bytes} bytes)", "", r.doc, ""]
        parts += ["| offset | type | field | meaning |", "|---:|---|---|---|"]
        offset = 0
        for f in r.fields:
            kind = f.type + (f"[{f.count}]" if f.count > 1 else "")
            bounds = _range(f.name) if r is spec.HEADER else ""
            parts.append(f"| {offset} | {kind} | `{f.name}` | {f.doc}{bounds} |")
            offset += field_dtype(f.type).itemsize * f.count
        parts.append("")
    parts += ["### Sections of tokenizer.bin", "", "| section | elements | content |", "|---|---|---|"]
    parts += [f"| {s.name} | {_elements(s)} | {s.doc} |" for s in spec.SECTIONS]
    parts += ["", "### Names of tokenizer.bin", "", "| name | value | meaning |", "|---|---:|---|"]
    parts += [f"| {field} {name} | {names[name]} | {meaning} |"
              for field, names in spec.NAMES.items() for name, meaning in names.meanings.items()]  # fmt: skip
    return "\n".join(parts)


def _range(field: str) -> str:
    return "; {} to {}".format(*spec.RANGES[field]) if field in spec.RANGES else ""


def _elements(section: spec.Section) -> str:
    total = " + ".join(section.counts)
    if section.times > 1:
        total = f"{section.times} · {total}"
    total = " + ".join(part for part in (total, str(section.plus) if section.plus else "") if part)
    return f"{section.type} × ({total})" + (f", with {section.flag}" if section.flag else "")
